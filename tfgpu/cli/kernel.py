"""`tfgpu build-kernel`: C++ and CUDA sources as a library of operations."""

from pathlib import Path
from typing import Annotated

import typer

from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@app.command(
    "build-kernel",
    help="Build a library of your own operations for the installed TensorFlow, with CUDA kernels where there is nvcc.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu build-kernel examples/kernels/bias_gelu.cc examples/kernels/bias_gelu.cu\n\n"
        "tfgpu build-kernel fused.cc fused.cu --cuda --arch sm_90 --output libfused.so"
    ),
)
def build_kernel(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE...", exists=True, dir_okay=False, help="C++ files, and CUDA files (.cu)."),
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The library. Left out: libNAME.so beside the first source.")
    ] = None,
    cuda: Annotated[
        bool | None,
        typer.Option(
            "--cuda/--no-cuda", help="Insist on the CUDA files, or leave them out. Neither: if there is nvcc."
        ),
    ] = None,
    arch: Annotated[str, typer.Option(metavar="NAME", help="nvcc's -arch: all-major, native, sm_90.")] = "all-major",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For each call of a compiler.")] = 600.0,
) -> None:
    start_tensorflow()
    building = imported("tfgpu.interop.building")
    library = building.build_kernel(sources, output=output, cuda=cuda, architectures=arch, timeout_s=timeout)
    print(library)

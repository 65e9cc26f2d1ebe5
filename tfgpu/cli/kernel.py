"""`tfgpu build-kernel`: builds a library of operations from C++ and CUDA sources."""

from pathlib import Path
from typing import Annotated

import typer

from tfgpu.cli import screen
from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@app.command(
    "build-kernel",
    cls=screen.Command,
    hidden=True,
    help="Build a library of custom operations for the installed TensorFlow, with CUDA kernels if nvcc is installed.",
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
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The library \\[libNAME.so beside the first source]."),
    ] = None,
    cuda: Annotated[
        bool | None,
        typer.Option(
            "--cuda/--no-cuda", help="Require the CUDA files, or skip them. Default: build them if nvcc is installed."
        ),
    ] = None,
    arch: Annotated[str, typer.Option(metavar="NAME", help="nvcc's -arch: all-major, native, sm_90.")] = "all-major",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Limit for each compiler call.")] = 600.0,
) -> None:
    start_tensorflow()
    building = imported("tfgpu.interop.building")
    library = building.build_kernel(sources, output=output, cuda=cuda, architectures=arch, timeout_s=timeout)
    print(library)

"""`tfgpu build-kernel`: builds a library of operations from C++ and CUDA sources."""

from pathlib import Path

import typer

from tfgpu.cli import screen
from tfgpu.cli.flags import argument, option
from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@app.command(
    "build-kernel",
    cls=screen.Command,
    hidden=True,
    help="Build a library of custom operations for the installed TensorFlow, with CUDA kernels if nvcc is installed.",
    epilog=screen.examples(
        "tfgpu build-kernel examples/kernels/bias_gelu.cc examples/kernels/bias_gelu.cu",
        "tfgpu build-kernel fused.cc fused.cu --cuda --arch sm_90 --output libfused.so",
    ),
)
def build_kernel(
    sources: argument(list[Path], "SOURCE", "C++ files, and CUDA files (.cu).", exists=True, dir_okay=False),
    output: option(Path | None, "The library [libNAME.so beside the first].", "--output", "-o", metavar="FILE") = None,
    cuda: option(bool | None, "Require the CUDA files, or skip them [build them if nvcc is installed].") = None,
    architectures: option(str, "nvcc's -arch: all-major, native, sm_90.", "--arch", metavar="NAME") = "all-major",
    timeout_s: option(float, "Limit for each compiler call.", "--timeout", metavar="SECONDS") = 600.0,
) -> None:
    start_tensorflow()
    building = imported("tfgpu.interop.operations")
    library = building.build_kernel(sources, output=output, cuda=cuda, architectures=architectures, timeout_s=timeout_s)
    print(library)

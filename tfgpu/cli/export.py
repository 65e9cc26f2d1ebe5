"""`tfgpu export`: writes a model for other programs; `tfgpu build-kernel`: a library of operations."""

from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_exists, check_json, option, put_json
from tfgpu.cli.start import imported, started

app = typer.Typer()


@screen.command(app, "export", "model path formats example check overwrite as_json json_to")
def export(
    model: argument(Path, "MODEL", "A run directory, or a .keras file."),
    path: argument(Path, "OUT", "Where to write; the format's suffix is added."),
    formats: option(
        list[str] | None, "savedmodel, onnx or litert; can be repeated [savedmodel].", "--format NAME"
    ) = None,
    example: option(
        Path | None,
        "Rows to compare on: .txt, .json, .npy or .npz. A .txt has one text per line, an .npz an array for each input. "
        "Required for models with text inputs or without a known input shape.",
        "FILE",
    ) = None,
    check: option(bool, "Run the exported model and compare its outputs.") = True,
    overwrite: option(bool, "Replace an earlier export.", "--overwrite") = False,
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    """Export a model as a SavedModel, ONNX or LiteRT.

    Export a trained model as a SavedModel, ONNX or LiteRT, and compare the outputs with the model's.

    tfgpu export runs/digits served/digits/1
    tfgpu export model.keras model --format onnx --format litert
    tfgpu export runs/reviews served/reviews/1 --example reviews.txt
    """
    check_json(json_to)
    check_exists(model, "a .keras file or a run directory")
    exporting = started("tfgpu.serving.exporting")
    rows = None if example is None else imported("tfgpu.serving.examples").read(example)
    made = [
        exporting.export(model, path, format=name, example=rows, check=check, overwrite=overwrite)
        for name in dict.fromkeys(formats or ["savedmodel"])
    ]
    if put_json([{**asdict(each), "path": str(each.path)} for each in made], as_json=as_json, json_to=json_to):
        return
    console = Console(highlight=False, soft_wrap=True)
    for each in made:
        compared = "not compared" if each.difference is None else f"outputs differ by {each.difference:.0e}"
        console.print(f"{each.path}  {each.format}, {each.bytes / 2**20:.2f} MiB, {compared}", markup=False)
        for name, (shape, kind) in each.inputs.items():
            sizes = ", ".join(["rows", *("any" if size is None else str(size) for size in shape[1:])])
            console.print(f"  {name}: {kind} ({sizes})", markup=False)


@screen.command(app, "build-kernel", hidden=True)
def build_kernel(
    sources: argument(list[Path], "SOURCE", "C++ files, and CUDA files (.cu).", exists=True, dir_okay=False),
    output: option(Path | None, "The library [libNAME.so beside the first].", "--output -o FILE") = None,
    cuda: option(bool | None, "Require the CUDA files, or skip them [build them if nvcc is installed].") = None,
    architectures: option(str, "nvcc's -arch: all-major, native, sm_90.", "--arch NAME") = "all-major",
    timeout_s: option(float, "Limit for each compiler call.", "--timeout SECONDS") = 600.0,
) -> None:
    """Build a library of custom operations for the installed TensorFlow, with CUDA kernels if nvcc is installed.

    tfgpu build-kernel examples/kernels/bias_gelu.cc examples/kernels/bias_gelu.cu
    tfgpu build-kernel fused.cc fused.cu --cuda --arch sm_90 --output libfused.so
    """
    build = started("tfgpu.interop.operations").build_kernel
    print(build(sources, output=output, cuda=cuda, architectures=architectures, timeout_s=timeout_s))

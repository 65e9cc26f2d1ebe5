"""`tfgpu export`: writes a model for other programs."""

from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_exists, check_json, option, put_json
from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@app.command(
    "export",
    cls=screen.first("model", "path", "formats", "example", "check", "overwrite", "as_json", "json_to"),
    short_help="Export a model as a SavedModel, ONNX or LiteRT.",
    help="Export a trained model as a SavedModel, ONNX or LiteRT, and compare the outputs with the model's.",
    epilog=screen.examples(
        "tfgpu export runs/digits served/digits/1",
        "tfgpu export model.keras model --format onnx --format litert",
        "tfgpu export runs/reviews served/reviews/1 --example reviews.txt",
    ),
)
def export(
    model: argument(Path, "MODEL", "A run directory, or a .keras file."),
    path: argument(Path, "OUT", "Where to write; the format's suffix is added."),
    formats: option(
        list[str] | None, "savedmodel, onnx or litert; can be repeated [savedmodel].", "--format", metavar="NAME"
    ) = None,
    example: option(
        Path | None,
        "Rows to compare on: .txt, .json, .npy or .npz. A .txt has one text per line, an .npz an array for each input. "
        "Required for models with text inputs or without a known input shape.",
        metavar="FILE",
    ) = None,
    check: option(bool, "Run the exported model and compare its outputs.") = True,
    overwrite: option(bool, "Replace an earlier export.", "--overwrite") = False,
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    check_json(json_to)
    check_exists(model, "a .keras file or a run directory")
    start_tensorflow()
    exporting = imported("tfgpu.serving.exporting")
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

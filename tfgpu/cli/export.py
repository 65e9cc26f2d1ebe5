"""`tfgpu export`: writes a model for other programs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tfgpu.cli import completion, screen
from tfgpu.cli.flags import AsJson, JsonTo, check_json, put_json
from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@app.command(
    "export",
    cls=screen.first(
        model=None,
        path=None,
        formats="savedmodel, onnx or litert; can be repeated [savedmodel].",
        example="Rows to compare on: .txt, .json, .npy or .npz.",
        check=None,
        overwrite=None,
        as_json=None,
        json_to=None,
    ),
    short_help="Write a model as a SavedModel, ONNX or LiteRT.",
    help="Write a trained model as a SavedModel, ONNX or LiteRT, and compare its outputs with the model's.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu export runs/digits served/digits/1\n\n"
        "tfgpu export model.keras model --format onnx --format litert\n\n"
        "tfgpu export runs/reviews served/reviews/1 --example reviews.txt"
    ),
)
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run directory, or a .keras file.")],
    path: Annotated[Path, typer.Argument(metavar="OUT", help="The output; the format's suffix is added.")],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="savedmodel, onnx or litert; can be repeated \\[savedmodel].",
            autocompletion=completion.completing(completion.formats),
        ),
    ] = None,
    example: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows to compare on: .txt (one text per line), .json, .npy, or .npz with an array for each input. "
            "Required for models with text inputs or without a known input shape.",
        ),
    ] = None,
    check: Annotated[bool, typer.Option(help="Run the exported model and compare its outputs.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    check_json(json_to)
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

"""`tfgpu profile`: a picture of how a model runs as a pipeline on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@app.command(
    help="Draw how a model runs as a pipeline: which stage computes which micro-batch when, as measured.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu profile --model mlp --stages 4 --microbatches 8 -o schedule.html\n\n"
        "tfgpu profile --model my_models:build --stages 8 --schedule interleaved --devices 4 -o schedule.png"
    ),
)
def profile(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="A builder's name, or module:function of your own.")
    ] = "mlp",
    stages: Annotated[int, typer.Option(min=1, help="How many stages the model is cut into.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="How many parts the batch is cut into.")] = 8,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="1f1b, gpipe or interleaved.")] = "1f1b",
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="How many devices; logical CPUs where there is no GPU. Default: by stages."),
    ] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option("--cut", metavar="LAYER", help="A layer that begins a stage; one option a stage but the first."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the batch. Default: 8 a micro-batch.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured; the middle one is drawn.")] = 3,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The picture: .png, .svg or .html.")
    ] = Path("schedule.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print all cells as JSON.")] = False,
) -> None:
    start_tensorflow()
    measure = imported("tfgpu.measure.stages")
    with Console(stderr=True).status("training a few steps"):
        found = measure.profile_stages(
            model,
            output,
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            devices=devices,
            cuts=cut or None,
            rows=rows,
            steps=steps,
        )
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        Console(highlight=False, soft_wrap=True).print(f"{measure.summary(found)}\nThe picture: {output}", markup=False)

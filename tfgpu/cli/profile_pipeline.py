"""`tfgpu profile pipeline`: a picture of how a model runs as a pipeline."""

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, check_json, option, put_json, with_options
from tfgpu.cli.start import imported, start_tensorflow

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tfgpu profile pipeline`."""

    model: option(str, "A builder's name, or module:function.", metavar="NAME") = "mlp"
    stages: option(int, "Number of pipeline stages.", min=1, metavar="N") = 4
    microbatches: option(int, "Number of micro-batches.", min=1, metavar="N") = 8
    pipeline_schedule: option(str, "1f1b, gpipe or interleaved.", metavar="NAME") = "1f1b"
    devices: option(int | None, "Number of devices [from the stages].", min=1, metavar="N") = None
    cuts: option(list[str] | None, "A layer that begins a stage; repeatable.", "--cut", metavar="LAYER") = None
    batch: option(int | None, "Batch [8 per micro-batch].", min=1, metavar="N") = None
    steps: option(int, "Steps to measure; the median is drawn.", min=1, metavar="N") = 3
    output: option(Path, "The picture: .html, .svg, .png or .json.", "--output", "-o", metavar="FILE") = Path(
        "schedule.html"
    )
    as_json: AsJson = False
    json_to: JsonTo = None


@app.command(
    "profile pipeline",
    cls=screen.Command,
    short_help="Draw how a model runs as a pipeline.",
    help="Train a model as a pipeline for a few steps, and draw which stage works when.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu profile pipeline --model mlp --stages 4 --microbatches 8\n\n"
        "tfgpu profile pipeline --model my_models:build --stages 8 --pipeline-schedule interleaved --devices 4 "
        "-o schedule.png"
    ),
)
@with_options(Options)
def profile_pipeline(options: Options) -> None:
    check_json(options.json_to)
    start_tensorflow()
    measure = imported("tfgpu.measure.stages")
    settings = {name: getattr(options, name) for name in ("stages", "microbatches", "steps")}
    given = {"devices": options.devices, "cuts": options.cuts or None, "batch": options.batch}
    settings |= {name: value for name, value in given.items() if value is not None}
    with Console(stderr=True).status("training a few steps"):
        found = measure.profile_stages(options.model, options.output, schedule=options.pipeline_schedule, **settings)
    if not put_json(found.as_json(), as_json=options.as_json, json_to=options.json_to):
        Console(highlight=False, soft_wrap=True).print(
            f"{measure.summary(found)}\nThe picture: {options.output}", markup=False
        )

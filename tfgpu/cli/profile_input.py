"""`tfgpu profile input`: how fast this machine reads and trains a recipe's data."""

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from tfgpu.cli import screen
from tfgpu.cli.flags import (
    AllowCode,
    AsJson,
    JsonTo,
    RecipeName,
    check_json,
    option,
    put_json,
    recipe_of,
    with_settings,
)
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.measure import rates
from tfgpu.recipes import recipe as recipes

app = typer.Typer()


@app.command(
    "profile input",
    short_help="Measure how fast data is read, and what would help.",
    cls=screen.first(
        *("name", "data", "model", "global_batch", "image_size", "workers", "seconds", "repeats", "as_json", "json_to"),
        data="digits, tfds:NAME, a folder, a file, or module:function.",
        model="cnn, resnet, vit, ResNet50, ..., or module:function.",
    ),
    help="Measure the input, the model and both together; name the bottleneck and the settings that help.",
    epilog=screen.examples(
        "tfgpu profile input digits",
        "tfgpu profile input --data photos/ --image-size 224 --batch 64 -n 4",
        "tfgpu profile input runs/best/config.yaml --json",
    ),
)
@with_settings
def profile_input(
    name: RecipeName = None,
    allow_code: AllowCode = False,
    workers: option(int, "Measure the input of one of N workers.", "--workers", "-n", metavar="N") = 1,
    seconds: option(float, "Length of each measurement.") = 1.0,
    repeats: option(int, "Measurements of each rate.") = 3,
    as_json: AsJson = False,
    json_to: JsonTo = None,
    **flags: Any,
) -> None:
    recipe = recipe_of(name, flags, allow_code=allow_code)
    recipes.check(recipe)
    rates.check(seconds, repeats)
    check_json(json_to)
    with Console(stderr=True).status("starting TensorFlow") as status:
        start_tensorflow()
        options = {"seconds": seconds, "repeats": repeats, "progress": lambda text: status.update(f"measuring: {text}")}
        if workers == 1:
            measured = imported("tfgpu.measure.input").measure_input(recipe, **options)
        else:
            measured = imported("tfgpu.measure.workers").measure_workers(recipe, workers, **options)
    if put_json(measured.as_json(), as_json=as_json, json_to=json_to):
        return
    if workers == 1:
        _show_input(measured)
    else:
        _show_workers(measured)


def _show_input(measured: Any) -> None:
    console = Console(highlight=False)
    about = measured.facts
    shape = "×".join(str(n) for n in about["input_shape"])
    console.print(
        f"{measured.recipe.model} on {measured.recipe.data}: examples of {shape}, "
        f"batches of {about['global_batch']:,}, {', '.join(about['devices'])}, {about['cores']} CPU cores\n",
        markup=False,
    )
    table = screen.table("", "examples/s", "spread", "", right=("examples/s", "spread"), fold=True)
    for name, label in (("input", "input alone"), ("model", "model alone"), ("together", "together")):
        rate = getattr(measured, name)
        mark = "[yellow]the bottleneck[/]" if name == measured.bottleneck else ""
        table.add_row(f"[bold]{label}[/]", f"{rate.median:,.0f}", f"{rate.spread:.0%}", mark)
    console.print(table)
    console.print(f"\n{escape(measured.advice)}\n", soft_wrap=True)
    tried = screen.table("the input with", "examples/s", "ratio", "", right=("examples/s", "ratio"), fold=True)
    for trial in measured.trials:
        color = "green" if trial.ratio >= 1.1 else "red" if trial.ratio <= 0.9 else "none"
        tried.add_row(
            escape(trial.setting),
            f"{trial.rate.median:,.0f}",
            f"[{color}]{trial.ratio:.2f}[/]",
            f"[dim]{escape(trial.note)}[/]",
        )
    console.print(tried)


def _show_workers(measured: Any) -> None:
    console, about = Console(highlight=False), measured.facts
    shape = "×".join(str(n) for n in about["input_shape"])
    console.print(
        f"The input of {measured.recipe.data} on one of {measured.workers} workers: examples of {shape}, global "
        f"batches of {about['global_batch']:,}, {about['cores']} CPU cores\n",
        markup=False,
    )
    numbers = ("examples/s", "spread", "CPU µs each")
    table = screen.table("", *numbers, right=numbers, fold=True)
    for name, label in (("alone", "one device"), ("worker", "a worker")):
        rate = getattr(measured, name)
        table.add_row(
            f"[bold]{label}[/]", f"{rate.median:,.0f}", f"{rate.spread:.0%}", f"{measured.cpu_us[name].median:,.0f}"
        )
    console.print(table)
    console.print(
        f"\n{measured.workers} such workers, each with a machine like this, supply {measured.supply:,.0f} examples/s.\n"
    )
    done = screen.table("stage", "work / share", "", right=("work / share",), fold=True)
    for stage in measured.stages:
        everywhere = "on every worker" if stage.work == measured.workers else ""
        note = ", ".join(filter(None, (everywhere, stage.note)))
        done.add_row(stage.name, f"{stage.work:.2f}", f"[dim]{escape(note)}[/]")
    console.print(done)

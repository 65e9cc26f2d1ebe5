"""`tfgpu profile input`: how fast this machine reads and trains a recipe's data."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfgpu.cli import completion, screen
from tfgpu.cli.flags import ALLOW_CODE, OWN_JSON, RECIPE_NAME, check_json, given, put_json, with_settings
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.measure import rates
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.trust import refuse_code

app = typer.Typer()
OWN = {
    "name": RECIPE_NAME,
    "allow_code": ALLOW_CODE,
    "workers": (int, 1, ["--workers", "-n"], "N", "Measure the input of one of so many workers instead [1]."),
    "seconds": (float, 1.0, ["--seconds"], "NUMBER", "Length of each measurement [1]."),
    "repeats": (int, 3, ["--repeats"], "INTEGER", "Measurements of each rate [3]."),
    **OWN_JSON,
}


@app.command(
    "profile input",
    short_help="Measure how fast data is read, and what would help.",
    cls=screen.first(
        name="A ready recipe (tfgpu train --list) or a YAML file.",
        data="digits, tfds:NAME, a folder, a file, or module:function.",
        model="cnn, resnet, vit, ResNet50, ..., or module:function.",
        global_batch="Examples per step, over all replicas together [32].",
        image_size="Resize images to HEIGHTxWIDTH.",
        workers="Measure the input of one of N workers [1].",
        seconds=None,
        repeats=None,
        as_json=None,
        json_to=None,
    ),
    help="Measure the input, the model and both together; name the bottleneck and the settings that help.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu profile input digits\n\n"
        "tfgpu profile input --data photos/ --image-size 224 --batch 64 -n 4\n\n"
        "tfgpu profile input runs/best/config.yaml --json"
    ),
)
@with_settings(OWN, names={"name": completion.ready_recipes})
def profile_input(
    *,
    name: str | None,
    allow_code: bool,
    workers: int,
    seconds: float,
    repeats: int,
    as_json: bool,
    json_to: Path | None,
    **flags: Any,
) -> None:
    flags, settings = given(flags), {} if name is None else ready.read(name)
    refuse_code(settings, str(name), allow=allow_code, given=flags)
    recipe = recipes.make({**settings, **flags}, source=None if name is None else str(ready.path(name)))
    recipes.check(recipe)
    rates.check(seconds, repeats)
    check_json(json_to)
    with Console(stderr=True).status("starting TensorFlow") as status:
        start_tensorflow()
        options = {
            "seconds": seconds,
            "repeats": repeats,
            "progress": lambda text: status.update(f"measuring: {text}"),
        }
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


def _table(*columns: tuple[str, str]) -> Table:
    """A table without lines; each column has a heading and a side."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in columns:
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def _show_input(measured: Any) -> None:
    console = Console(highlight=False)
    about = measured.facts
    shape = "×".join(str(n) for n in about["input_shape"])
    console.print(
        f"{measured.recipe.model} on {measured.recipe.data}: examples of {shape}, "
        f"batches of {about['global_batch']:,}, {', '.join(about['devices'])}, {about['cores']} CPU cores\n",
        markup=False,
    )
    table = _table(("", "left"), ("examples/s", "right"), ("spread", "right"), ("", "left"))
    for name, label in (("input", "input alone"), ("model", "model alone"), ("together", "together")):
        rate = getattr(measured, name)
        mark = "[yellow]the bottleneck[/]" if name == measured.bottleneck else ""
        table.add_row(f"[bold]{label}[/]", f"{rate.median:,.0f}", f"{rate.spread:.0%}", mark)
    console.print(table)
    console.print(f"\n{escape(measured.advice)}\n", soft_wrap=True)
    tried = _table(("the input with", "left"), ("examples/s", "right"), ("ratio", "right"), ("", "left"))
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
    table = _table(("", "left"), ("examples/s", "right"), ("spread", "right"), ("CPU µs each", "right"))
    for name, label in (("alone", "one device"), ("worker", "a worker")):
        rate = getattr(measured, name)
        table.add_row(
            f"[bold]{label}[/]", f"{rate.median:,.0f}", f"{rate.spread:.0%}", f"{measured.cpu_us[name].median:,.0f}"
        )
    console.print(table)
    console.print(
        f"\n{measured.workers} such workers, each with a machine like this, supply {measured.supply:,.0f} examples/s.\n"
    )
    done = _table(("stage", "left"), ("work / share", "right"), ("", "left"))
    for stage in measured.stages:
        everywhere = "on every worker" if stage.work == measured.workers else ""
        note = ", ".join(filter(None, (everywhere, stage.note)))
        done.add_row(stage.name, f"{stage.work:.2f}", f"[dim]{escape(note)}[/]")
    console.print(done)

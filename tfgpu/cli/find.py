"""`tfgpu tune batch-size` and `learning-rate`: finds them for a recipe by short trainings."""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from tfgpu import atomic
from tfgpu.cli import screen
from tfgpu.cli.flags import (
    AllowCode,
    AsJson,
    Debug,
    JsonTo,
    RecipeName,
    check_json,
    flag_of,
    option,
    put_json,
    recipe_of,
    with_settings,
)
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.errors import InputError
from tfgpu.parallel.planning.hardware import bytes_of, shown
from tfgpu.recipes import recipe as recipes
from tfgpu.tune.scaling import rate_text

app = typer.Typer()
_run = functools.partial(option, panel="Run")
_ROWS = 10
PLOT, RESULT, RECIPE = "plot.png", "result.json", "recipe.yaml"
_Output = _run(
    Path | None,
    "A folder for result.json and recipe.yaml (for `tfgpu train`); learning-rate adds plot.png.",
    *("--output", "-o"),
    metavar="DIR",
)
_Scale = _run(
    str,
    "How the learning rate scales: linear, sqrt, none or auto. auto: linear for sgd, momentum, lars, else sqrt.",
    metavar="NAME",
)


@app.command(
    "tune batch-size",
    cls=screen.first(
        *("name", "lowest", "highest", "rate_only", "scale", "memory_limit_bytes"),
        *("timeout_s", "output", "as_json", "json_to"),
    ),
    short_help="Find the batch sizes that fit, and the fastest.",
    help="Train some steps with one batch size after the other: which fit, and their rate in examples per second.",
    epilog=screen.examples(
        "tfgpu tune batch-size digits",
        "tfgpu tune batch-size cifar10 --lowest 64 --highest 4096 --output found/cifar10",
        "tfgpu tune batch-size imagenet --rate-only --device-memory 16GB --precision mixed_bfloat16",
        "tfgpu train found/cifar10/recipe.yaml",
    ),
)
@with_settings
def find_batch_size(
    name: RecipeName = None,
    output: _Output = None,
    as_json: AsJson = False,
    json_to: JsonTo = None,
    allow_code: AllowCode = False,
    debug: Debug = False,
    lowest: _run(int | None, "The smallest batch to try [8 per replica].") = None,
    highest: _run(int | None, "The largest batch to try [the training examples].") = None,
    granularity: _run(int | None, "Precision of the largest batch that fits [a sixteenth of it].") = None,
    rate_only: _run(bool, "Do not search for the largest batch that fits.", "--rate-only") = False,
    scale: _Scale = "auto",
    repeats: _run(int, "Half-second measurements of each batch.") = 5,
    memory_limit_bytes: _run(
        str | None,
        "Memory of each GPU, such as 16GB. Without GPUs, memory that the process may reserve.",
        "--device-memory",
        metavar="SIZE",
    ) = None,
    timeout_s: _run(float, "A batch that takes longer is too large.", "--timeout", metavar="SECONDS") = 600.0,
    **flags: Any,
) -> None:
    recipe = recipe_of(name, flags, allow_code=allow_code)
    limit = None if memory_limit_bytes is None else bytes_of(memory_limit_bytes)
    how = dict(lowest=lowest, highest=highest, granularity=granularity, largest=not rate_only, scale=scale)
    folder = _folder(output)
    check_json(json_to)
    finder = imported("tfgpu.tune.batch_search")
    try:
        with Console(stderr=True).status("reading the recipe") as status:
            found = finder.batch_size(
                recipe,
                **how,
                repeats=repeats,
                memory_limit_bytes=limit,
                timeout_s=timeout_s,
                on_try=lambda one: status.update(f"a batch of {one.batch:,} {'fits' if one.fits else 'does not fit'}"),
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Nothing was written.") from None
    result = _finite(found.as_json())
    if folder is not None:
        head = f"# The fastest of {len(found.tries)} batches tried with {found.device}: {found.fastest}.\n"
        _write(folder, result, found.recipe, head)
    if put_json(result, as_json=as_json, json_to=json_to):
        return
    console = Console(highlight=False)
    _show_batches(console, found)
    _show_settings(console, found.settings, folder)


@app.command(
    "tune learning-rate",
    cls=screen.first("name", "lowest", "highest", "steps", "optimizer", "output", "as_json", "json_to"),
    short_help="Find the learning rates at which the loss falls.",
    help="Train some steps with a rising learning rate, and show where the loss falls. The model is discarded.",
    epilog=screen.examples(
        "tfgpu tune learning-rate digits",
        "tfgpu tune learning-rate digits --optimizer momentum --steps 400 --output found/rate",
        "tfgpu train found/rate/recipe.yaml",
    ),
)
@with_settings
def find_learning_rate(
    name: RecipeName = None,
    output: _Output = None,
    as_json: AsJson = False,
    json_to: JsonTo = None,
    allow_code: AllowCode = False,
    debug: Debug = False,
    lowest: _run(float, "Learning rate of the first step.") = 1e-6,
    highest: _run(float, "Learning rate of the last step.") = 1.0,
    steps: _run(int, "Number of steps, at least 20.") = 200,
    **flags: Any,
) -> None:
    recipe = recipe_of(name, flags, allow_code=allow_code)
    recipes.check(recipe)
    folder = _folder(output)
    check_json(json_to)
    try:
        with Console(stderr=True).status("starting TensorFlow"):
            start_tensorflow(debug=debug)
            finder = imported("tfgpu.tune.recipe_rate")
        with Console(stderr=True).status("training with a rising learning rate"):
            tested = finder.of_recipe(recipe, lowest=lowest, highest=highest, steps=steps)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Nothing was written.") from None
    settings = {} if tested.suggestion is None else {"learning_rate": float(rate_text(tested.suggestion))}
    result = {**vars(tested), "settings": settings}
    if folder is not None:
        made = recipes.make({**recipe.model_dump(mode="json"), **settings}) if settings else None
        _write(folder, result, made, f"# The range test's learning rate: {tested.reason}\n", tested.plot)
    console = Console(highlight=False)
    if not put_json(_finite(result), as_json=as_json, json_to=json_to):
        _show_rates(console, tested)
        _show_settings(console, settings, folder)
    if not settings:
        raise typer.Exit(1)


def _folder(output: Path | None) -> Path | None:
    """Checks the output folder, which is created later."""
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"--output must be a new or empty folder. Received: {str(output)!r}. Give another one.")
    return output


def _write(folder: Path, result: Mapping[str, Any], recipe: recipes.Recipe | None, head: str, plot: Any = None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if plot is not None:
            with atomic.replacing(folder / PLOT) as aside:
                plot(aside)
        atomic.write_text(folder / RESULT, json.dumps(_finite(result), indent=2) + "\n")
        if recipe is not None:
            text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
            atomic.write_text(folder / RECIPE, head + text)
    except OSError as error:
        raise InputError(f"Cannot write in {str(folder)!r}: {error.strerror}. Give another folder.") from error


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _show_batches(console: Console, found: Any) -> None:
    on = "GPU" if any(name.startswith("gpu") for one in found.tries for name in one.peaks) else "process"
    replicas = f"{found.replicas} replicas" if found.replicas > 1 else "one device"
    console.print(f"{found.recipe.model} on {found.recipe.data}: {replicas}, {found.device}", markup=False)
    console.print()
    numbers = ("batch", "examples/s", "spread", "step", "memory")
    table = screen.table(*numbers, "", right=numbers)
    for one in sorted(found.tries, key=lambda one: one.batch):
        marks = [word for word, at in (("fastest", found.fastest), ("largest", found.largest)) if at == one.batch]
        if not one.fits:
            table.add_row(f"{one.batch:,}", "-", "", "", "", "does not fit")
            continue
        spread = "-".join(f"{end:,.0f}" for end in one.spread)
        memory = "" if one.memory_bytes is None else shown(one.memory_bytes)
        step = f"{one.step_s * 1e3:,.3g} ms" if one.step_s < 1 else f"{one.step_s:,.3g} s"
        table.add_row(f"{one.batch:,}", f"{one.examples_per_s:,.0f}", spread, step, memory, ", ".join(marks))
    console.print(table)
    console.print()
    console.print(f"Memory: {on} peak. Fastest: smallest batch within 5 % of the best rate.", markup=False)
    for one in found.tries:
        if not one.fits:
            console.print(f"{one.batch:,}: {one.reason}", markup=False)
    for note in found.notes:
        console.print(note, markup=False)


def _show_rates(console: Console, tested: Any) -> None:
    numbers = ("learning rate", "loss, smoothed")
    table = screen.table(*numbers, "", right=numbers)
    count = len(tested.rates)
    marked: dict[int, tuple[str, float]] = {}
    for word, rate in (("lowest loss", tested.lowest), ("suggestion", tested.suggestion)):
        if rate is not None:
            marked[min(range(count), key=lambda at: abs(math.log(tested.rates[at] / rate)))] = word, rate
    for at in sorted({*marked, *(round(part * (count - 1) / (_ROWS - 1)) for part in range(_ROWS))}):
        word, rate = marked.get(at, ("", tested.rates[at]))
        table.add_row(rate_text(rate), f"{tested.smoothed[at]:.3f}", word)
    console.print(table)
    console.print()
    console.print(f"{count} steps. {tested.reason}", markup=False)


def _show_settings(console: Console, settings: Mapping[str, Any], folder: Path | None) -> None:
    if settings:
        flags = " ".join(f"{flag_of(name)} {value:g}" for name, value in settings.items())
        console.print(f"Settings: {flags}", markup=False, soft_wrap=True)
    if folder is not None:
        wrote = f"tfgpu train {folder / RECIPE}" if settings else str(folder / PLOT)
        console.print(f"{wrote}", markup=False, soft_wrap=True)

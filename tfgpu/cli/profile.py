"""`tfgpu profile`: what limits a training; `tfgpu profile input`: how fast a recipe's data is read and trained."""

import contextlib
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from tfgpu.cli import flags, screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_json, option, put_json, recipe_of
from tfgpu.cli.start import imported, started
from tfgpu.errors import InputError, unknown
from tfgpu.measure import rates
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes

app = typer.Typer()
_steps = functools.partial(option, panel="Recorded steps")
_WINDOW = ("skip", "calls", "seconds")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tfgpu profile`."""

    target: argument(
        str, "TARGET", "A script (.py), a recipe or its name, or a recorded trace (an .xplane.pb file or its folder)."
    )
    arguments: argument(list[str] | None, "ARGUMENTS", "Arguments of the script.") = None
    skip: _steps(int | None, "Warm-up calls to skip [3]; in `fit` a call is a block of steps.", min=0) = None
    calls: _steps(int | None, "Calls to record [10], for at least 0.3 s.", min=2) = None
    seconds: _steps(float | None, "Longest time to record [5].", min=0.01) = None
    whole: _steps(bool, "Run the script to its end after recording.", "--whole") = False
    allow_code: _steps(bool, "Allow a recipe to call functions (module:function).", "--allow-code") = False
    output: option(Path | None, "The folder of the report [profile].", "--output -o DIR") = None
    as_json: AsJson = False
    json_to: JsonTo = None


@screen.command(app, "profile", "target arguments skip calls seconds whole output as_json json_to", of_script=True)
@flags.with_options(Options)
def profile(options: Options) -> None:
    """Find what limits training: steps or input.

    Profile a script, a recipe or a recorded trace: what limits the steps, and what to change.

    tfgpu profile train.py --epochs 3
    tfgpu profile digits
    tfgpu profile -o profiles/best --seconds 10 runs/best/config.yaml
    tfgpu profile logs/train  [dim]# a trace of TensorBoard's callback[/]
    """
    check_json(options.json_to)
    target = options.target
    path, output, window = _path(target), options.output or Path("profile"), flags.chosen(options, _WINDOW)
    is_script, is_recipe = path.suffix == ".py", path.suffix in (".yaml", ".yml")
    if options.allow_code and not is_recipe:
        raise InputError(f"--allow-code is for recipes. Received: {target!r}. Omit it.")
    if not is_script and (options.arguments or options.whole):
        after = " ".join(options.arguments or ["--whole"])
        raise InputError(
            f"{target!r} is not a script, so it takes no arguments and no --whole. Received: {after}. Put the flags of "
            "`tfgpu profile` before the target, and omit the rest."
        )
    if window and not (is_script or is_recipe):
        names = ", ".join(f"--{name}" for name in window)
        raise InputError(
            f"{names}: only valid with a script or a recipe, not with a recorded trace. See `tfgpu profile --help`."
        )
    recipe = recipe_of(str(path), {}, allow_code=options.allow_code) if is_recipe else None
    if recipe is not None:
        recipes.check(recipe)
    sessions = started("tfgpu.measure.profiling.session")
    # The script's output must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext():
        if is_script:
            report = sessions.profile_script(path, options.arguments or [], output, whole=options.whole, **window)
        elif is_recipe:
            report = sessions.profile_recipe(recipe, target, output, **window)
        else:
            report = sessions.read_trace(path, output)
    if not put_json(report.as_json(), as_json=options.as_json, json_to=options.json_to):
        text = imported("tfgpu.measure.profiling.writing").text(report)
        Console(highlight=False, soft_wrap=True).print(f"\n{text}\n\nCharts: {output / 'profile.html'}.", markup=False)


def _path(target: str) -> Path:
    """The file or folder to profile; a ready recipe's, unless a local one of that name can be profiled."""
    path = Path(target)
    if target in ready.names() and not path.is_file() and not any(path.rglob("*.xplane.pb")):
        return ready.path(target)
    if path.exists():
        return path
    if path.suffix or len(path.parts) > 1:
        names = ", ".join(ready.names())
        raise InputError(
            f"There is no {target!r}. Give a script (.py), a recipe (.yaml, or one of {names}), or a recorded trace."
        )
    raise unknown("target", target, [*ready.names(), "SCRIPT.py", "FILE.yaml", "a recorded trace"])


@screen.command(
    app,
    "profile input",
    "name data model global_batch image_size workers seconds repeats as_json json_to",
    data="digits, tfds:NAME, a folder, a file, or module:function.",
    model="cnn, resnet, vit, ResNet50, ..., or module:function.",
)
@flags.with_settings
def profile_input(
    name: flags.RecipeName = None,
    allow_code: flags.AllowCode = False,
    workers: option(int, "Measure the input of one of N workers.", "--workers -n N") = 1,
    seconds: option(float, "Length of each measurement.") = 1.0,
    repeats: option(int, "Measurements of each rate.") = 3,
    as_json: AsJson = False,
    json_to: JsonTo = None,
    **settings: Any,
) -> None:
    """Measure how fast data is read, and what would help.

    Measure the input, the model and both together; name the bottleneck and the settings that help.

    tfgpu profile input digits
    tfgpu profile input --data photos/ --image-size 224 --batch 64 -n 4
    tfgpu profile input runs/best/config.yaml --json
    """
    recipe = recipe_of(name, settings, allow_code=allow_code)
    recipes.check(recipe)
    rates.check(seconds, repeats)
    check_json(json_to)
    with Console(stderr=True).status("starting TensorFlow") as status:
        options = {"seconds": seconds, "repeats": repeats, "progress": lambda text: status.update(f"measuring: {text}")}
        if workers == 1:
            measured, show = started("tfgpu.measure.input").measure_input(recipe, **options), _show_input
        else:
            measured = started("tfgpu.measure.workers").measure_workers(recipe, workers, **options)
            show = _show_workers
    if not put_json(measured.as_json(), as_json=as_json, json_to=json_to):
        show(measured)


def _show_input(measured: Any) -> None:
    console, about = Console(highlight=False), measured.facts
    shape = "×".join(str(n) for n in about["input_shape"])
    console.print(
        f"{measured.recipe.model} on {measured.recipe.data}: examples of {shape}, "
        f"batches of {about['global_batch']:,}, {', '.join(about['devices'])}, {about['cores']} CPU cores\n",
        markup=False,
    )
    rows = []
    for name, label in (("input", "input alone"), ("model", "model alone"), ("together", "together")):
        mark = "[yellow]the bottleneck[/]" if name == measured.bottleneck else ""
        rows.append([f"[bold]{label}[/]", *_cells(getattr(measured, name)), mark])
    titles = ("", "examples/s", "spread", "")
    console.print(screen.table(titles, rows, right=titles[1:3], fold=True))
    console.print(f"\n{escape(measured.advice)}\n", soft_wrap=True)
    rows = []
    for trial in measured.trials:
        color = "green" if trial.ratio >= 1.1 else "red" if trial.ratio <= 0.9 else "none"
        ratio, note = f"[{color}]{trial.ratio:.2f}[/]", f"[dim]{escape(trial.note)}[/]"
        rows.append([escape(trial.setting), f"{trial.rate.median:,.0f}", ratio, note])
    titles = ("the input with", "examples/s", "ratio", "")
    console.print(screen.table(titles, rows, right=titles[1:3], fold=True))


def _cells(rate: Any) -> tuple[str, str]:
    return f"{rate.median:,.0f}", f"{rate.spread:.0%}"


def _show_workers(measured: Any) -> None:
    console, about = Console(highlight=False), measured.facts
    shape = "×".join(str(n) for n in about["input_shape"])
    console.print(
        f"The input of {measured.recipe.data} on one of {measured.workers} workers: examples of {shape}, global "
        f"batches of {about['global_batch']:,}, {about['cores']} CPU cores\n",
        markup=False,
    )
    rows = [
        [f"[bold]{label}[/]", *_cells(getattr(measured, name)), f"{measured.cpu_us[name].median:,.0f}"]
        for name, label in (("alone", "one device"), ("worker", "a worker"))
    ]
    numbers = ("examples/s", "spread", "CPU µs each")
    console.print(screen.table(("", *numbers), rows, right=numbers, fold=True))
    console.print(
        f"\n{measured.workers} such workers, each with a machine like this, supply {measured.supply:,.0f} examples/s.\n"
    )
    rows = []
    for stage in measured.stages:
        everywhere = "on every worker" if stage.work == measured.workers else ""
        note = ", ".join(filter(None, (everywhere, stage.note)))
        rows.append([stage.name, f"{stage.work:.2f}", f"[dim]{escape(note)}[/]"])
    console.print(screen.table(("stage", "work / share", ""), rows, right=("work / share",), fold=True))

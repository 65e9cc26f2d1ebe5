"""`tfgpu profile`: what limits a training, and which setting helps."""

import contextlib
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_json, chosen, option, put_json, recipe_of, with_options
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.errors import InputError, unknown
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes

app = typer.Typer()
_steps = functools.partial(option, panel="The steps that are recorded")
_WINDOW = ("skip", "calls", "seconds")
_FOLDER = Path("profile")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tfgpu profile`."""

    target: argument(
        str, "TARGET", "A script (.py), a recipe or its name, or a recorded trace; .xplane.pb, or a folder."
    )
    arguments: argument(list[str] | None, "ARGUMENTS", "Arguments of the script.") = None
    skip: _steps(int | None, "Warm-up calls to skip [3]; in `fit` a call is a block of steps.", min=0) = None
    calls: _steps(int | None, "Calls to record [10], for at least 0.3 s.", min=2) = None
    seconds: _steps(float | None, "Longest time to record [5].", min=0.01) = None
    whole: _steps(bool, "Run the script to its end after recording.", "--whole") = False
    allow_code: _steps(bool, "Allow a recipe to call functions (module:function).", "--allow-code") = False
    output: option(Path | None, "The folder of the report [profile].", "--output", "-o", metavar="DIR") = None
    as_json: AsJson = False
    json_to: JsonTo = None


@app.command(
    "profile",
    cls=screen.first(*("target", "arguments", "skip", "calls", "seconds", "whole", "output", "as_json", "json_to")),
    short_help="Find what limits training: steps or input.",
    help="Profile a script, a recipe or a recorded trace: what limits the steps, and what to change.",
    epilog=screen.examples(
        "tfgpu profile train.py --epochs 3",
        "tfgpu profile digits",
        "tfgpu profile -o profiles/best --seconds 10 runs/best/config.yaml",
        "tfgpu profile logs/train  [dim]# a trace of TensorBoard's callback[/]",
    ),
    context_settings={"allow_interspersed_args": False},
)
@with_options(Options)
def profile(options: Options) -> None:
    check_json(options.json_to)
    target = options.target
    path, output, window = _path(target), options.output or _FOLDER, chosen(options, _WINDOW)
    is_script, is_recipe = path.suffix == ".py", path.suffix in (".yaml", ".yml")
    if options.allow_code and not is_recipe:
        raise InputError(f"--allow-code is for recipes. Received: {target!r}. Omit it.")
    if not is_script and (options.arguments or options.whole):
        after = " ".join(options.arguments or ["--whole"])
        raise InputError(
            f"{target!r} is not a script, so it takes no arguments and no --whole. Received: {after}. Put the flags of "
            "`tfgpu profile` before the target, and omit the rest."
        )
    if not (is_script or is_recipe):
        _reject(window, "a script or a recipe, not with a recorded trace")
    recipe = recipe_of(str(path), {}, allow_code=options.allow_code) if is_recipe else None
    if recipe is not None:
        recipes.check(recipe)
    start_tensorflow()
    sessions = imported("tfgpu.measure.profiling.session")
    # The script's output must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext():
        if is_script:
            report = sessions.profile_script(path, options.arguments or [], output, whole=options.whole, **window)
        elif is_recipe:
            report = sessions.profile_recipe(recipe, target, output, **window)
        else:
            report = sessions.read_trace(path, output)
    if not put_json(report.as_json(), as_json=options.as_json, json_to=options.json_to):
        _show(report, output)


def _reject(given: dict[str, Any], needs: str) -> None:
    if given:
        names = ", ".join(f"--{name}" for name in given)
        raise InputError(f"{names}: only valid with {needs}. See `tfgpu profile --help`.")


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


def _show(report: Any, output: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    writing = imported("tfgpu.measure.profiling.writing")
    console.print(f"\n{writing.text(report)}\n", markup=False)
    console.print(f"Charts: {output / 'profile.html'}.", markup=False)

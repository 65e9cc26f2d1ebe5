"""`tfgpu train`: trains a recipe; its options are the settings of the recipe schema."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tfgpu.cli import completion
from tfgpu.cli.flags import ALLOW_CODE, DEBUG, given, with_settings
from tfgpu.cli.start import complain, debugging, imported, start_tensorflow
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, Preempted
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.trust import refuse_code
from tfgpu.recipes.wording import score

app = typer.Typer()
OWN = {
    "name": (
        str | None,
        None,
        [],
        "RECIPE",
        "A ready recipe (see --list) or a YAML file; flags override it.",
    ),
    "config": (
        Path | None,
        None,
        ["--config", "-c"],
        "FILE",
        "Settings from a YAML file; same as RECIPE.",
    ),
    "listing": (bool, False, ["--list"], None, "Show the ready recipes."),
    "dry_run": (
        bool,
        False,
        ["--dry-run"],
        None,
        "Build everything, train two steps and validate on synthetic data, and write nothing.",
    ),
    "output": (Path | None, None, ["--output", "-o"], "DIR", "The run directory [runs/<time>-<model>]."),
    "allow_code": ALLOW_CODE,
    "resume": (
        bool,
        False,
        ["--resume"],
        None,
        "Resume the run in --output from its last checkpoint.",
    ),
    "overwrite": (bool, False, ["--overwrite"], None, "Replace the run in --output."),
    "track": (
        str | None,
        None,
        ["--track"],
        "TRACKER",
        "Also send settings, metrics and the report to mlflow or wandb.",
    ),
    "project": (str, "tfgpu", ["--project"], "NAME", "The tracker's experiment or project."),
    "debug": DEBUG,
}


@app.command(
    "train",
    help="Train a model, and write a run directory with the model, its metrics and a report.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu train\n\n"
        "tfgpu train cifar10 --epochs 100\n\n"
        "tfgpu train imagenet --dry-run\n\n"
        "tfgpu train --data photos/ --image-size 64 --model resnet --model-option depth=18 --epochs 30\n\n"
        "tfgpu train --strategy mirrored --virtual-devices 4 --path loop\n\n"
        "tfgpu train --config runs/best/config.yaml --output again --seed 1\n\n"
        "tfgpu train --resume --output runs/best\n\n"
        "tfgpu train --track mlflow --project digits"
    ),
)
@with_settings(OWN, names={"name": completion.ready_recipes, "track": completion.trackers})
def train(
    *,
    name: str | None,
    config: Path | None,
    listing: bool,
    dry_run: bool,
    output: Path | None,
    allow_code: bool,
    resume: bool,
    overwrite: bool,
    track: str | None,
    project: str,
    debug: bool,
    **flags: Any,
) -> None:
    if listing:
        _list()
        return
    source, settings = _settings(name, config)
    flags = given(flags)
    refuse_code(settings, str(source), allow=allow_code, given=flags)
    settings = {**settings, **flags}
    if dry_run:
        _check_alone(output=output, resume=resume, overwrite=overwrite, track=track)
        _dry_run(recipes.make(settings, source=source), debug=debug)
        return
    recipe = _recipe(settings, source, output, resume=resume, overwrite=overwrite, allow_code=allow_code)
    how = dict(output=output, resume=resume, overwrite=overwrite, show=True, track=track, project=project)
    result = _run(recipe, debug=debug, **how)
    if result.run_directory is not None:
        for name in sorted(result.metrics, key=lambda name: name != "perplexity"):
            if name != "loss" or len(result.metrics) == 1:
                print(score(f"test_{name}", result.metrics[name]))
        print(result.run_directory)


def _recipe(
    settings: Mapping[str, Any],
    source: str | None,
    output: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    allow_code: bool,
) -> recipes.Recipe:
    """The recipe to train, merged with the recorded settings if it resumes; all checks that need no TensorFlow."""
    from tfgpu.recipes import directory

    if resume:
        if output is None:
            raise InputError("--resume needs the run to resume. Add --output DIR.")
        earlier = directory.recorded(output)
        refuse_code(earlier, str(output / directory.CONFIG), allow=allow_code, given=settings)
        settings = earlier | settings
    recipe = recipes.make(settings, source=source)
    recipes.check(recipe)
    Cluster.from_environment()
    directory.check(output, resume=resume, overwrite=overwrite)
    return recipe


def _run(recipe: recipes.Recipe, *, debug: bool, **how: Any) -> Any:
    try:
        with Console().status("starting TensorFlow"):  # On a terminal only.
            start_tensorflow(quiet=not debugging(["--debug"] if debug else []))
            runner = imported("tfgpu.recipes.runner")
        return runner.run(recipe, **how)
    except Preempted as leaving:  # Already reported; Typer would swallow the exit code.
        raise typer.Exit(leaving.code) from None
    except KeyboardInterrupt as interrupt:  # Typer would swallow the message.
        complain(str(interrupt) or "Interrupted.")
        raise typer.Exit(130) from None


def _settings(name: str | None, config: Path | None) -> tuple[str | None, Mapping[str, Any]]:
    """The file that the settings come from, and its content."""
    if name is not None and config is not None:
        raise InputError(f"RECIPE and --config exclude each other. Received: {name} and {config}. Give one of them.")
    if name is not None:
        return str(ready.path(name)), ready.read(name)
    return (str(config), recipes.read(config)) if config else (None, {})


def _check_alone(**flags: Any) -> None:
    for name, value in flags.items():
        if value:
            raise InputError(f"A dry run writes nothing. Received: --{name}. Omit it.")


def _dry_run(recipe: recipes.Recipe, *, debug: bool) -> None:
    with Console(stderr=True).status("starting TensorFlow"):
        start_tensorflow(quiet=not debugging(["--debug"] if debug else []))
        dry = imported("tfgpu.recipes.dry")
    with Console(stderr=True).status("dry run"):
        lines = dry.run(recipe)
    print("\n".join(lines))


def _list() -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ready.names():
        table.add_row(f"[bold]{name}[/]", ready.describe(name))
    console = Console(highlight=False)
    console.print(table)
    console.print("\nTrain one with: tfgpu train NAME. Try it without its data: tfgpu train NAME --dry-run")

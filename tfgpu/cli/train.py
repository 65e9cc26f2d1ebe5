"""`tfgpu train`: trains a recipe; its options are the settings of the recipe schema."""

import functools
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tfgpu.cli import screen
from tfgpu.cli.flags import AllowCode, Debug, RecipeName, file_of, option, settings_of, with_settings
from tfgpu.cli.start import started
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, Preempted
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.reading import refuse_code
from tfgpu.recipes.wording import score

app = typer.Typer()
_run = functools.partial(option, panel="Run")


@screen.command(
    app,
    "train",
    "name data model epochs global_batch learning_rate strategy precision output resume dry_run listing",
    data="digits, tfds:NAME, a folder, a file, or module:function.",
    model="cnn, resnet, vit, ResNet50, ..., or module:function.",
    dry_run="Build everything, train two steps, write nothing.",
)
@with_settings
def train(
    name: RecipeName = None,
    listing: _run(bool, "Show the built-in recipes.", "--list") = False,
    dry_run: _run(
        bool, "Build everything, train two steps and validate on synthetic data; write nothing.", "--dry-run"
    ) = False,
    output: _run(Path | None, "The run directory [runs/<time>-<model>].", "--output -o DIR") = None,
    allow_code: AllowCode = False,
    resume: _run(bool, "Resume the run in --output from its last checkpoint.", "--resume") = False,
    overwrite: _run(bool, "Replace the run in --output.", "--overwrite") = False,
    track: _run(str | None, "Also send settings, metrics and the report to mlflow or wandb.", "TRACKER") = None,
    project: _run(str, "The tracker's experiment or project.", "NAME") = "tfgpu",
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Train a model by a recipe: run directory, metrics, report.

    Train a model, and write a run directory with the model, its metrics and a report.

    tfgpu train
    tfgpu train cifar10 --epochs 100
    tfgpu train imagenet --dry-run
    tfgpu train --data photos/ --image-size 64 --model resnet --model-option depth=18 --epochs 30
    tfgpu train --strategy mirrored --virtual-devices 4 --batch 64
    tfgpu train runs/best/config.yaml --output again --seed 1
    tfgpu train --resume --output runs/best
    tfgpu train --track mlflow --project digits
    """
    if listing:
        rows = [(f"[bold]{name}[/]", ready.describe(name)) for name in ready.names()]
        console = Console(highlight=False)
        console.print(screen.table(("", ""), rows, fold=True, show_header=False))
        console.print("\nTrain one with: tfgpu train NAME. Try it without its data: tfgpu train NAME --dry-run")
        return
    source, settings = file_of(name), settings_of(name, flags, allow_code=allow_code)
    if dry_run:
        _check_alone(output=output, resume=resume, overwrite=overwrite, track=track)
        _dry_run(recipes.make(settings, source=source), debug=debug)
        return
    recipe = _recipe(settings, source, output, resume=resume, overwrite=overwrite, allow_code=allow_code)
    how = dict(output=output, resume=resume, overwrite=overwrite, show=True, track=track, project=project)
    result = _trained(recipe, debug=debug, **how)
    if result.run_directory is not None:
        for name in sorted(result.metrics, key=lambda name: name != "perplexity"):
            if name != "loss" or len(result.metrics) == 1:
                print(score(f"test_{name}", result.metrics[name]))
        if not result.metrics:
            print("No examples were set aside for a test; add --test 0.2.")
        print(result.run_directory)


def _recipe(
    asked: dict[str, Any], source: str | None, output: Path | None, *, resume: bool, overwrite: bool, allow_code: bool
) -> recipes.Recipe:
    """The recipe to train, merged with the recorded settings if it resumes; all checks that need no TensorFlow."""
    from tfgpu.recipes import directory

    if resume:
        if output is None:
            raise InputError("--resume needs the run to resume. Add --output DIR.")
        earlier = directory.recorded(output)
        refuse_code(earlier, str(output / directory.CONFIG), allow=allow_code, given=asked)
        asked = earlier | asked
    recipe = recipes.make(asked, source=source)
    recipes.check(recipe)
    Cluster.from_environment()
    directory.check(output, resume=resume, overwrite=overwrite)
    return recipe


def _trained(recipe: recipes.Recipe, *, debug: bool, **how: Any) -> Any:
    try:
        return started("tfgpu.recipes.runner", debug=debug, says=True).run(recipe, **how)
    except Preempted as leaving:  # Already reported; Typer would swallow the exit code.
        raise typer.Exit(leaving.code) from None


def _check_alone(**flags: Any) -> None:
    for name, value in flags.items():
        if value:
            raise InputError(f"A dry run writes nothing. Received: --{name}. Omit it.")


def _dry_run(recipe: recipes.Recipe, *, debug: bool) -> None:
    dry = started("tfgpu.recipes.dry", debug=debug, says=True)
    with Console(stderr=True).status("dry run"):
        lines = dry.run(recipe)
    print("\n".join(lines))

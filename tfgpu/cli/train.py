"""`tfgpu train`: trains a recipe; its options are the settings of the recipe schema."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tfgpu.cli import completion, screen
from tfgpu.cli.flags import ALLOW_CODE, DEBUG, RECIPE_NAME, given, with_settings
from tfgpu.cli.start import complain, debugging, imported, start_tensorflow
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, Preempted
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.trust import refuse_code
from tfgpu.recipes.wording import score

app = typer.Typer()
OWN = {
    "name": RECIPE_NAME,
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
    cls=screen.first(
        name="A ready recipe (--list shows them) or a YAML file.",
        data="digits, tfds:NAME, a folder, a file, or module:function.",
        model="cnn, resnet, vit, ResNet50, ..., or module:function.",
        epochs="Passes over the training examples [20].",
        global_batch="Examples per step, over all replicas together [32].",
        learning_rate="The peak learning rate [0.003].",
        strategy="auto, one_device, mirrored, multi_worker, ... [auto].",
        precision="float32, mixed_bfloat16, mixed_float16, tf32, auto.",
        output="The run directory [runs/<time>-<model>].",
        resume=None,
        dry_run="Build all, train two steps, write nothing.",
        listing="Show the ready recipes.",
    ),
    short_help="Train a model by a recipe: run directory, metrics, report.",
    help="Train a model, and write a run directory with the model, its metrics and a report.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu train\n\n"
        "tfgpu train cifar10 --epochs 100\n\n"
        "tfgpu train imagenet --dry-run\n\n"
        "tfgpu train --data photos/ --image-size 64 --model resnet --model-option depth=18 --epochs 30\n\n"
        "tfgpu train --strategy mirrored --virtual-devices 4 --path loop\n\n"
        "tfgpu train runs/best/config.yaml --output again --seed 1\n\n"
        "tfgpu train --resume --output runs/best\n\n"
        "tfgpu train --track mlflow --project digits"
    ),
)
@with_settings(OWN, names={"name": completion.ready_recipes, "track": completion.trackers})
def train(
    *,
    name: str | None,
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
    source, settings = (None, {}) if name is None else (str(ready.path(name)), ready.read(name))
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
        if not result.metrics:
            print("Nothing was held back for a test; --test 0.2 does.")
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

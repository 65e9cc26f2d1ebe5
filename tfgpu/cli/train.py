"""`tfgpu train`: its flags are the settings of the schema."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tfgpu.cli.flags import given, with_settings
from tfgpu.cli.start import complain, debugging, imported, start_tensorflow
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, Preempted
from tfgpu.recipes import recipe as recipes

app = typer.Typer()
OWN = {
    "config": (
        Path | None,
        None,
        ["--config", "-c"],
        "FILE",
        "Settings from a YAML file; flags win over it.",
    ),
    "output": (Path | None, None, ["--output", "-o"], "DIR", "The run directory [runs/<time>-<model>]."),
    "resume": (
        bool,
        False,
        ["--resume"],
        None,
        "Go on with the run in --output, after its last checkpoint.",
    ),
    "overwrite": (bool, False, ["--overwrite"], None, "Replace the run in --output."),
    "debug": (
        bool,
        False,
        ["--debug"],
        None,
        "Show a traceback when training fails (also TFGPU_DEBUG=1).",
    ),
}


@app.command(
    "train",
    help="Train a model and leave a run directory with the model, its metrics and a report.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu train\n\n"
        "tfgpu train --data photos/ --image-size 64 --model resnet --model-option depth=18 --epochs 30\n\n"
        "tfgpu train --strategy mirrored --virtual-devices 4 --path loop\n\n"
        "tfgpu train --config runs/best/config.yaml --output again --seed 1\n\n"
        "tfgpu train --resume --output runs/best"
    ),
)
@with_settings(OWN)
def train(
    *,
    config: Path | None,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    debug: bool,
    **flags: Any,
) -> None:
    from tfgpu.recipes import directory

    settings = (recipes.read(config) if config else {}) | given(flags)
    if resume:
        if output is None:
            raise InputError("--resume needs the run to go on with. Add --output DIR.")
        settings = directory.recorded(output) | settings
    recipe = recipes.make(settings, source=str(config) if config else None)
    recipes.check(recipe)
    Cluster.from_environment()
    directory.check(output, resume=resume, overwrite=overwrite)
    try:
        with Console().status("starting TensorFlow"):  # On a terminal only.
            start_tensorflow(quiet=not debugging(["--debug"] if debug else []))
            runner = imported("tfgpu.recipes.runner")
        result = runner.run(recipe, output=output, resume=resume, overwrite=overwrite, show=True)
    except Preempted as leaving:  # It has said so; Typer would swallow the code.
        raise typer.Exit(leaving.code) from None
    except KeyboardInterrupt as interrupt:  # Typer would swallow the message.
        complain(str(interrupt) or "Interrupted.")
        raise typer.Exit(130) from None
    if result.run_directory is not None:
        print(f"test accuracy: {result.accuracy:.1%}")
        print(result.run_directory)

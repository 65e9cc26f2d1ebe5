"""The run directory: what is in it, when it may be written, what `config.yaml` records. No TensorFlow here.

A directory holds a run when it has a `config.yaml`. Nothing that is not a run's own file is ever deleted.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tfgpu.errors import InputError
from tfgpu.recipes.recipe import FACTS, Recipe, read

CONFIG = "config.yaml"
MODEL = "model.keras"
METRICS = "metrics.csv"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
_OWN = (MODEL, METRICS, REPORT, CHECKPOINTS, LOGS, CONFIG)
_ASIDE = ".replaced"


def check(output: str | Path | None, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuses an output directory that may not be written, before anything is.

    Args:
        output: the directory; None means a new one with a name of its own.
        resume: whether a run in it is to be continued.
        overwrite: whether a run in it may be replaced.

    Raises:
        InputError: it holds another run, or other files, or no run to resume; or it cannot be written.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other. Use one of them.")
    if output is None:
        if resume:
            raise InputError("--resume needs the run to go on with. Add --output DIR.")
        return
    path = Path(output)
    holds_run = (path / CONFIG).is_file()
    if resume and not holds_run:
        raise InputError(f"{str(path)!r} holds no run to resume: it has no {CONFIG}. Leave out --resume to start one.")
    if path.exists() and not path.is_dir():
        raise InputError(f"The output {str(path)!r} is a file. Give a directory.")
    if holds_run and not resume and not overwrite:
        raise InputError(f"{str(path)!r} holds another run. Add --resume or --overwrite, or give another --output.")
    if path.is_dir() and not holds_run and any(path.iterdir()):
        raise InputError(f"{str(path)!r} is not empty and holds no run of tfgpu. Give another --output.")
    _check_writable(path)


def recorded(output: str | Path) -> dict[str, Any]:
    """Reads the settings of the run in a directory.

    Raises:
        InputError: it holds no run.
    """
    check(output, resume=True)
    return read(Path(output) / CONFIG)


def check_same(recipe: Recipe, earlier: Recipe, *, directory: str | Path) -> None:
    """Refuses to resume a run with other settings; only `epochs` may grow.

    Raises:
        InputError: names every setting that differs, with both values.
    """
    new, old = recipe.model_dump(), earlier.model_dump()
    differing = [name for name in new if new[name] != old[name] and name != "epochs"]
    if recipe.epochs < earlier.epochs:
        differing.append("epochs")
    if differing:
        listed = "; ".join(f"`{name}` was {old[name]!r}, received {new[name]!r}" for name in differing)
        raise InputError(
            f"Cannot resume {str(directory)!r} with other settings (only `epochs` may grow): {listed}. "
            "Leave the settings out, or start a new run."
        )


def fresh(recipe: Recipe, *, now: datetime | None = None) -> Path:
    """Names a directory that does not exist: `runs/<time>-<model>`."""
    model = "".join(c if c.isalnum() or c in "._-" else "-" for c in recipe.model)
    base = Path("runs") / f"{(now or datetime.now()):%Y%m%d-%H%M%S}-{model}"
    names = (base if n == 1 else base.with_name(f"{base.name}-{n}") for n in range(1, 1000))
    return next(name for name in names if not name.exists())


def prepare(path: Path, *, resume: bool) -> list[Path]:
    """Makes the directory ready for a run; an earlier run in it is set aside, unless it is resumed.

    Follow it by `settle` at the first step, or by `abandon` when there is none.

    Returns:
        The folders that were made, the innermost first.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    if not resume and (path / CONFIG).exists():
        (path / _ASIDE).mkdir(exist_ok=True)
        _move_run(path, path / _ASIDE)
    return made


def settle(path: Path) -> None:
    """Removes the earlier run that `prepare` set aside, now that the new one has begun."""
    if (path / _ASIDE).is_dir():
        _remove_run(path / _ASIDE)
        (path / _ASIDE).rmdir()


def abandon(path: Path, made: list[Path]) -> None:
    """Takes back what a run wrote that failed before its first step; an earlier run returns."""
    _remove_run(path)
    if (path / _ASIDE).is_dir():
        _move_run(path / _ASIDE, path)
        (path / _ASIDE).rmdir()
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # Something else was put there meanwhile.
            return


def write_config(path: Path, recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Writes `config.yaml`: the recipe, which `--config` reads, and under `run:` facts, which it skips."""
    from tfgpu.callbacks.files import replace_text  # Its package starts TensorFlow, which runs by now.

    settings = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    about = yaml.safe_dump({FACTS: dict(facts)}, sort_keys=False, allow_unicode=True)
    head = "# Repeat this run: tfgpu train --config config.yaml --output another\n"
    replace_text(path / CONFIG, f"{head}{settings}\n# What the run found; not read back.\n{about}")


def git_commit() -> str | None:
    """Gives the commit of the current directory's repository, marked when files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit} (with changes)" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _move_run(source: Path, target: Path) -> None:
    for name in _OWN:
        if (source / name).exists():
            os.replace(source / name, target / name)


def _remove_run(path: Path) -> None:
    for name in _OWN:
        target = path / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


def _check_writable(path: Path) -> None:
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"Cannot write in {str(nearest)!r}. Give an --output in a directory of yours.")

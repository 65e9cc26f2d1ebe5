"""The run directory: its files, when it may be written, and the content of `config.yaml`. Imports no TensorFlow.

A directory contains a run if it has a `config.yaml` written by one. Only a run's own files are ever deleted.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.recipes.reading import FACTS, read, read_facts
from tfgpu.recipes.recipe import INPUT, Recipe, make

CONFIG = "config.yaml"
MODEL = "model.keras"
PRESET = "preset"  # in place of MODEL where a pretrained model was trained
METRICS = "metrics.csv"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
TRACKER = "tracker.json"
MONITOR = "monitor"
NOTHING_WRITTEN = "Interrupted before the first step; nothing was written."
_OWN = (MODEL, PRESET, METRICS, REPORT, CHECKPOINTS, LOGS, MONITOR, TRACKER, CONFIG)
_FREE = ("epochs", "recompute", "checkpoint_steps", "watch_machine", "samples", "sample_tokens")
"""Settings that a resumed run may change, besides `INPUT`."""


def check(output: str | Path | None, *, resume: bool = False, overwrite: bool = False) -> None:
    """Rejects an output directory that may not be written, before anything is.

    Args:
        output: the directory; None means a new one with a generated name.
        resume: whether to resume the run in it.
        overwrite: whether the run in it may be replaced.

    Raises:
        InputError: it contains another run, other files, or no run to resume; or it is not writable.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite cannot be combined. Use one of them.")
    if output is None:
        if resume:
            raise InputError("--resume needs the run's directory. Add --output DIR.")
        return
    path = Path(output)
    with _reported(path):
        _check_content(path, resume=resume, overwrite=overwrite)
        _check_writable(path)


def recorded(output: str | Path) -> dict[str, Any]:
    """Reads the settings of the run in a directory.

    Raises:
        InputError: it contains no run.
    """
    check(output, resume=True)
    return read(Path(output) / CONFIG)


def check_same(recipe: Recipe, earlier: Recipe, *, directory: str | Path) -> None:
    """Rejects resuming a run with other settings; only `epochs` may increase, and `recompute` and input speed differ.

    Raises:
        InputError: names every setting that differs, with both values.
    """
    new, old = recipe.model_dump(), earlier.model_dump()
    differing = [name for name in new if new[name] != old[name] and name not in (*_FREE, *INPUT)]
    if recipe.epochs < earlier.epochs:
        differing.append("epochs")
    if differing:
        listed = "; ".join(f"`{name}` was {old[name]!r}, received {new[name]!r}" for name in differing)
        raise InputError(
            f"Cannot resume {str(directory)!r} with other settings (only `epochs` may increase, and `recompute` and "
            f"input speed settings differ): {listed}. Remove these settings, or start a new run."
        )


@contextlib.contextmanager
def claim(
    output: str | Path | None, recipe: Recipe, *, resume: bool = False, overwrite: bool = False
) -> Iterator[tuple[Path, list[Path]]]:
    """Prepares a directory for a run, which has exclusive access for the duration of the block.

    An earlier run in it is deleted, unless it is resumed. Call `abandon` if the run fails before its first step. The
    claim is a lock of the operating system, which also ends when the process is killed.

    Args:
        output: the directory; None creates `runs/<time>-<model>`.
        recipe: determines the name of a new directory.
        resume: whether to resume the run in it.
        overwrite: whether the run in it may be replaced.

    Yields:
        The directory, and the folders that were created, the innermost first.

    Raises:
        InputError: as `check`, or another process is writing there, or it cannot be created.
    """
    with contextlib.ExitStack() as held:
        with _reported(Path(output or "runs")):
            path, made = _make(Path(output)) if output else _make_fresh(recipe)
            taken = f"{str(path)!r} contains another run, which is still running. Wait for it, or use another --output."
            lock(path, held, taken)
            # Another process may have written since the first check.
            _check_content(path, resume=resume, overwrite=overwrite)
            if not resume and (path / CONFIG).exists():
                _remove_run(path)
        yield path, made


def abandon(path: Path, made: list[Path]) -> None:
    """Deletes the files of a run that failed before its first step, and the folders that it made."""
    _remove_run(path)
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # something else was put there meanwhile
            return


def write_config(path: Path, recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Writes `config.yaml`: the recipe, for `tfgpu train`, and facts under `run:`, which it ignores."""
    settings = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    about = yaml.safe_dump({FACTS: dict(facts)}, sort_keys=False, allow_unicode=True)
    head = "# Repeat this run: tfgpu train config.yaml --output another\n"
    atomic.write_text(path / CONFIG, f"{head}{settings}\n# Facts about the run; not read back.\n{about}")


def git_commit() -> str | None:
    """Returns the commit of the current directory's repository, marked if there are uncommitted changes."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit} (with changes)" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _is_of_a_run(config: Path) -> bool:
    try:
        versions = read_facts(config).get("versions")
        make(read(config))
    except InputError:
        return False
    return isinstance(versions, dict) and "tfgpu" in versions


def _check_content(path: Path, *, resume: bool, overwrite: bool) -> None:
    config = path / CONFIG
    if resume and not config.is_file():
        raise InputError(f"{str(path)!r} has no run to resume: it has no {CONFIG}. Remove --resume to start one.")
    if path.exists() and not path.is_dir():
        raise InputError(f"The output {str(path)!r} is a file. Use a directory.")
    if config.is_file() and not resume and not overwrite:
        raise InputError(f"{str(path)!r} contains another run. Add --resume or --overwrite, or use another --output.")
    if config.is_file() and overwrite and not _is_of_a_run(config):
        raise InputError(
            f"{str(path)!r} has a {CONFIG} that tfgpu did not write, so nothing in it is replaced. "
            "Use another --output."
        )
    if path.is_dir() and not config.is_file() and any(path.iterdir()):
        raise InputError(f"{str(path)!r} is not empty and contains no tfgpu run. Use another --output.")


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turns errors of the file system into an `InputError` with the reason."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"Cannot write in {str(path)!r}: {reason}. Use an --output in a writable directory."
        ) from error


def _make(path: Path) -> tuple[Path, list[Path]]:
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return path, made


def _make_fresh(recipe: Recipe) -> tuple[Path, list[Path]]:
    """Creates `runs/<time>-<model>`, with a number if another process has created it first."""
    model = "".join(c if c.isalnum() or c in "._-" else "-" for c in recipe.model)
    base = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    _, made = _make(base.parent)
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path, [path, *made]


def lock(path: Path, held: contextlib.ExitStack, error: str) -> None:
    """Holds the folder for this process until `held` closes; raises an InputError with `error` if another has it."""
    opened = os.open(path, os.O_RDONLY)
    held.callback(os.close, opened)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(error) from None
    except OSError:  # some network file systems cannot lock directories
        return


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
        raise InputError(f"Cannot write in {str(nearest)!r}. Use an --output in a writable directory.")

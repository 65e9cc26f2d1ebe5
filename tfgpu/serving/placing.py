"""Moves an export to its path atomically, and replaces nothing but an earlier export."""

import os
import shutil
from pathlib import Path

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError
from tfgpu.serving.formats import Format

_OF_SAVED_MODEL = ("assets", "assets.extra", "fingerprint.pb", "saved_model.pb", "saved_model.pbtxt", "variables")


def check(path: Path, form: Format, *, overwrite: bool) -> None:
    """Checks that nothing would be lost and the path can be written.

    Args:
        path: the output path.
        form: its format.
        overwrite: whether an earlier export may be replaced.

    Raises:
        InputError: the path contains something else, or one of its parents is a file.
    """
    if path.is_symlink() or path.exists():
        if not overwrite:
            raise InputError(f"{path} exists. Choose another path, or use overwrite=True (--overwrite).")
        if other := _other(path, form):
            raise InputError(f"{path} {other}, and is not replaced. Choose another path, or remove it yourself.")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest} is a file, not a folder. Choose another path than {path}.")


def _other(path: Path, form: Format) -> str:
    """Why the path is not an export of this format; empty if it is one."""
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}"
    if form.suffix:
        return "" if path.is_file() else "is not a file"
    if not (path / "saved_model.pb").is_file():
        return "is not an exported model"
    more = sorted({each.name for each in path.iterdir()} - set(_OF_SAVED_MODEL))
    return f"contains more than an exported model ({', '.join(more[:4])})" if more else ""


def put(made: Path, path: Path) -> None:
    """Moves a file or folder to a path, replacing it atomically.

    Args:
        made: a file or folder, on any disk.
        path: the target, accepted by `check`.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as aside:
            shutil.move(made, aside)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}. Free disk space, or choose another path.") from error

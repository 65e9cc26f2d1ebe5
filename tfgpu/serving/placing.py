"""Puts what was exported in its place: whole or not at all, and over nothing but an earlier export."""

import os
import shutil
from pathlib import Path

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError
from tfgpu.serving.formats import Format

_OF_SAVED_MODEL = ("assets", "assets.extra", "fingerprint.pb", "saved_model.pb", "saved_model.pbtxt", "variables")


def check(path: Path, form: Format, *, overwrite: bool) -> None:
    """Refuses a place where something would be lost, or nothing can be written.

    Args:
        path: where the export goes.
        form: its format.
        overwrite: whether an earlier export may be replaced.

    Raises:
        InputError: there is something else, or a file stands where a folder must be.
    """
    if path.is_symlink() or path.exists():
        if not overwrite:
            raise InputError(f"{path} exists. Choose another place, or give overwrite=True (--overwrite).")
        if other := _other(path, form):
            raise InputError(f"{path} {other}, and is not replaced. Choose another place, or remove it yourself.")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest} is a file, so nothing can be put into it. Choose another place than {path}.")


def _other(path: Path, form: Format) -> str:
    """What there is other than an export of this format; empty where there is one."""
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}"
    if form.suffix:
        return "" if path.is_file() else "is no file"
    if not (path / "saved_model.pb").is_file():
        return "is no exported model"
    more = sorted({each.name for each in path.iterdir()} - set(_OF_SAVED_MODEL))
    return f"has more in it than an exported model ({', '.join(more[:4])})" if more else ""


def put(made: Path, path: Path) -> None:
    """Moves a file or folder to its place, and replaces what is there as a whole.

    Args:
        made: a file or folder, on any disk.
        path: where to; `check` has accepted it.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as aside:
            shutil.move(made, aside)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}. Make room, or choose another place.") from error

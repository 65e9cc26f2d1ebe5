"""Puts what was exported in its place: whole or not at all, and over nothing but an earlier export."""

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

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
    """Moves what was made to its place; what is there stays until the whole of it lies beside, and is then exchanged.

    Args:
        made: a file or folder, on any disk.
        path: where to; `check` has let it pass.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            whole = beside / "new"
            shutil.move(made, whole)
            if path.is_dir() and _exchanged(whole, path):
                return
            if path.is_dir():
                path.rename(beside / "old")
            whole.replace(path)
        except BaseException:
            if (beside / "old").exists() and not path.exists():
                (beside / "old").rename(path)
            raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}. Make room, or choose another place.") from error


# Of `linux/fs.h` and `fcntl.h`.
_EXCHANGE, _FROM_HERE = 2, -100


def _exchanged(one: Path, other: Path) -> bool:
    """Gives two folders each other's name in one go, so that a process killed here leaves one model or the other.

    `rename` replaces files, not folders that hold something. A system or a file system without `renameat2` says False.
    """
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    return exchange(_FROM_HERE, os.fsencode(one), _FROM_HERE, os.fsencode(other), _EXCHANGE) == 0

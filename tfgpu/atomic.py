"""Files and folders that are replaced whole: after a crash the old content is there, or the new one.

New content is written beside the target, flushed to the disk (`fsync`), renamed, and the folder's entry is flushed.
`sync=False` leaves the flushing out: a process that is killed does no harm, but a machine that stops may.
Linux exchanges folders in one step (`renameat2`). Where it cannot, the old folder is first moved aside, under a name
that ends in `OLD`; a process that is killed at that moment leaves it there.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

OLD = ".old"
"""The end of an old folder's name while it is replaced in two steps."""
_EXCHANGE, _FROM_HERE = 2, -100  # of `linux/fs.h` and `fcntl.h`
_LONGEST = 200  # characters of the target's name that the temporary name repeats: file systems allow 255


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, suffix: str | None = None, sync: bool = True) -> Iterator[Path]:
    """Gives a temporary path beside `path`; the file or folder that the block makes there replaces `path` at the end.

    If the block raises an error, `path` keeps its content and what the block
    wrote is removed. A symbolic link stays; its target is replaced.

    Args:
        path: the file or folder to make or replace; its parent folder exists.
        suffix: of the temporary path; None takes the suffix of `path`, by which many libraries choose a format.
        sync: whether to flush it to the disk.

    Raises:
        OSError: it could not be written; what was there before is still there.

    Example:
        >>> with replacing("numbers.txt") as aside:
        ...     _ = aside.write_text("1 2 3")
        >>> Path("numbers.txt").read_text()
        '1 2 3'
    """
    target = Path(os.path.realpath(path))
    end = target.suffix if suffix is None else suffix
    aside = target.with_name(f".{target.name[:_LONGEST]}.{secrets.token_hex(4)}{end}")
    try:
        yield aside
        put(aside, target, sync=sync)
    finally:
        remove(aside)


def put(aside: Path, target: Path, *, sync: bool = True) -> None:
    """Flushes a file or a folder to the disk, then renames it and replaces what had that name.

    Args:
        aside: the file or folder; what it replaces may be there in the end.
        target: its new name, in the same folder.
        sync: whether to flush it.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    if sync:
        _flush_all(aside)
    if aside.is_dir() and target.is_dir():
        _replace_folder(aside, target)
    else:
        os.rename(aside, target)
    if sync:
        _flush_folder(target.parent)


def rename(path: Path, name: str) -> Path:
    """Gives a file or a folder another name in its folder, and flushes the folder's entry to the disk.

    Args:
        path: the file or folder.
        name: its new name; nothing has it, or an empty folder, or a file where `path` is one.

    Returns:
        The new path.

    Raises:
        OSError: it could not be renamed; it still has its old name.
    """
    renamed = path.with_name(name)
    os.rename(path, renamed)
    _flush_folder(path.parent)
    return renamed


def flush(file: BinaryIO) -> None:
    """Flushes what was written to an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_bytes(path: str | os.PathLike, content: bytes, *, sync: bool = True) -> None:
    """Makes or replaces a file. What is no file, such as `/dev/stdout` or a pipe, is written to in place.

    Args:
        path: the file; its folder exists.
        content: the whole content.
        sync: whether to flush it to the disk.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    target = Path(path)
    folder = os.path.realpath(target.parent)
    is_special = target.exists() and not target.is_file() and not target.is_dir()  # a device or a pipe
    if folder == "/dev" or folder.startswith("/proc/") or is_special:
        target.write_bytes(content)
        return
    with replacing(path, suffix=".part", sync=sync) as aside:  # a pattern such as *.json must not find it
        aside.write_bytes(content)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Makes or replaces a file of UTF-8 text; see `write_bytes`.

    Example:
        >>> write_text("metrics.csv", "epoch,loss\\n1,0.5\\n")
    """
    write_bytes(path, text.encode())


def remove(path: Path) -> None:
    """Removes a file or a folder, if there is one; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _replace_folder(aside: Path, target: Path) -> None:
    if _exchange(aside, target):
        return  # the old folder is aside now
    old = aside.with_name(aside.name + OLD)
    os.rename(target, old)
    try:
        os.rename(aside, target)
    except OSError:
        os.rename(old, target)
        raise
    remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps the names of two folders in one step; False where the system or the file system cannot."""
    renameat2, names = getattr(ctypes.CDLL(None), "renameat2", None), (os.fsencode(one), os.fsencode(other))
    return renameat2 is not None and not renameat2(_FROM_HERE, names[0], _FROM_HERE, names[1], _EXCHANGE)


def _flush_all(path: Path) -> None:
    """Flushes a file, or a folder with all that is in it, to the disk."""
    if not path.is_dir():
        _flush_file(path)
        return
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            if not os.path.islink(os.path.join(folder, name)):
                _flush_file(Path(folder, name))
        _flush_folder(Path(folder))


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        flush(file)


def _flush_folder(folder: Path) -> None:
    """Flushes the names in a folder; some file systems cannot."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

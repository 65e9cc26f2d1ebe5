"""Decoded examples in a file that is written once and memory-mapped by every run that reads the same sources.

A cache is two files: `NAME-KEY.examples` (the values, one example after another) and its index, `NAME-KEY.npz`
(labels, shape, splits, a checksum of each block of values). KEY is a hash of the source's files (path, size,
modification time), the settings that affect decoding and TensorFlow's version, so a changed source gets a new cache.
Both files are replaced atomically, the index last: without an index there is no cache. Processes that need the same
cache wait for the first one to write it.

The first time a cache is opened, its values are compared with the checksums. `NAME-KEY.verified` then records the
file's size, inode and times, and the values are read again only if one of these has changed. A damaged cache is
rewritten.
"""

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfgpu import atomic
from tfgpu.data.examples import Examples, mapped
from tfgpu.errors import InputError, MachineError, unknown

CHOICES = ("auto", "memory", "disk", "none")
_FORMAT = 2  # Part of the key: raise it when the meaning of the files changes.
_DAMAGED = (OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, OverflowError, MemoryError)
_DAMAGED += (zipfile.BadZipFile, zlib.error)
"""What NumPy may raise for a file that it did not write."""
_ROWS = 64  # examples that are decoded together and share a checksum

_log = logging.getLogger(__name__)


def check(cache: str, directory: str | Path | None) -> None:
    """Raises `InputError` for an unknown choice, or a directory that is missing or would not be used."""
    if cache not in CHOICES:
        raise unknown("cache", cache, CHOICES)
    if cache == "disk" and directory is None:
        raise InputError("cache='disk' needs a directory for the decoded examples. Give cache_directory.")
    if cache in ("memory", "none") and directory is not None:
        raise InputError(
            f"`cache_directory` requires cache='disk' or 'auto'. Received: cache={cache!r}, cache_directory="
            f"{str(directory)!r}. Remove one of them."
        )


@dataclass(frozen=True)
class Place:
    """The files of one source's cache, in a folder that exists.

    Args:
        name: the source's name.
        examples, facts, verified, lock: their paths.
    """

    name: str
    examples: Path
    facts: Path
    verified: Path
    lock: Path


def place(name: str, paths: Sequence[Path], directory: str | Path, *settings: object) -> Place:
    """Names the cache of a source in its current state.

    Args:
        name: the source's name.
        paths: the source's files.
        directory: the folder for caches.
        settings: everything else that affects the decoded values; compared by `repr`.

    Raises:
        InputError: the source's files are not known, or the directory cannot be created.
    """
    digest = hashlib.blake2b(repr((_FORMAT, tf.version.VERSION, settings)).encode(), digest_size=8)
    for path in paths:
        facts = path.stat()
        digest.update(repr((str(path.resolve()), facts.st_size, facts.st_mtime_ns)).encode())
    if not paths:
        raise InputError(f"{name} has no known files, so it cannot be cached on disk. Use cache='memory'.")
    directory = Path(directory).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"Cannot create cache_directory {str(directory)!r}: {error.strerror}. Use another directory."
        ) from error
    stem = directory / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}-{digest.hexdigest()}"
    return Place(name, *(Path(f"{stem}.{end}") for end in ("examples", "npz", "verified", "lock")))


def find(where: Place, *, verify: bool = True) -> Examples | None:
    """Opens a cache; returns None if it is missing or damaged."""
    try:
        with np.load(where.facts, allow_pickle=False) as facts:
            kept = {name: facts[name] for name in facts.files}
        dtype, shape = np.dtype(str(kept["dtype"])), tuple(kept["shape"].tolist())
        labels = kept["labels"]
        class_names, skipped = (tuple(kept[name].tolist()) for name in ("class_names", "skipped"))
        # TensorFlow maps the file into memory unchanged, so it must hold only numbers.
        if dtype.hasobject or dtype.kind in "SUMm" or min(shape, default=0) < 0:
            return None
        size = dtype.itemsize * math.prod(shape)
        if where.examples.stat().st_size != len(labels) * size:
            return None
        if verify and not _is_intact(where, kept["checksums"], _ROWS * size):
            return None
    except _DAMAGED:
        return None
    return Examples(
        where.name,
        labels,
        shape,
        class_names,
        stored=mapped(where.examples, dtype, (len(labels), *shape)),
        own={name.removeprefix("own/"): kept[name] for name in kept if name.startswith("own/")},
        skipped=skipped,
        copies=kept.get("copies"),
    )


def write(where: Place, examples: Examples) -> Examples:
    """Decodes all examples into a cache and opens it, unless another process has just written it.

    Raises:
        MachineError: the disk has no room.
        tf.errors.OpError: an example is corrupt; then no cache is left.
    """
    with open(where.lock, "w") as lock:
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = find(where)
        if found is not None:
            return found
        if where.facts.exists():
            _log.warning("The cache %s is damaged; rewriting it.", where.facts.with_suffix(""))
        loaded = tf.data.Dataset.range(len(examples.labels)).map(
            examples.load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        dtype = loaded.element_spec.dtype.as_numpy_dtype
        size = len(examples.labels) * np.dtype(dtype).itemsize * int(np.prod(examples.shape))
        free = shutil.disk_usage(where.facts.parent).free
        if size > free:
            raise MachineError(
                f"cache_directory {str(where.facts.parent)!r} has no room for {size / 2**30:.1f} GiB of decoded "
                f"examples. Free: {free / 2**30:.1f} GiB. Use another directory or cache='none'."
            )
        _log.info("%s: writing %.1f GiB of decoded examples to %s.", where.name, size / 2**30, where.examples)
        checksums = []
        with atomic.replacing(where.examples) as aside, open(aside, "wb") as file:
            for rows in loaded.batch(_ROWS).as_numpy_iterator():
                content = rows.tobytes()
                checksums.append(zlib.crc32(content))
                file.write(content)
        own = {f"own/{name}": indices for name, indices in examples.own.items()}
        copies = {} if examples.copies is None else {"copies": examples.copies}
        with atomic.replacing(where.facts) as aside, open(aside, "wb") as file:
            np.savez(
                file,
                checksums=np.array(checksums, np.uint32),
                labels=examples.labels,
                shape=np.array(examples.shape, np.int64),
                dtype=np.array(np.dtype(dtype).str),
                class_names=np.array(examples.class_names, np.str_),
                skipped=np.array(examples.skipped, np.str_),
                **own,
                **copies,
            )
    return find(where, verify=False)


def _is_intact(where: Place, checksums: np.ndarray, size: int) -> bool:
    """Compares the values with their checksums, unless this was done since the file last changed."""
    facts = where.examples.stat()
    stamp = repr((facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, zlib.crc32(checksums.tobytes())))
    with contextlib.suppress(*_DAMAGED):
        if where.verified.read_text() == stamp:
            return True
    if not np.array_equal(checksums, _checksums(where.examples, size)):
        return False
    with contextlib.suppress(OSError):  # the folder may be read-only
        atomic.write_text(where.verified, stamp)
    return True


def _checksums(path: Path, size: int) -> np.ndarray:
    """Returns the CRC-32 of each block of `size` bytes, read by several threads."""
    with open(path, "rb") as file, ThreadPoolExecutor() as threads:

        def checksum(at: int) -> int:
            return zlib.crc32(os.pread(file.fileno(), size, at))

        return np.fromiter(threads.map(checksum, range(0, path.stat().st_size, max(size, 1))), np.uint32)

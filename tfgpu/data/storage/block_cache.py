"""Blocks of remote files on the local disk: up to a limit, each with a checksum, the least recently used go first.

A block is one file, which ends with the CRC-32 of its name and content. A block that does not match, as after a crash
or on a failing disk, counts as absent and is fetched again. Several processes may share a folder: files appear whole,
and one that another process has removed is absent.
"""

import contextlib
import logging
import os
import threading
import zlib
from pathlib import Path

from tfgpu import atomic
from tfgpu.errors import MachineError

_CHECK = 4  # bytes of the checksum
_SPARE = 0.9  # the share of the limit to keep when blocks are removed, so that not every new block removes one
_END = ".block"

_log = logging.getLogger(__name__)


class BlockCache:
    """A folder of blocks.

    Args:
        directory: the folder; it is created if it does not exist.
        limit_bytes: the most bytes of all blocks together.

    Raises:
        MachineError: the folder cannot be created.

    Example:
        >>> import tempfile
        >>> cache = BlockCache(tempfile.mkdtemp(), limit_bytes=1000)
        >>> cache.put("weights", 3, b"numbers")
        >>> cache.get("weights", 3), cache.get("weights", 4)
        (b'numbers', None)
    """

    def __init__(self, directory: str | Path, limit_bytes: int):
        self.directory, self.limit_bytes = Path(directory).expanduser(), limit_bytes
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                f"Cannot create the cache {str(self.directory)!r}: {error.strerror}. Use another cache_directory."
            ) from error
        self._one_at_a_time = threading.Lock()
        self._written = limit_bytes  # so that the first `put` counts what earlier runs have left

    def path(self, key: str, number: int) -> Path:
        """Where a block is, or would be."""
        return self.directory / f"{key}-{number}{_END}"

    def get(self, key: str, number: int) -> bytes | None:
        """A block's content; None if it is absent or damaged."""
        path = self.path(key, number)
        try:
            content = path.read_bytes()
            os.utime(path)  # marks it as just used
        except OSError:
            return None
        if len(content) < _CHECK or content[-_CHECK:] != _checksum(path.name, content[:-_CHECK]):
            _log.warning("The cached block %s is damaged; fetching it again.", path)
            self.drop(key, number)
            return None
        return content[:-_CHECK]

    def has(self, key: str, number: int) -> bool:
        """Whether a block is there, perhaps damaged."""
        return self.path(key, number).exists()

    def put(self, key: str, number: int, content: bytes) -> None:
        """Keeps a block. A full disk is not an error: the block will be fetched again."""
        path = self.path(key, number)
        try:  # not synced: what a crash cuts short fails its checksum, and is fetched again
            atomic.write_bytes(path, content + _checksum(path.name, content), sync=False)
        except OSError as error:
            _log.warning("Cannot write to the cache %s: %s.", self.directory, error.strerror)
        with self._one_at_a_time:
            self._written += len(content) + _CHECK
            if self._written > self.limit_bytes * (1 - _SPARE) / 2:
                self._written = 0
                self._evict()

    def drop(self, key: str, number: int) -> None:
        """Removes a block."""
        self.path(key, number).unlink(missing_ok=True)

    def _evict(self) -> None:
        """Removes the blocks that were used longest ago, until the others fit."""
        found = []
        for entry in os.scandir(self.directory):
            if entry.name.endswith(_END) and not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat()
                    found.append((facts.st_mtime_ns, facts.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        if total <= self.limit_bytes * (1 + _SPARE) / 2:
            return
        for _, size, path in sorted(found):
            if total <= self.limit_bytes * _SPARE:
                break
            Path(path).unlink(missing_ok=True)
            total -= size


def _checksum(name: str, content: bytes) -> bytes:
    return zlib.crc32(content, zlib.crc32(name.encode())).to_bytes(_CHECK, "little")

"""Remote files by URL, through fsspec: listed, and read by blocks that are cached, retried and fetched ahead."""

import contextlib
import hashlib
import logging
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError, is_number, required, whole_number

BLOCK_BYTES = 1 << 20
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, InputError)
"""Errors that another attempt would only repeat."""
_PASSING = (408, 425, 429)  # of HTTP: timeout, too early, too many requests
_MOST_WAIT_S = 30.0
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}

_CHECK = 4  # bytes of a block's checksum
_SPARE = 0.9  # the share of the limit to keep when blocks are removed, so that not every new block removes one
_END = ".block"

_log = logging.getLogger(__name__)


def is_url(source: object) -> bool:
    """Whether a source names remote files: `PROTOCOL://...`, other than `file://`."""
    return isinstance(source, str) and "://" in source.partition("#")[0] and not source.startswith("file://")


@dataclass(frozen=True)
class Remote:
    """A source in an object store or on a web server, with its own settings; a URL alone has the defaults.

    Attributes:
        url: `s3://BUCKET/FOLDER/`, `gs://...`, `https://...`, or another that fsspec knows: a folder of shards with
            their `index.json`, as `write_shards` makes them; `.tfrecord` files by name or glob; or `.csv` or `.parquet`
            files, with `#COLUMN` for the label.
        cache_directory: where fetched blocks are kept, for all processes and later runs; None:
            `~/.cache/tfgpu/remote`.
        cache_bytes: what they may take together (16 GiB); the least recently used go.
        attempts: how often a read is tried before it fails; the wait doubles, up to 30 s.
        wait_s: seconds before the second attempt.
        connections: how many blocks are fetched at a time.

    Raises:
        InputError: a setting is out of range.

    Example:
        >>> Remote("s3://bucket/shards/", cache_bytes=100 << 30).connections
        16
    """

    url: str
    cache_directory: str | Path | None = None
    cache_bytes: int = 16 << 30
    attempts: int = 5
    wait_s: float = 0.5
    connections: int = 16

    def __post_init__(self) -> None:
        if not is_url(self.url):
            raise InputError(f"A remote source must look like 's3://bucket/folder/'. Received: {self.url!r}.")
        whole_number("cache_bytes", self.cache_bytes, minimum=4 * BLOCK_BYTES)
        whole_number("attempts", self.attempts)
        whole_number("connections", self.connections)
        if not is_number(self.wait_s) or self.wait_s < 0:
            raise InputError(f"`wait_s` must be 0 or more seconds. Received: {self.wait_s!r}.")


class Storage:
    """What a remote source is read through: the file system, the cache, and the threads that fetch.

    Args:
        remote: the source.

    Raises:
        MachineError: fsspec, or its part for this protocol, is not installed.
        InputError: no such protocol.
    """

    def __init__(self, remote: Remote):
        self.remote = remote
        self.system, self.path = _open(remote.url)
        directory = remote.cache_directory or Path.home() / ".cache" / "tfgpu" / "remote"
        self.cache = BlockCache(directory, remote.cache_bytes)
        self.threads = ThreadPoolExecutor(remote.connections, "tfgpu-remote")
        self.reads = 0  # from the server, for tests and reports

    def files(self, end: str) -> list["RemoteFile"]:
        """The files at the source's path, glob or folder, sorted; in a folder, those with `end` in their names.

        Raises:
            InputError: there are none.
            MachineError: the server does not answer.
        """
        if any(mark in self.path for mark in ("*[" if self.path.startswith("http") else "*?[")):
            names = self.attempt(lambda: self.system.glob(self.path), self.path)
        elif self.path.endswith("/") or end not in self.path.rpartition("/")[2]:
            entries = self.attempt(lambda: self.system.ls(self.path, detail=False), self.path)
            names = [name for name in entries if end in name.rstrip("/").rpartition("/")[2]]
        else:
            names = [self.path]
        names = [name for name in names if not name.rpartition("/")[2].startswith(".")]
        if not names:
            raise InputError(f"No {end} files at {self.remote.url!r}. Name a file, a folder or a glob.")
        return list(self.threads.map(self.file, sorted(names)))

    def file(self, path: str) -> "RemoteFile":
        """A file by its path, with its size and version.

        Raises:
            InputError: it is not there, or the server does not say its size.
            MachineError: the server does not answer.
        """
        facts = self.attempt(lambda: self.system.info(path), path)
        if facts.get("size") is None:
            raise InputError(f"The server does not say how long {path} is. Copy the files to a disk, or to a store.")
        version = next((facts[name] for name in ("ETag", "etag", "md5Hash", "crc32c") if facts.get(name)), None)
        version = version or facts.get("LastModified") or facts.get("mtime")
        key = hashlib.blake2b(
            f"{self.system.unstrip_protocol(path)}|{facts['size']}|{version}".encode(), digest_size=12
        )
        return RemoteFile(self, path, int(facts["size"]), key.hexdigest())

    def whole(self, path: str) -> bytes | None:
        """A small file's content; None if it is not there."""
        try:
            self.reads += 1
            return self.attempt(lambda: self.system.cat_file(path), path)
        except InputError:
            return None

    def attempt(self, act: Callable[[], Any], what: str) -> Any:
        """Does something with the server, several times if it fails.

        Raises:
            InputError: the file does not exist or may not be read.
            MachineError: the last attempt has failed.
        """
        for failed in range(1, self.remote.attempts + 1):
            try:
                return act()
            except Exception as error:  # each file system raises its own errors
                if isinstance(error, _LASTING) or _is_refusal(error):
                    raise InputError(f"Cannot read {what}: {type(error).__name__}: {_line(error)}.") from error
                if failed == self.remote.attempts:
                    raise MachineError(
                        f"Reading {what} failed {failed} times in a row: {type(error).__name__}: {_line(error)}. Check "
                        "the server and the network; training with a Checkpoint resumes from the last save."
                    ) from error
                wait = min(self.remote.wait_s * 2 ** (failed - 1), _MOST_WAIT_S) * random.uniform(0.5, 1.0)
                _log.warning("Reading %s failed (%s); attempt %d in %.1f s.", what, _line(error), failed + 1, wait)
                time.sleep(wait)


@dataclass(eq=False)
class RemoteFile:
    """One remote file; it acts as a path for its name, size and version.

    Attributes:
        storage: where it is read through.
        path: its path in the file system.
        size: bytes.
        key: names this version of the file in the cache.
    """

    storage: Storage = field(repr=False)
    path: str
    size: int
    key: str
    _coming: dict[int, Future] = field(default_factory=dict, repr=False)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> str:
        return self.path.rpartition("/")[0]

    def __str__(self) -> str:
        return self.storage.system.unstrip_protocol(self.path)

    def is_file(self) -> bool:
        return True

    def resolve(self) -> "RemoteFile":
        return self

    def stat(self) -> SimpleNamespace:
        """Size and version, as for a file on disk."""
        return SimpleNamespace(st_size=self.size, st_mtime_ns=self.key)

    def read(self, offset: int, length: int) -> bytes:
        """Reads bytes, from the cache if it has them.

        Raises:
            InputError, MachineError: they cannot be fetched.
        """
        numbers = self.blocks(offset, length)
        parts = [self._block(number) for number in numbers]
        start = offset - numbers.start * BLOCK_BYTES
        return b"".join(parts)[start : start + length]

    def blocks(self, offset: int, length: int) -> range:
        """The numbers of the blocks that hold these bytes."""
        stop = min(offset + length, self.size)
        return range(offset // BLOCK_BYTES, max(-(-stop // BLOCK_BYTES), offset // BLOCK_BYTES))

    def fetch_ahead(self, numbers: Iterable[int]) -> None:
        """Begins to fetch blocks that will be read soon; returns at once."""
        for number in numbers:
            if not self.storage.cache.has(self.key, number):
                self._begin(number)

    def forget(self, offset: int, length: int) -> None:
        """Removes these bytes from the cache, so that they are fetched again."""
        for number in self.blocks(offset, length):
            self.storage.cache.drop(self.key, number)

    def _block(self, number: int) -> bytes:
        coming = self._coming.get(number)
        if coming is not None:
            return coming.result()
        found = self.storage.cache.get(self.key, number)
        return found if found is not None else self._begin(number).result()

    def _begin(self, number: int) -> Future:
        """Fetches a block in a thread, unless one already fetches it."""
        with self._one_at_a_time:
            if number not in self._coming:
                self._coming[number] = self.storage.threads.submit(self._fetch, number)
            return self._coming[number]

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self.size - start)

        def ask() -> bytes:
            self.storage.reads += 1
            content = self.storage.system.cat_file(self.path, start=start, end=start + length)
            if len(content) == self.size != length:  # a server without ranges sends the whole file
                content = content[start : start + length]
            if len(content) != length:
                raise OSError(f"received {len(content)} bytes instead of {length}")
            return content

        try:
            content = self.storage.attempt(ask, str(self))
            self.storage.cache.put(self.key, number, content)
            return content
        finally:
            with self._one_at_a_time:
                self._coming.pop(number, None)


def _open(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    need = f"{protocol}:// sources need fsspec and its part for them"
    fix = f"Run: pip install 'tfgpu[{_EXTRAS.get(protocol, 'remote')}]'"
    fsspec = required("fsspec", need, fix, MachineError)
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MachineError(f"{need} ({_line(error)}). {fix}") from error
    except ValueError as error:
        raise InputError(f"fsspec does not support {protocol}:// addresses: {_line(error)}. Check the URL.") from error


def _is_refusal(error: Exception) -> bool:
    """Whether a web server has refused the request, and would again."""
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _PASSING


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class BlockCache:
    """A folder of blocks of remote files: up to a limit, the least recently used go first.

    A block is one file, which ends with the CRC-32 of its name and content. A block that does not match, as after a
    crash or on a failing disk, counts as absent and is fetched again. Several processes may share a folder: files
    appear whole, and one that another process has removed is absent.

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

"""TFRecord shards and tables in remote storage, as examples."""

import dataclasses
import struct
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfgpu.data import manifest, records, tables
from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples
from tfgpu.data.names import TABLE_ENDS, SourceName
from tfgpu.data.places import FOOT, HEAD, Index, masked, scan
from tfgpu.data.storage.remote_files import Remote, RemoteFile, Storage
from tfgpu.errors import InputError, MachineError, required

_AHEAD = 8  # blocks to fetch ahead while files are scanned


def open_remote(source: str | Remote, reading: Reading) -> Examples:
    """Opens a URL as examples.

    TFRecord shards are read at random, in blocks: only blocks that hold an example of a batch are fetched. Tables are
    read once from start to end.

    Args:
        source: the URL, or `Remote` with its settings.
        reading: how to read files.

    Raises:
        InputError: no such files, or files that cannot be read this way.
        MachineError: a package is missing, or the server does not answer.
    """
    remote = source if isinstance(source, Remote) else Remote(source)
    plain, _, label = remote.url.partition("#")
    kind = next((kind for end, kind in TABLE_ENDS.items() if plain.lower().endswith(end)), None)
    storage = Storage(dataclasses.replace(remote, url=plain))
    if kind is not None:
        return _tables(storage, kind, label or None, reading)
    # Examining all records before training, as for files on disk, would fetch them all.
    reading = dataclasses.replace(reading, examine_bytes=0)
    files, listed = _shards(storage)
    name = listed.name if listed is not None else plain.rstrip("/").rpartition("/")[2]
    return records.open_shards(files, listed, reading, name=name, index_of=RemoteIndex)


def _shards(storage: Storage) -> tuple[list[RemoteFile], manifest.Manifest | None]:
    """The files, and the index of their folder if it lists them all."""
    folder, _, last = storage.path.rstrip("/").rpartition("/")
    is_folder = ".tfrecord" not in last
    folder = f"{folder}/{last}" if is_folder and folder else last if is_folder else folder
    content = storage.whole(f"{folder}/{manifest.FILE}")
    listed = None if content is None else manifest.parse(content, f"{folder}/{manifest.FILE}")
    if is_folder and listed is not None:
        files = list(storage.threads.map(storage.file, [f"{folder}/{shard.file}" for shard in listed.shards]))
    else:
        files = storage.files(".tfrecord")
    shards = {} if listed is None else {shard.file: shard for shard in listed.shards}
    if not {file.name for file in files} <= shards.keys():
        return files, None
    for file in files:
        manifest.check_shard(file, shards[file.name])
    return files, listed


def _tables(storage: Storage, kind: str, label: str | None, reading: Reading) -> Examples:
    with tempfile.TemporaryDirectory(prefix="tfgpu-") as folder:
        for file in storage.files(f".{kind}"):
            with open(Path(folder) / file.name, "wb") as copy:
                for offset in range(0, file.size, 1 << 20):
                    file.fetch_ahead(file.blocks(offset, _AHEAD << 20))
                    copy.write(file.read(offset, 1 << 20))
        return dataclasses.replace(
            tables.open_tables(SourceName(kind, folder, label), reading), name=storage.path.rpartition("/")[2]
        )


class RemoteIndex(Index):
    """Random access to the records of remote files. Each record's checksums are verified.

    Args:
        paths: the files.
        known: the offsets of each file's records, if known; otherwise the files are scanned, which fetches them.
    """

    def __init__(self, paths: list[RemoteFile], *, known=None):
        self._crc, self._files = _crc32c(), paths
        super().__init__(paths, known=known)
        # Each record ends where the next one of its file begins, or where the file ends.
        self._ends = np.empty_like(self.offsets)
        sizes = np.array([file.size for file in self._files], np.int64)
        order = np.lexsort((self.offsets, self.file_of))
        self._ends[order[:-1]] = self.offsets[order[1:]]
        last = np.append(self.file_of[order[1:]] != self.file_of[order[:-1]], True)
        self._ends[order[last]] = sizes[self.file_of[order[last]]]

    def _scan(self, path: RemoteFile) -> tuple[list[int], bool]:
        def read(place: int, length: int) -> bytes:
            path.fetch_ahead(path.blocks(place, _AHEAD << 20))
            return path.read(place, length)

        return scan(path, path.size, read)

    def reordered(self, order: np.ndarray) -> "RemoteIndex":
        other = super().reordered(order)
        other._ends = self._ends[order]
        return other

    def record(self, i: tf.Tensor) -> tf.Tensor:
        # Declared stateless: otherwise tf.data reads nothing in parallel where operations must be deterministic.
        return tf.ensure_shape(tf.numpy_function(self._read, [i], tf.string, stateful=False), [])

    def ahead(self, indices: tf.Tensor) -> tf.Tensor:
        """Begins to fetch the records at some indices; returns the indices."""
        return tf.ensure_shape(tf.numpy_function(self._begin, [indices], tf.int64, stateful=False), indices.shape)

    def _begin(self, indices: np.ndarray) -> np.ndarray:
        for i in indices:
            file, start = self._files[self.file_of[i]], int(self.offsets[i])
            file.fetch_ahead(file.blocks(start, int(self._ends[i]) - start))
        return indices

    def _read(self, i: np.int64) -> bytes:
        file, start = self._files[self.file_of[i]], int(self.offsets[i])
        length = int(self._ends[i]) - start
        found = _content(file.read(start, length), self._crc)
        if found is None:  # damaged on the way, or in the cache's own memory
            file.forget(start, length)
            found = _content(file.read(start, length), self._crc)
        if found is None:
            raise InputError(
                f"Corrupt: record {self.places[i]} of {file} (the first is 0). Copy the file again, or write it again."
            )
        return found


def _content(framed: bytes, crc) -> bytes | None:
    """A record without its frame; None if a checksum does not match."""
    length = struct.unpack("<Q", framed[:8])[0]
    content = framed[HEAD : HEAD + length]
    sums = framed[8:HEAD] + framed[HEAD + length : HEAD + length + FOOT]
    if len(content) < length or sums != struct.pack("<II", masked(crc(framed[:8])), masked(crc(content))):
        return None
    return content


def _crc32c():
    need, fix = "Remote shards need google-crc32c", "Run: pip install 'tfgpu[remote]'"
    return required("google_crc32c", need, fix, MachineError).value

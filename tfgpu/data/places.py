"""Random access to the records of TFRecord files, by where each record begins."""

import copy
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data.position import on_cpu
from tfgpu.errors import InputError

_TABLE = range(256)  # of CRC-32C
for _ in range(8):
    _TABLE = tuple((value >> 1) ^ (0x82F63B78 if value & 1 else 0) for value in _TABLE)
HEAD, FOOT = 12, 4  # bytes around a record: its length with a checksum, and the data's checksum


class Index:
    """The offset of each record in some TFRecord files, for random access.

    Only the records' headers are read. Nothing after a broken header can be found; `lost` names it.

    Args:
        paths: the files.
        known: the offsets of each file's records, if known.

    Raises:
        InputError: a file is compressed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.tfrecord"
        >>> with tf.io.TFRecordWriter(str(path)) as writer:
        ...     writer.write(b"first")
        ...     writer.write(b"second")
        >>> Index([path]).offsets.tolist()
        [0, 21]
    """

    def __init__(self, paths: list[Path], *, known: Sequence[np.ndarray] | None = None):
        scanned = [(starts, False) for starts in known] if known is not None else [self._scan(path) for path in paths]
        self.lost = tuple(
            f"record {len(starts)} of {path} and what follows it (the first is 0)"
            for path, (starts, broken) in zip(paths, scanned, strict=True)
            if broken
        )
        counts = [len(starts) for starts, _ in scanned]
        offsets = np.concatenate([np.asarray(starts, np.int64) for starts, _ in scanned])
        places = np.concatenate([np.arange(count) for count in counts])
        self._paths = on_cpu([str(p) for p in paths])
        self._put(offsets, np.repeat(np.arange(len(paths)), counts), places)

    def _scan(self, path: Path) -> tuple[list[int], bool]:
        with open(path, "rb") as file:
            return scan(path, path.stat().st_size, lambda place, length: os.pread(file.fileno(), length, place))

    def _put(self, offsets: np.ndarray, file_of: np.ndarray, places: np.ndarray) -> None:
        self.offsets, self.file_of, self.places = offsets, file_of, places
        self._offsets, self._file_of, self._places = on_cpu(offsets), on_cpu(file_of), on_cpu(places)

    def reordered(self, order: np.ndarray) -> "Index":
        """Returns an index whose record `i` is this one's `order[i]`."""
        other = copy.copy(self)
        other._put(self.offsets[order], self.file_of[order], self.places[order])
        return other

    ahead: Callable[[tf.Tensor], tf.Tensor] | None = None
    """Begins to fetch the records at some indices, int64 [n], if they are far away."""

    def record(self, i: tf.Tensor) -> tf.Tensor:
        """Reads record `i` as a string tensor and verifies its checksums."""
        opened = tf.raw_ops.TFRecordDatasetV2(
            filenames=self._paths[self._file_of[i]][None],
            compression_type="",
            buffer_size=0,
            byte_offsets=self._offsets[i][None],
        )
        one = tf.data.experimental.from_variant(opened, tf.TensorSpec([], tf.string)).take(1)
        return one.get_single_element()

    def where(self, i: tf.Tensor) -> tf.Tensor:
        """Describes record `i`: its number in its file, from 0, and the file."""
        number, path = tf.strings.as_string(self._places[i]), self._paths[self._file_of[i]]
        return tf.strings.join(["record ", number, " of ", path, " (the first is 0)"])


def scan(path: Any, size: int, read: Callable[[int, int], bytes]) -> tuple[list[int], bool]:
    """Finds the records of a file.

    Args:
        path: the file, for messages.
        size: its bytes.
        read: `(offset, length)` -> the bytes there.

    Returns:
        The records' offsets, and whether the file ends in an invalid record.

    Raises:
        InputError: the file is compressed.
    """
    if size and read(0, 2) == b"\x1f\x8b":
        raise InputError(
            f"{path} is compressed, which prevents random access to its records. Decompress it: gunzip {path}."
        )
    starts, place = [], 0
    while place < size:
        head = read(place, HEAD)
        if len(head) < HEAD or struct.unpack("<I", head[8:])[0] != masked(_checksum(head[:8])):
            return starts, True
        after = place + HEAD + struct.unpack("<Q", head[:8])[0] + FOOT
        if after > size:
            return starts, True
        starts.append(place)
        place = after
    return starts, False


def _checksum(data: bytes) -> int:
    """CRC-32C; for eight bytes only, so Python is fast enough."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """A CRC-32C, masked as the format of TFRecord files specifies."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF

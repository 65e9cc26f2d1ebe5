"""Spools sequential examples: in memory while they fit, else in a temporary file.

Generators, `tf.data.Dataset`s and tables have no random access, which an exact order needs, so they are read once from
start to end. Examples beyond `memory_bytes` go to a file in the temporary folder (see `TMPDIR`), which is memory-mapped
and removed when the process ends. The batches are the same in both cases.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data.decoding import Files, Reading, decode_image, open_files
from tfgpu.data.examples import Examples, features, from_arrays, labeled, mapped
from tfgpu.data.position import on_cpu
from tfgpu.data.records import Index
from tfgpu.data.splits import PARTS, first_of
from tfgpu.errors import InputError, MachineError

_LEAST_FREE = 1 << 28  # bytes of the disk to leave free
_BETWEEN_CHECKS = 1 << 26  # bytes written between two checks of the free space


def keep_rows(
    parts: Mapping[str, Iterable[tuple[np.ndarray, np.ndarray]]], *, name: str, reading: Reading, class_names=None
) -> Examples:
    """Reads chunks of numbers once.

    Args:
        parts: for each split, chunks `(x, y)` of rows.
        name: what to call the source.
        reading: how much to keep in memory.
        class_names: one name per class, if known.

    Returns:
        The examples, in memory or in a file.

    Raises:
        InputError: values that `from_arrays` rejects, or rows of different shapes or types.
        MachineError: the disk has no room.

    Example:
        >>> chunks = [(np.zeros([2, 3]), np.array([0, 1])), (np.ones([1, 3]), np.array([1]))]
        >>> keep_rows({"train": chunks}, name="few", reading=Reading()).labels.tolist()
        [0, 1, 1]
    """
    rows, labels = _SpooledRows(name, reading.memory_bytes), []

    def add(x: np.ndarray, y: np.ndarray) -> int:
        # NumPy would concatenate numbers with strings silently.
        kinds = [(each.dtype.kind in "USO", each.shape[1:]) for each in (y, *labels[:1])]
        if kinds[0] != kinds[-1]:
            raise InputError(
                f"{name}: all labels must have one type and shape. Received: {labels[0].dtype} of shape "
                f"{labels[0].shape[1:]}, and {y.dtype} of shape {y.shape[1:]}."
            )
        labels.append(y)
        rows.add(x)
        return len(x)

    own, y = _read(parts, add, name), np.concatenate(labels)
    if rows.path is None:
        x = np.concatenate(rows.chunks)
        return from_arrays(x, y, name=name, own=own, class_names=class_names, task=reading.task)
    labels, class_names, structure = labeled(y, name=name, class_names=class_names, task=reading.task)
    copies, stored = rows.finish(), mapped(rows.path, rows.dtype, (len(labels), *rows.shape))
    return Examples(name, labels, rows.shape, class_names, stored=stored, own=own, copies=copies, structure=structure)


def keep_images(
    parts: Mapping[str, Iterable[tuple[bytes, int]]], *, name: str, reading: Reading, class_names=None
) -> Examples:
    """Reads encoded images and labels once.

    Args:
        parts: for each split, pairs of an encoded image and its label.
        name, reading, class_names: as in `keep_rows`.

    Returns:
        The examples, decoded in memory or read on demand, like those of image files.

    Raises:
        InputError: no examples, images that cannot be read, or images of different sizes.
        MachineError: the disk has no room.
    """
    images, labels = _Images(name, reading.memory_bytes), []

    def add(encoded: bytes, label: int) -> int:
        images.add(encoded)
        labels.append(label)
        return 1

    own, labels = _read(parts, add, name), np.asarray(labels)
    (image, size), label_of = images.finish(), on_cpu(labels)
    files = Files(
        name=name,
        count=len(labels),
        size=size,
        read=lambda i: (decode_image(image(i), reading.image_size), label_of[i]),
        label=lambda i: label_of[i],
        where=lambda i: tf.strings.join(["image ", tf.strings.as_string(i), " of ", name]),
        own=own,
        class_names=class_names,
        encoded=image,
        labels=labels,
    )
    return open_files(files, reading)


def _read(parts: Mapping[str, Iterable[tuple]], add: Callable[[Any, Any], int], name: str) -> dict[str, np.ndarray]:
    """Passes each split's examples to `add`, which returns their number; returns the numbers of each split."""
    own, count = {}, 0
    for part in (part for part in PARTS if part in parts):
        first = count
        count += sum(add(x, y) for x, y in parts[part])
        if count > first or part == "train":
            own[part] = np.arange(first, count)
    if not len(own["train"]):
        raise InputError(f"{name} has no examples. Provide at least one example and its label.")
    return own


class _SpooledRows:
    """Rows of numbers: `chunks` while they fit, else all in the file at `path`."""

    def __init__(self, name: str, memory_bytes: int):
        self._name, self._memory_bytes = name, memory_bytes
        self._size, self._digests, self._file = 0, [], None
        self.chunks: list[np.ndarray] = []
        self.count, self.path, self.shape, self.dtype = 0, None, None, None

    def add(self, x: np.ndarray) -> None:
        x = features(x, name=self._name, first=self.count)
        if self.shape is None:
            self.shape, self.dtype = x.shape[1:], x.dtype
        if x.shape[1:] != self.shape:
            raise InputError(f"{self._name}: all examples must have one shape. Received: {self.shape}, {x.shape[1:]}.")
        if x.dtype != self.dtype:
            raise InputError(f"{self._name}: all examples must have one type. Received: {self.dtype} and {x.dtype}.")
        self.count += len(x)
        self._size += x.nbytes
        self.chunks.append(x)
        if self.path is None and self._size > self._memory_bytes:
            self.path = _temporary_folder() / "examples"
            self._file, self._room = open(self.path, "wb"), _Room(self.path, self._name)
        if self.path is not None:
            for chunk in self.chunks:
                self._room.take(chunk.nbytes)
                self._file.write(np.ascontiguousarray(chunk).tobytes())
                self._digests.append(b"".join(blake2b(row.tobytes(), digest_size=8).digest() for row in chunk))
            self.chunks = []

    def finish(self) -> np.ndarray:
        """Closes the file; returns, for each row, the index of the first row that equals it."""
        self._file.close()
        return first_of(np.frombuffer(b"".join(self._digests), np.int64))


class _Images:
    """Encoded images: in a tensor while they fit, else in a TFRecord file."""

    def __init__(self, name: str, memory_bytes: int):
        self._name, self._memory_bytes = name, memory_bytes
        self._kept: list[bytes] = []
        self._size, self._path, self._writer = 0, None, None

    def add(self, encoded: bytes) -> None:
        self._size += len(encoded)
        self._kept.append(encoded)
        if self._writer is None and self._size > self._memory_bytes:
            self._path = _temporary_folder() / "images.tfrecord"
            self._writer, self._room = tf.io.TFRecordWriter(str(self._path)), _Room(self._path, self._name)
        if self._writer is not None:
            for image in self._kept:
                self._room.take(len(image))
                self._writer.write(image)
            self._kept = []

    def finish(self):
        """Returns a function from an index to an encoded image, and the total bytes."""
        if self._writer is not None:
            self._writer.close()
            return Index([self._path]).record, self._size
        images = on_cpu(self._kept)
        return lambda i: images[i], self._size


class _Room:
    """Checks from time to time that the disk has room for more: a generator may never end."""

    def __init__(self, path: Path, name: str):
        self._path, self._name, self._taken = path, name, _BETWEEN_CHECKS

    def take(self, size: int) -> None:
        self._taken += size
        if self._taken < _BETWEEN_CHECKS:
            return
        free = shutil.disk_usage(self._path.parent).free
        if free - self._taken < _LEAST_FREE:
            raise MachineError(
                f"{self._name} does not fit in memory_bytes, and {self._path.parent} has no room for it. Free: "
                f"{free >> 20} MiB. Set TMPDIR to a larger disk, increase memory_bytes, or check that the data ends."
            )
        self._taken = 0


def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tfgpu-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

"""Files of safetensors that are written array by array, with a running hash, and read by slices.

The library writes a file from one mapping of bytes, which is a second copy of all arrays. The format is simple: eight
bytes with the length of a JSON header, the header with each tensor's dtype, shape and place, and the numbers
(https://huggingface.co/docs/safetensors). The library reads it.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tfgpu import atomic
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.core.state.parts import Stored

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_NAMES = {np.dtype(name): code for code, name in _DTYPES.items()}
_STRETCH = re.compile(r"(.+)\[(\d+):(\d+)\]", re.DOTALL)
_ALIGNMENT = 8
_BUFFER = 1 << 20


def write(path: Path, tensors: list[Stored]) -> tuple[str, int]:
    """Writes a file and flushes it to the disk.

    Args:
        path: the file to write; an existing one is replaced.
        tensors: what to write. The list is emptied, so that each array's memory is freed once it is written.

    Returns:
        The SHA-256 of the file, and its bytes.

    Raises:
        OSError: it could not be written.
        ValueError: the format has no such dtype.
    """
    digest = hashlib.sha256()
    with open(path, "wb", buffering=_BUFFER) as file:
        for content in _contents(tensors):
            digest.update(content)
            file.write(content)
        atomic.flush(file)
        return digest.hexdigest(), file.tell()


def _contents(tensors: list[Stored]) -> Iterable[bytes | memoryview]:
    tensors.sort(key=lambda each: -each.dtype.itemsize)  # so that each tensor begins at a multiple of its item size
    header, at = {}, 0
    for each in tensors:
        if each.dtype not in _NAMES:
            raise ValueError(f"{each.key} has the dtype {each.dtype}, which safetensors cannot hold.")
        end = at + math.prod(each.shape) * each.dtype.itemsize
        header[each.key] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    while tensors:
        for chunk in tensors.pop(0).chunks:
            if chunk.size:
                in_order = np.ascontiguousarray(chunk, chunk.dtype.newbyteorder("<"))
                yield memoryview(in_order.reshape(-1)).cast("B")


def hash_of(path: Path) -> str:
    """The SHA-256 of a file, read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class SavedArray(ArraySlices):
    """An array in files, whole or in stretches. Files that are removed meanwhile stay readable.

    Args:
        shape: of the array.
        pieces: for each, an open file, the tensor's name there, its first number and the one after its last.

    Raises:
        ValueError: the pieces are not the array.
    """

    def __init__(self, shape: tuple[int, ...], pieces: list[tuple[Any, str, int, int]]):
        self._pieces = sorted(pieces, key=lambda piece: (piece[2], piece[3]))
        file, key, _, _ = self._pieces[0]
        super().__init__(shape, np.dtype(_DTYPES[file.get_slice(key).get_dtype()]), self._at)
        if any(math.prod(file.get_slice(key).get_shape()) != end - begin for file, key, begin, end in self._pieces):
            raise ValueError(f"{key} has another length than its name says")
        ends = [0, *(end for *_, end in self._pieces)]
        begins = [*(begin for *_, begin, _ in self._pieces), math.prod(shape)]
        if ends != begins:
            raise ValueError(f"{key}: the stretches {[piece[2:] for piece in self._pieces]} do not make {shape}")

    def stretch(self, start: int, stop: int) -> np.ndarray:
        """Its numbers from `start` to before `stop` in row-major order; only rows that hold them are read."""
        pieces = [
            (file, key, max(start, first) - first, min(stop, last) - first, first)
            for file, key, first, last in self._pieces
            if first < stop and start < last
        ]
        if len(pieces) == 1:
            return _read(*pieces[0][:4])
        found = np.empty(max(stop - start, 0), self.dtype)
        for file, key, low, high, first in pieces:
            found[first + low - start : first + high - start] = _read(file, key, low, high)
        return found

    def _at(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part at one slice per axis; only rows in the first axis's slice are read."""
        if not self.shape:
            return self.stretch(0, 1).reshape(())
        first, last, _ = index[0].indices(self.shape[0])
        row = math.prod(self.shape[1:])
        last = max(first, last)
        found = self.stretch(first * row, last * row).reshape(last - first, *self.shape[1:])
        return found[(slice(None), *index[1:])]


class JoinedArray(ArraySlices):
    """An array in shards that lie side by side along an axis; shards outside a slice are not read."""

    def __init__(self, shards: list[ArraySlices], axis: int):
        self._shards, self._axis = shards, axis
        shape = list(shards[0].shape)
        shape[axis] = sum(shard.shape[axis] for shard in shards)
        super().__init__(shape, shards[0].dtype, self._at)

    def _at(self, index: tuple[slice, ...]) -> np.ndarray:
        axis, found, begin = self._axis, [], 0
        first, last, _ = index[axis].indices(self.shape[axis])
        for shard in self._shards:
            end = begin + shard.shape[axis]
            if first < end and begin < last or not found and end == self.shape[axis]:  # an empty slice has a shape
                part = slice(max(first, begin) - begin, max(min(last, end), begin) - begin)
                found.append(shard[(*index[:axis], part, *index[axis + 1 :])])
            begin = end
        return found[0] if len(found) == 1 else np.concatenate(found, axis)


def open_arrays(
    paths: Iterable[Path], cut: Mapping[str, Iterable[int]], axes: Mapping[str, int]
) -> dict[str, ArraySlices]:
    """The arrays in some files; each is read when it is asked for.

    Args:
        paths: the files.
        cut: the shapes of arrays in stretches.
        axes: the axes of arrays in shards.

    Raises:
        OSError, ValueError, LookupError, safetensors.SafetensorError: the files are not what was written.
    """
    pieces: dict[str, list] = {}
    shapes = {name: tuple(map(int, shape)) for name, shape in cut.items()}
    for path in paths:
        file = safetensors.safe_open(path, "numpy")
        for key in file.keys():  # noqa: SIM118
            parts = _STRETCH.fullmatch(key)
            if parts is not None and parts[1] in shapes:
                pieces.setdefault(parts[1], []).append((file, key, int(parts[2]), int(parts[3])))
                continue
            shapes[key] = tuple(file.get_slice(key).get_shape())
            pieces.setdefault(key, []).append((file, key, 0, math.prod(shapes[key])))
    found = {name: SavedArray(shapes[name], each) for name, each in pieces.items()}
    if missing := shapes.keys() - found.keys():
        raise ValueError(f"{min(missing)} is in none of the files")
    for name in reversed(axes):  # a shard may be joined from shards itself; it was named after the whole
        shards = []
        while f"{name}~{len(shards)}" in found:
            shards.append(found.pop(f"{name}~{len(shards)}"))
        found[name] = JoinedArray(shards, axes[name])
    return found


def _read(file, key: str, begin: int, end: int) -> np.ndarray:
    """Consecutive numbers of a tensor."""
    tensor = file.get_slice(key)
    shape = tensor.get_shape()
    size = math.prod(shape)
    if (begin, end) == (0, size) or not shape or not size:
        return file.get_tensor(key).reshape(-1)[begin:end]
    width = size // shape[0]
    first, last = begin // width, -(-end // width)
    return tensor[first:last].reshape(-1)[begin - first * width : end - first * width]

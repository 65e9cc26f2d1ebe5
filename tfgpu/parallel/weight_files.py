"""Files of weights, read by slices: safetensors (one file, or several with an index), and Keras's HDF5 files."""

import contextlib
import functools
import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
import tensorflow as tf
from safetensors import SafetensorError, safe_open

from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError

INDEX = ".safetensors.index.json"
SHARDED = ".weights.json"
"""How the name of the index ends that Keras saves with `max_shard_size`."""
_IN_KERAS = "model.weights.h5"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_DTYPES |= {
    f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
_AT_ONCE = 1 << 22
"""Bytes that are read before a file is reopened: what was read of a mapped file counts as the process's memory."""
_SMALL = 1 << 16
"""Bytes below which an array is handed out whole: layers of users may expect an array of NumPy."""


def safetensors_in(path: Path) -> list[Path]:
    """The files that hold a model's weights.

    Args:
        path: a `.safetensors` file, an index of several (`*.safetensors.index.json`), or a folder with either.

    Raises:
        InputError: there are none, or several without an index.
    """
    if path.is_dir():
        return safetensors_in(_one_in(path))
    if not path.name.endswith(INDEX):
        return [path]
    return _listed_in(path, "safetensors files")


def _listed_in(index: Path, what: str) -> list[Path]:
    """The files beside an index that its `weight_map` names."""
    try:
        found = json.loads(index.read_text())["weight_map"].values()
        names = sorted({name for each in found for name in ([each] if isinstance(each, str) else each)})
        files = [index.parent / name for name in names if Path(name).name == name]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not an index of {what}: {error}. Copy it again.") from error
    absent = [file.name for file in files if not file.is_file()]
    if absent or not files or len(files) < len(names):
        raise InputError(f"{index} lists files that are not beside it: {', '.join(absent or names)}. Copy them there.")
    return files


def _one_in(folder: Path) -> Path:
    indices, files = sorted(folder.glob(f"*{INDEX}")), sorted(folder.glob("*.safetensors"))
    found = indices or files
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(
            f"{folder} must have one .safetensors file, or one index of several (*{INDEX}). Received: {names}. "
            "Give the path of the file itself."
        )
    return found[0]


def open_safetensors(paths: list[Path]) -> dict[str, ArraySlices]:
    """The arrays of some files by name; nothing of them is read yet.

    Raises:
        InputError: a file cannot be read, has a dtype that NumPy has no equal of, or a name that another has.
    """
    arrays: dict[str, ArraySlices] = {}
    for path in paths:
        file = _Safetensors(path)
        for name, found in file.arrays():
            if name in arrays:
                raise InputError(f"{path} and another file both have {name!r}. Give an index, or one file.")
            arrays[name] = found
    return arrays


class _Safetensors:
    """One file, which is mapped into memory and reopened between large reads."""

    def __init__(self, path: Path):
        self._path, self._file, self._bytes = path, None, 0

    def arrays(self) -> Iterator[tuple[str, ArraySlices]]:
        for name in self._open().keys():  # noqa: SIM118 (no mapping)
            view = self._file.get_slice(name)
            kind = _DTYPES.get(view.get_dtype())
            if kind is None:
                raise InputError(
                    f"{self._path} has {name!r} as {view.get_dtype()}, a type that NumPy lacks. Convert the file."
                )
            dtype = np.dtype(tf.as_dtype(kind).as_numpy_dtype)
            read = functools.partial(self._read, name, view.get_shape(), dtype)
            yield name, ArraySlices(view.get_shape(), dtype, read)

    def _open(self):
        try:
            self._file = safe_open(self._path, framework="np")
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self._path} cannot be read: {error}. Give a whole .safetensors file.") from error
        self._bytes = 0
        return self._file

    def _read(self, name: str, shape: list[int], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
        rows = max(1, _AT_ONCE // max(1, math.prod(sizes[1:]) * dtype.itemsize))
        if not sizes or sizes[0] <= rows:
            return self._part(name, index or ...)
        found, (start, _, _) = np.empty(sizes, dtype), index[0].indices(shape[0])
        for at in range(0, sizes[0], rows):
            stop = min(at + rows, sizes[0])
            found[at:stop] = self._part(name, (slice(start + at, start + stop), *index[1:]))
        return found

    def _part(self, name: str, index) -> np.ndarray:
        if self._bytes > _AT_ONCE:
            self._file = None
        file = self._file or self._open()
        found = file.get_slice(name)[index]
        self._bytes += found.nbytes
        return found


@contextlib.contextmanager
def hdf5_in(path: Path) -> Iterator[list[BinaryIO]]:
    """Opens the HDF5 file of a `.keras` or `.weights.h5` file, or those that a `.weights.json` lists.

    In a `.keras` file as Keras writes it, the bytes lie as they are; a compressed one is unpacked to a temporary file.

    Raises:
        InputError: a file is not there or damaged.
    """
    paths = _listed_in(path, "files of weights") if path.name.endswith(SHARDED) else [path]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(each, "rb")) for each in paths]
            yield [_in_archive(file, stack) for file in files] if path.suffix == ".keras" else files
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {error}. Give a file that Keras has saved.") from error


def _in_archive(file: BinaryIO, stack: contextlib.ExitStack) -> BinaryIO:
    archive = stack.enter_context(zipfile.ZipFile(file))
    entry = archive.getinfo(_IN_KERAS)
    if entry.compress_type == zipfile.ZIP_STORED:
        return _FileSlice(file, _start_of(file, entry), entry.file_size)
    unpacked = stack.enter_context(tempfile.TemporaryFile())
    with archive.open(entry) as packed:
        shutil.copyfileobj(packed, unpacked)
    unpacked.seek(0)
    return unpacked


def _start_of(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: its header has 30 bytes, then its name and extra fields, whose lengths end it."""
    file.seek(entry.header_offset + 26)
    return entry.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))


class _FileSlice:
    """Part of a file, as a file that h5py reads."""

    def __init__(self, file: BinaryIO, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        self._file.seek(self._start + self._at)
        read = self._file.readinto(memoryview(buffer)[: max(0, self._size - self._at)])
        self._at += read
        return read

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        content = bytearray(left if size < 0 else min(size, left))
        return bytes(content[: self.readinto(content)])


def slices_of(dataset: h5py.Dataset) -> ArraySlices | np.ndarray:
    """An array of an HDF5 file that Keras wrote; a small one is read at once."""
    kind = np.dtype(tf.bfloat16.as_numpy_dtype) if dataset.attrs.get("dtype") == "bfloat16" else None

    def read(index: tuple[slice, ...]) -> np.ndarray:
        found = np.asarray(dataset[index])
        return found if kind is None else found.view(kind)

    if dataset.nbytes < _SMALL or not dataset.shape:
        return read(())
    return ArraySlices(dataset.shape, kind or dataset.dtype, read)

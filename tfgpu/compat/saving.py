"""How Keras writes a model: parts of its savers that have no public function."""

import contextlib
import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import h5py
import keras
from keras.src.saving import saving_lib


def check_serializable(model: keras.Model) -> None:
    """Raises the error that saving raises for a model that JSON cannot describe."""
    saving_lib._serialize_model_as_json(model)


def read_all(model: keras.Model, skipped: Sequence[object] = ()) -> None:
    """Reads every value of a model in the order in which a save does, and frees each after its layer.

    Args:
        skipped: objects that the save skips.
    """
    store = _Reader()
    try:
        saving_lib._save_state(model, store, None, "", {id(saveable) for saveable in skipped})
    finally:
        store.close()


class _Reader(saving_lib.H5IOStore):
    """A store that discards what a save writes."""

    def __init__(self):
        super().__init__(io.BytesIO(), mode="w")

    def make(self, path, metadata=None):
        self._h5_entry_group = {}
        return self

    def __setitem__(self, key, value):
        self._h5_entry_group[key] = keras.ops.convert_to_numpy(value)


def write_model(
    model: keras.Model,
    path: str,
    write: Callable[[h5py.Group, str, Any], bool],
    source_of: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Writes a `.keras` file as Keras does, but its arrays go where they stay in the file, one after another.

    Keras makes the file of weights in memory, or in a second file, and copies it into the archive.

    Args:
        model: built.
        path: the file to make.
        write: writes an array to a group of the HDF5 file under a name, or returns False to leave it to Keras.
        source_of: what is written in place of what the model gives.
    """
    config, metadata = saving_lib._serialize_model_as_json(model)
    with open(path, "w+b") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(saving_lib._METADATA_FILENAME, metadata)
        archive.writestr(saving_lib._CONFIG_FILENAME, config)
        entry = _Entry(archive, file, saving_lib._VARS_FNAME_H5)
        arrays, assets = _StreamedStore(entry, write, source_of), None
        try:
            assets = saving_lib.DiskIOStore(saving_lib._ASSETS_DIRNAME, archive=archive, mode="w")
            saving_lib._save_state(model, arrays, assets, "", set())
            arrays.close()
            entry.finish()  # before the archive gets its next entry
        finally:
            arrays.close()
            if assets is not None:
                assets.close()


def is_streamed(store: object) -> bool:
    """Whether a store takes variables in place of their values, and writes them by slices."""
    return isinstance(store, _StreamedStore)


class _Entry(io.RawIOBase):
    """A file within a zip archive, stored as it is, that is written and read at any place.

    Args:
        archive: open for writing; it gets the entry at the end, and no other entry before `finish`.
        file: the archive's file.
        name: of the entry.
    """

    def __init__(self, archive: zipfile.ZipFile, file: BinaryIO, name: str):
        self._archive, self._file, self._info = archive, file, zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
        self._info.external_attr = 0o600 << 16
        self._info.CRC = self._info.file_size = self._info.compress_size = 0  # known at the end
        self._info.header_offset = archive.start_dir
        self._begin = archive.start_dir + len(self._info.FileHeader(zip64=True))
        self._at = self._end = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(self._end - self._at, 0)])
        self._at += count
        return count

    def write(self, content) -> int:
        self._file.seek(self._begin + self._at)
        count = self._file.write(content)
        self._at += count
        self._end = max(self._end, self._at)
        return count

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        self._file.truncate(self._begin + self._end)
        return self._end

    def finish(self) -> None:
        """Adds the entry to the archive's directory."""
        self._file.flush()
        checksum, buffer = 0, memoryview(bytearray(1 << 20))
        self.seek(0)
        while count := self.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
        self._info.CRC, self._info.file_size, self._info.compress_size = checksum, self._end, self._end
        self._file.seek(self._info.header_offset)
        self._file.write(self._info.FileHeader(zip64=True))
        self._archive.filelist.append(self._info)
        self._archive.NameToInfo[self._info.filename] = self._info
        self._archive.start_dir = self._begin + self._end


class _OpenStore(saving_lib.H5IOStore):
    """A store of an open file."""

    def __init__(self, file: io.RawIOBase | BinaryIO, mode: str):
        super().__init__(io.BytesIO(), mode="w")  # of an empty file: the constructor takes no other objects
        self.h5_file.close()
        self.h5_file, self.mode = h5py.File(file, mode), mode


class _StreamedStore(_OpenStore):
    """A store that writes to an open file."""

    def __init__(self, file: io.RawIOBase, write: Callable, source_of: Callable[[Any], Any]):
        super().__init__(file, "w")
        self._write, self._source_of = write, source_of

    def __setitem__(self, key, value):
        if not self._h5_entry_initialized:
            self._create_h5_group(self._h5_entry_path)
        value = self._source_of(value)
        if not self._write(self._h5_entry_group, key, value):
            super().__setitem__(key, value)


def load_state(model: keras.Model, files: Sequence[BinaryIO], slices_of: Callable[[h5py.Dataset], object]) -> None:
    """Gives a model's layers what HDF5 files of Keras's format hold for them, one by one, as `load_weights` does.

    Args:
        model: built.
        files: the HDF5 file, or those over which the weights of one model were saved, open for reading.
        slices_of: what layers get in place of an array of a file.

    Raises:
        ValueError: the files are of another model.
        OSError: one is not HDF5.
    """
    failed, messages = set(), {}
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(contextlib.closing(_SlicedStore(file, slices_of))) for file in files]
        saving_lib._load_state(
            model,
            weights_store=parts[0] if len(parts) == 1 else _SlicedStores(parts),
            assets_store=None,
            inner_path="",
            visited_saveables={id(getattr(model, "optimizer", None))},
            failed_saveables=failed,
            error_msgs=messages,
        )
    if failed:
        raise ValueError("; ".join(f"{saveable.name}: {error}" for saveable, error in list(messages.values())[:5]))


class _SlicedStore(_OpenStore):
    """A store that reads no array as a whole."""

    def __init__(self, file: BinaryIO, slices_of: Callable[[h5py.Dataset], object]):
        super().__init__(file, "r")
        self._slices_of = slices_of

    def __getitem__(self, key):
        group = self._h5_entry_group
        found = group.get(key) if group else None
        if not isinstance(found, h5py.Dataset) or isinstance(group.get(key, getlink=True), h5py.ExternalLink):
            raise KeyError(f"the file has no array {key!r} here")
        if found.external or found.is_virtual:
            raise ValueError(f"the array {key!r} lies in another file")
        return self._slices_of(found)


class _SlicedStores(saving_lib.H5IOStore):
    """Several stores as one: of a layer, each may have some variables."""

    def __init__(self, parts: Sequence[_SlicedStore]):
        self._parts = parts  # the constructor would open a file

    def __bool__(self):
        return True

    def get(self, path):
        for part in self._parts:
            part.get(path)
        return self

    def has_path(self, path):
        return any(path in part.h5_file for part in self._parts)

    def keys(self):
        return [key for part in self._parts for key in part.keys()]

    def __len__(self):
        return len(self.keys())

    def __contains__(self, key):
        return any(key in part for part in self._parts)

    def __getitem__(self, key):
        return next((part for part in self._parts if key in part), self._parts[0])[key]

"""How Keras writes a model: parts of its savers that have no public function."""

import io
from collections.abc import Callable, Sequence
from typing import BinaryIO

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


def load_state(model: keras.Model, file: BinaryIO, slices_of: Callable[[h5py.Dataset], object]) -> None:
    """Gives a model's layers what an HDF5 file of Keras's format holds for them, one by one, as `load_weights` does.

    Args:
        model: built.
        file: the HDF5 file, open for reading.
        slices_of: what layers get in place of an array of the file.

    Raises:
        ValueError: the file is of another model.
        OSError: it is not HDF5.
    """
    store, failed, messages = _SlicedStore(file, slices_of), set(), {}
    try:
        saving_lib._load_state(
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables={id(getattr(model, "optimizer", None))},
            failed_saveables=failed,
            error_msgs=messages,
        )
    finally:
        store.close()
    if failed:
        raise ValueError("; ".join(f"{saveable.name}: {error}" for saveable, error in list(messages.values())[:5]))


class _SlicedStore(saving_lib.H5IOStore):
    """A store that reads no array as a whole."""

    def __init__(self, file: BinaryIO, slices_of: Callable[[h5py.Dataset], object]):
        super().__init__(io.BytesIO(), mode="w")  # of an empty file: the constructor takes no other objects
        self.h5_file.close()
        self.h5_file, self.mode, self._slices_of = h5py.File(file, "r"), "r", slices_of

    def __getitem__(self, key):
        group = self._h5_entry_group
        found = group.get(key) if group else None
        if not isinstance(found, h5py.Dataset) or isinstance(group.get(key, getlink=True), h5py.ExternalLink):
            raise KeyError(f"the file has no array {key!r} here")
        if found.external or found.is_virtual:
            raise ValueError(f"the array {key!r} lies in another file")
        return self._slices_of(found)

"""How Keras writes a model: what its savers do besides their public functions."""

import io
from collections.abc import Sequence

import keras
from keras.src.saving import saving_lib


def check_serializable(model: keras.Model) -> None:
    """Raises what saving a model would raise if it cannot be described as JSON."""
    saving_lib._serialize_model_as_json(model)


def read_all(model: keras.Model, skipped: Sequence[object] = ()) -> None:
    """Reads every value of a model as a save reads it, in the same order, and keeps none longer than its layer's.

    Args:
        skipped: objects that the save leaves out.
    """
    store = _Reader()
    try:
        saving_lib._save_state(model, store, None, "", {id(saveable) for saveable in skipped})
    finally:
        store.close()


class _Reader(saving_lib.H5IOStore):
    """A store that takes what a save writes and forgets it."""

    def __init__(self):
        super().__init__(io.BytesIO(), mode="w")

    def make(self, path, metadata=None):
        self._h5_entry_group = {}
        return self

    def __setitem__(self, key, value):
        self._h5_entry_group[key] = keras.ops.convert_to_numpy(value)

"""How Keras writes a model: parts of its savers that have no public function."""

import io
from collections.abc import Sequence

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

"""`.keras` files that are written in place and by slices are those of stock Keras, number by number."""

import io
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras.src.saving import saving_lib

import tfgpu
from tfgpu.core.state import slice_writer


def model_of(stage: int = 0, dtype: str = "float32"):
    """A trained model with arrays of several dtypes and axes, a tied layer and a vocabulary."""
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        x = inputs = keras.Input((6,))
        tied = keras.layers.Dense(6, "relu", dtype=dtype)
        x = tied(tied(x))
        x = keras.layers.Dense(37, dtype=dtype)(keras.layers.Dropout(0.5)(x))
        x = keras.layers.BatchNormalization()(keras.layers.Reshape((37, 1))(x))
        model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(keras.layers.Flatten()(x)))
        if stage:
            model = tfgpu.parallel.shard(model, stage)
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 6)), np.ones((8, 3)), 8, verbose=0)
    return model


def content(path) -> dict:
    """All groups, attributes and arrays of a file of weights, as bytes."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        file = h5py.File(io.BytesIO(archive.read("model.weights.h5")))
        names = sorted(set(archive.namelist()) - {"model.weights.h5", "metadata.json"})
        found = {name: archive.read(name) for name in names}

    def add(name, item):
        found[f"{name} attributes"] = {key: str(value) for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            found[name] = (item.shape, str(item.dtype), np.asarray(item[()]).tobytes())

    file.visititems(add)
    return found


def both(model, folder, monkeypatch) -> tuple[dict, dict]:
    """The content of the file as it is written, and as stock Keras writes it to an open file."""
    monkeypatch.setattr(slice_writer, "_SLICE_BYTES", 64)
    model.save(folder / "m.keras")
    with open(folder / "stock.keras", "wb") as file:
        saving_lib.save_model(model, file)
    return content(folder / "m.keras"), content(folder / "stock.keras")


@pytest.mark.sample("0-float32")
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "float32"), (3, "float32"), (2, "float32"), (0, "float16"), (0, "bfloat16"), (3, "bfloat16")],
)
def test_a_file_by_slices_is_stock_keras_s(tmp_path, monkeypatch, stage, dtype):
    model = model_of(stage, dtype)
    ours, stock = both(model, tmp_path, monkeypatch)
    assert ours == stock and len(ours) > 20
    again = keras.models.load_model(tmp_path / "m.keras")
    for a, b in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(np.asarray(a, "float32"), np.asarray(b, "float32"))


def test_vocabularies_states_and_own_arrays_are_kept(tmp_path, monkeypatch):
    class Own(keras.layers.Layer):
        def save_own_variables(self, store):
            store["table"] = np.arange(500.0)
            store["words"] = np.array([1, 2, 3])

        def load_own_variables(self, store):
            pass

        def call(self, x):
            return x

    words = keras.layers.StringLookup()
    words.adapt(["a", "b"])  # a vocabulary that stands in a file of its own
    model = keras.Sequential([keras.Input((1,), dtype="string"), words, keras.layers.Embedding(4, 40), Own()])
    model.compile("sgd", "mse")
    ours, stock = both(model, tmp_path, monkeypatch)
    assert ours == stock and any("assets" in name for name in ours)


@pytest.mark.slow
def test_slices_are_small(monkeypatch):
    monkeypatch.setattr(slice_writer, "_SLICE_BYTES", 64)
    model = model_of(3)
    from tfgpu.core.state.sharded_variable import merged

    sizes = []
    for variable in merged(model.weights):
        whole = np.empty(tuple(variable.shape), "float32")
        for index, chunk in slice_writer.chunks(variable):
            sizes.append(chunk.nbytes)
            whole[index] = chunk
        np.testing.assert_array_equal(whole, variable.numpy())
    assert max(sizes) <= 64 + 37 * 4 and len(sizes) > 15

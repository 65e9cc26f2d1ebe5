"""The state of callbacks: what has changed, and nothing that the script sets."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import packing
from tfgpu.checkpoint.callback_state import CallbackStates, Unknown, plain


class Mine(keras.callbacks.Callback):
    def __init__(self, limit):
        super().__init__()
        self.limit, self.seen, self.file = limit, [], open  # noqa: SIM115


def test_only_what_has_changed_is_taken_and_a_setting_stays():
    first, second = Mine(3), Mine(4)
    states = CallbackStates([first, second, keras.callbacks.ProgbarLogger()])
    assert states.take() == {}
    second.seen.append({"loss": np.float32(1.5), 2: (True, None)})
    taken = states.take()
    assert taken == {"Mine/1": {"seen": [{"loss": np.float32(1.5), 2: (True, None)}]}}
    second.seen[0]["loss"] = 9.0
    assert taken["Mine/1"]["seen"][0]["loss"] == 1.5
    again = [Mine(7), Mine(8)]
    CallbackStates(again).put(taken)
    assert again[0].seen == [] and again[1].seen == [{"loss": 1.5, 2: (True, None)}]
    assert [each.limit for each in again] == [7, 8] and again[1].seen is not taken["Mine/1"]["seen"]


def test_data_that_a_callback_holds_is_not_copied():
    mine = Mine(3)
    mine.data = {"x": np.zeros(1 << 22, "float64")}
    states = CallbackStates([mine])
    assert states.take() == {}
    mine.data = {"x": np.ones(2)}
    assert states.take()["Mine/0"]["data"]["x"].tolist() == [1, 1]


def test_the_sign_of_keras_s_min_delta_changes_once_a_process():
    found = []
    for seen in ([3.0], [3.5, 3.5]):
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05)
        plateau.set_model(keras.Sequential([keras.layers.Dense(1)]))
        plateau.model.compile(keras.optimizers.SGD(1.0), "mse")
        plateau.on_train_begin()
        states = CallbackStates([plateau])
        if found:
            states.put(found[0])
        for epoch, loss in enumerate(seen):
            plateau.on_epoch_end(epoch, {"loss": loss})
        found.append(states.take())
    assert found[0] == {"ReduceLROnPlateau/0": {"best": 3.0}}
    assert found[1] == {"ReduceLROnPlateau/0": {"best": 3.0}}
    assert float(plateau.model.optimizer.learning_rate) == pytest.approx(0.01)


def test_a_callback_that_is_gone_is_named(caplog):
    CallbackStates([]).put({"Mine/0": {"seen": [1]}})
    assert "the state of a callback Mine/0" in caplog.text


def test_types_of_values():
    array = np.arange(3)
    copy = plain([array, tf.constant(2.0)])
    array[0] = 9
    assert copy[0].tolist() == [0, 1, 2] and copy[1] == np.float32(2.0)
    for wrong in (open, object(), {1, 2}, np.array(["a"]), [lambda: 0], 10**5000, np.ones(2, "complex64")):
        with pytest.raises(Unknown):
            plain(wrong)
    for array in (np.zeros(2, [("a", "f4")]), np.ones(2, np.longdouble)):
        with pytest.raises(Unknown, match="ndarray of"):
            plain(array)


def test_lists_without_end_are_settings():
    mine = Mine(3)
    mine.endless = [mine.seen]
    mine.endless.append(mine.endless)
    states = CallbackStates([mine])
    mine.seen.append({"of": mine.endless})
    mine.limit = 4
    assert states.take() == {"Mine/0": {"limit": 4}}


@pytest.mark.parametrize("dtype", [">f4", "<f8", ">i8", "bool", tf.bfloat16.as_numpy_dtype])
def test_what_is_copied_can_be_written(dtype, tmp_path):
    value = np.array([0, 1], dtype)
    packing.write(tmp_path / "file", "numbers", plain([value, value[1]]))
    read, one = packing.read(tmp_path / "file", "numbers")
    assert read.tolist() == value.tolist() and one == value[1]

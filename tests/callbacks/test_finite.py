"""A non-finite loss ends the training; checkpoints are from before."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.callbacks import Checkpoint, StopOnNaN
from tfgpu.checkpoint.storage import found, newest


@pytest.mark.parametrize("order", [0, 1])
def test_ends_before_the_block_is_saved(tmp_path, order):
    tfgpu.repair_keras()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((12, 1), "float32")
    y = x.copy()
    y[7] = float("inf")  # in the fourth batch of two
    callbacks = [Checkpoint(tmp_path, every_steps=1), StopOnNaN()]
    with pytest.raises(tfgpu.InputError, match=r"The loss became (inf|nan) in epoch 1, step 4\. Lower"):
        model.fit(x, y, 2, shuffle=False, verbose=0, callbacks=callbacks[:: 1 - 2 * order])
    callbacks[0].on_train_end()  # what was handed over is written
    assert found(tmp_path)[0].name == "epoch-0000-step-0000003"
    assert all(np.isfinite(array).all() for array in newest(tmp_path).arrays.values())

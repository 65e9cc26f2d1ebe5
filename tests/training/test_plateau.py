"""A plateau after warmup: the rate of each step by hand, with replicas, with accumulation, and resumed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.training import incremental, schedules

WATCHED = [5.0, 5.0, 5.0, 5.0, 4.0, 4.0]
# 4 updates an epoch, 6 of warm-up to 0.7. The first epoch ends within it; 5.0 is the best of the second, so the third
# and the fourth are without progress; the fifth is better, the sixth is not.
RATES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, *[0.7] * 6, *[0.35] * 4, *[0.175] * 8]
LOGGED = [0.5, 0.7, 0.7, 0.35, 0.175, 0.175]  # of the next update, before it is lowered


class Says(keras.callbacks.Callback):
    """Adds the monitored number to the logs, and records the weight after each step: it falls by the rate."""

    every_batch = True

    def __init__(self, stop=None):
        super().__init__()
        self.weights, self.stop = [], stop  # a checkpoint brings the weights of the steps before
        self.trained = set()  # in this process

    def on_train_begin(self, logs=None):
        self.weights = [float(self.model.get_weights()[0][0, 0])]

    def on_train_batch_end(self, batch, logs=None):
        self.trained.add(len(self.weights))
        self.weights.append(float(self.model.get_weights()[0][0, 0]))
        if self.stop == len(self.weights) - 1:
            raise InterruptedError

    def on_epoch_end(self, epoch, logs=None):
        logs["watched"] = WATCHED[epoch]


def built(warmup=6, accumulate=1):
    options = {"monitor": "watched", "mode": "min", "patience": 1}
    return schedules.build("plateau", 0.7, total_steps=24, warmup_steps=warmup, accumulate=accumulate, options=options)


def model_of(schedule, accumulate=None, devices=1, jit=False):
    tfgpu.repair_keras()
    strategy = tf.distribute.get_strategy()
    if devices > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(devices)])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(schedule.learning_rate, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, loss=lambda y, p: p, jit_compile=jit)  # whose gradient is 1
    return model


def fit(model, schedule, *callbacks, batches=4, epochs=6):
    data = tf.data.Dataset.from_tensor_slices((np.ones((batches * 2, 1), "float32"),) * 2).batch(2)
    says = next((one for one in callbacks if isinstance(one, Says)), Says())
    calls = [says, *schedule.callbacks, *(one for one in callbacks if one is not says)]
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=calls).history
    return -np.diff(says.weights), history


@pytest.mark.parametrize("devices", [1, 2])
def test_the_rates_of_all_steps(devices):
    schedule = built()
    found, history = fit(model_of(schedule, devices=devices), schedule)
    np.testing.assert_allclose(found, RATES, rtol=2e-4)
    np.testing.assert_allclose(history["learning_rate"], LOGGED, rtol=1e-6)


def test_updates_count_and_not_batches():
    schedule = built(accumulate=2)
    found, _ = fit(model_of(schedule, accumulate=2), schedule, batches=8)
    np.testing.assert_allclose(found[1::2], RATES, rtol=2e-4)
    assert not found[::2].any()


def test_a_compiled_step_sees_the_lower_rate():
    schedule = built()
    found, _ = fit(model_of(schedule, jit=True), schedule)
    np.testing.assert_allclose(found, RATES, rtol=2e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("at", [3, 10, 14, 18])  # in the warm-up, before the first fall, between the falls, behind them
def test_an_interrupted_run_resumes_with_the_same_rates(tmp_path, at, devices):
    schedule = built()
    with pytest.raises(InterruptedError):
        fit(model_of(schedule, devices=devices), schedule, Says(stop=at), Checkpoint(tmp_path / "run", every_steps=1))
    schedule = built()  # of another process
    again = model_of(schedule, devices=devices)
    says = Says()
    found, history = fit(again, schedule, says, Checkpoint(tmp_path / "run"))
    np.testing.assert_allclose(found, RATES, rtol=2e-4)
    assert len(says.trained) == 25 - at
    np.testing.assert_allclose(history["learning_rate"], LOGGED, rtol=1e-6)


def test_a_trained_model_is_retraced_and_files_keep_the_rate(tmp_path):
    schedule = built()
    model = model_of(schedule)
    x = np.ones((2, 1), "float32")
    model.train_on_batch(x, x)
    found, _ = fit(model, schedule)
    np.testing.assert_allclose(found, [*RATES[1:6], *[0.7] * 7, *[0.35] * 4, *[0.175] * 8], rtol=2e-4)
    config = keras.optimizers.serialize(model.optimizer)
    assert float(keras.optimizers.deserialize(config)._learning_rate(24)) == pytest.approx(0.0875)


def test_a_recreated_optimizer_is_lowered_too():
    schedule = built()
    model = model_of(schedule)
    model.compile(incremental.discriminative(model.optimizer, model, {"*": 2.0}), loss=lambda y, p: p)
    found, _ = fit(model, schedule)
    np.testing.assert_allclose(found, 2 * np.array(RATES), rtol=2e-4)


def test_a_callback_without_its_rate_is_named():
    with pytest.raises(tfgpu.InputError, match="does not support the optimizer's learning rate"):
        fit(model_of(schedules.build("constant", 0.7, total_steps=9)), built())

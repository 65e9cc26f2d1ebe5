"""Python reads numbers from variables on several devices, as callbacks do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu


def compiled(strategy, optimizer=lambda: keras.optimizers.Adam(0.25)):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
    return model


@pytest.fixture(params=["mirrored", "averaging"])
def strategy(request):
    return tfgpu.strategy(request.param, devices=2)


def test_numbers_are_read_inside_the_scope_and_outside(strategy):
    optimizer = compiled(strategy).optimizer
    optimizer.iterations.assign(7)
    with strategy.scope():
        within = float(optimizer.learning_rate), int(optimizer.iterations), float(optimizer.iterations)
    assert within == (float(optimizer.learning_rate), int(optimizer.iterations), float(optimizer.iterations))
    assert within == (0.25, 7, 7.0) and f"{float(optimizer.learning_rate):.1e}" == "2.5e-01"


@pytest.mark.sample(1)
def test_a_callback_reads_the_rate_that_a_schedule_or_another_callback_has_set(strategy):
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((float(self.model.optimizer.learning_rate), int(self.model.optimizer.iterations)))

    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    compiled(strategy).fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[halves, Reads()])
    assert seen == [(0.125, 2), (0.0625, 4), (0.03125, 6)]
    seen.clear()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.25])
    model = compiled(strategy, lambda: keras.optimizers.SGD(schedule))
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Reads()])
    assert seen == [(0.5, 2), (0.25, 4)]  # the schedule's boundary is step 2 itself


def test_non_scalars_are_an_error_as_on_one_device(strategy):
    model = compiled(strategy)
    for kind in (float, int):
        with pytest.raises(TypeError, match="Only scalar arrays can be converted to Python scalars"):
            kind(model.layers[0].kernel)
    with pytest.raises((TypeError, NotImplementedError, AttributeError)):
        tf.function(lambda: float(model.optimizer.learning_rate), autograph=False)()

"""Keras's rule for XLA under strategies; `tests/core` has what compiles and trains."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

GPU = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine with a GPU, as far as the rule asks; its devices are CPUs."""
    tfgpu.repair_keras()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [GPU])


def uses_xla(strategy, **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    return model.jit_compile


def mirrored(device):
    return tf.distribute.MirroredStrategy([device])


@pytest.mark.parametrize("make", [tf.distribute.OneDeviceStrategy, mirrored])
def test_one_device_follows_the_rule_for_one_gpu(one_gpu, make):
    assert uses_xla(tf.distribute.get_strategy())
    assert uses_xla(make("CPU:0"))
    assert not uses_xla(make("CPU:0"), jit_compile=False)


def test_several_devices_have_no_xla(one_gpu):
    assert not uses_xla(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


def test_without_a_gpu_the_rule_is_no_xla():
    tfgpu.repair_keras()
    assert not uses_xla(tf.distribute.OneDeviceStrategy("CPU:0"))


class OneHot(keras.Model):
    """Makes other labels than its data have."""

    def one_hot(self, data):
        x, y = data
        return x, tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)

    def train_step(self, data):
        return super().train_step(self.one_hot(data))

    def test_step(self, data):
        return super().test_step(self.one_hot(data))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_metrics_and_losses_that_are_chosen_by_the_labels_of_a_step(devices, caplog):
    x, y = np.random.default_rng(0).normal(size=(7, 4)).astype("float32"), np.arange(7)[:, None] % 3

    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = keras.Input((4,))
            model = OneHot(inputs, keras.layers.Dense(3, "softmax")(inputs))
            model.compile("sgd", "crossentropy", metrics=["accuracy"], weighted_metrics=["acc"])
        logs = model.fit(x, y, batch_size=4, shuffle=False, verbose=0, validation_data=(x, y)).history
        return [*model.get_weights(), *(logs[name] for name in sorted(logs))]

    plain = trained(tf.distribute.get_strategy())
    names = [f"CPU:{at}" for at in range(devices)]
    found = trained(tfgpu.strategy("mirrored" if devices > 1 else "one_device", devices=names))
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert "Python state" not in caplog.text

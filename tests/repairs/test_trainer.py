"""Keras's rule for XLA under strategies; `tests/core` has what compiles and trains."""

import keras
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

"""Recomputes the running statistics of BatchNormalization in a pass over data, as averaged weights need.

The pass is an `evaluate` of a model that wraps the model, so replicas and workers take part as in any other step.
"""

import contextlib

import keras
import tensorflow as tf

from tfgpu.compat import layers as private_layers
from tfgpu.core import step_context
from tfgpu.repairs import batch_normalization


def layers_of(model: keras.Model) -> list:
    """The layers whose running statistics training changes, at any depth."""
    found = private_layers.layers_within(model, include_self=False)
    return [layer for layer in found if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]


def recompute(model: keras.Model, data) -> None:
    """Sets the running statistics of every BatchNormalization to the averages over the batches, weighted by rows.

    The weights do not change. Layers compute as in training, so dropout draws, and a layer's own state changes.

    Args:
        model: the built model.
        data: what `evaluate` takes, such as a dataset of the training batches.
    """
    layers = layers_of(model)
    if not layers:
        return
    with model.distribute_strategy.scope():
        around = _Pass(model)
        around.compile(jit_compile=False)
    settings = [(layer, name, around.kept) for layer in layers for name in _momenta(layer)]
    if batch_normalization.has_replica_moments(model.distribute_strategy):
        settings += [(layer, "synchronized", True) for layer in layers]  # else each replica would keep its own averages
    with _set_to(settings):
        around.evaluate(data, verbose=0)


class _Pass(keras.Model):
    """Runs the model as in training, and changes nothing but running statistics.

    Args:
        model: the model.

    Attributes:
        kept: the fraction of the running statistics that a step keeps; the rest comes from its batch.
    """

    def __init__(self, model: keras.Model):
        super().__init__(name="statistics")
        self._inner = model
        number = {"shape": (), "initializer": "zeros", "trainable": False, "dtype": "float32", "autocast": False}
        self._rows_seen = self.add_weight(name="rows_seen", **number)
        self.kept = self.add_weight(name="kept", **number)
        self.built = True

    def call(self, inputs, training=None):
        return self._inner(inputs, training=training)

    def test_step(self, data):
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        rows = step_context.rows()
        total = tf.shape(tf.nest.flatten(inputs)[0])[0] if rows is None else rows.total
        total = tf.cast(total, tf.float32)
        self._rows_seen.assign_add(total)
        self.kept.assign(1.0 - total / self._rows_seen.value)
        self._inner(inputs, training=True)
        return {}


@contextlib.contextmanager
def _set_to(settings: list[tuple]):
    """Inside the block, sets attributes of layers, given as (layer, name, value)."""
    before = [(layer, name, getattr(layer, name)) for layer, name, _ in settings]
    try:
        for layer, name, value in settings:
            object.__setattr__(layer, name, value)  # past Keras, which would make a variable one of the layer's
        yield
    finally:
        for layer, name, value in before:
            object.__setattr__(layer, name, value)


def _momenta(layer) -> list[str]:
    return [name for name in ("momentum", "renorm_momentum") if hasattr(layer, name)]

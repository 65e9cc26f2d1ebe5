"""A step that uses a metric's result, besides returning it, reads what all replicas have counted."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfgpu

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X[:, :1] * 2 + 1


class Scaled(keras.Model):
    """Divides the loss by its running mean."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.running = keras.metrics.Mean(name="running")

    @property
    def metrics(self):
        return [self.running]

    def loss_of(self, loss, x):
        found = loss / (1.0 + self.running.result())
        self.running.update_state(loss)
        return found

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            scaled = self.loss_of(loss, x)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"running": self.running.result(), "double": 2.0 * self.running.result()}


class UpdatedFirst(Scaled):
    def loss_of(self, loss, x):
        self.running.update_state(tf.reduce_mean(x, -1) ** 2)
        return loss / (1.0 + self.running.result())


class Direct(Scaled):
    def loss_of(self, loss, x):
        found = loss / (1.0 + self.running.total)
        self.running.update_state(loss)
        return found


@tfgpu.on_all_rows
class OnAllRows(Scaled):
    pass


def trained(kind, replicas: int) -> list:
    keras.utils.set_random_seed(0)
    strategy = tf.distribute.get_strategy()
    if replicas:
        strategy = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)])
    with strategy.scope():
        inputs = layers.Input((3,))
        model = kind(inputs, layers.Dense(1)(layers.Dense(4, "tanh")(inputs)))
        model.compile(keras.optimizers.SGD(0.1))
    logs = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), logs["running"], logs["double"]]


@pytest.mark.parametrize(
    "kind", [Scaled, *(pytest.param(each, marks=pytest.mark.slow) for each in (UpdatedFirst, OnAllRows))]
)
def test_results_that_a_loss_uses(kind):
    """The last batch has two rows for three replicas."""
    for one, other in zip(trained(kind, 0), trained(kind, 3), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize(("kind", "is_named"), [(Scaled, False), (Direct, True)])
def test_a_step_that_reads_a_metrics_variables_itself_is_named(kind, is_named, caplog):
    trained(kind, 2)
    named = "reads variables of metrics (running/total)" in caplog.text
    assert named == is_named, caplog.text

"""A step of the user's own on two workers, each with a piece of the weights: right, or refused by name."""

import numpy as np
import pytest

SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
from keras import ops
import tfgpu
from tfgpu.core.row_mixing import verdicts
from tfgpu.errors import InputError

class ByTape(keras.Model):
    def loss_of(self, y, outputs):
        return ops.mean(ops.square(y - outputs))

    def changed(self, gradients):
        return [ops.clip(gradient, -0.01, 0.01) for gradient in gradients]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True)) + sum(self.losses)
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        if not hasattr(self, "late"):
            self.late = keras.metrics.Mean(name="late")
        self.late.update_state(loss, sample_weight=ops.shape(x)[0])
        return {"late": self.late.result()}

class ByNorm(ByTape):
    def changed(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        return [gradient / tf.maximum(norm, 0.1) for gradient in gradients]

class Divides(ByTape):
    def loss_of(self, y, outputs):
        chosen = ops.cast(y > 0, "float32")
        return ops.sum(ops.square(y - outputs) * chosen) / (1.0 + ops.sum(chosen))

class Reads(ByTape):
    def loss_of(self, y, outputs):
        return super().loss_of(y, outputs) + (float("nan") if tf.executing_eagerly() else 0.0)

strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"]) if WORKERS else tf.distribute.get_strategy()

def answer(kind):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((5,))
        x = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        model = kind(inputs, keras.layers.Dense(3)(x))
    if WORKERS:
        model = tfgpu.parallel.shard(model, stage=3)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9))
    x = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
    y = np.random.default_rng(1).normal(size=(11, 3)).astype("float32")
    try:
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    except InputError as error:
        return str(error)
    found = [piece.verdict for piece in verdicts.of(strategy) if piece.name.startswith("step")] if WORKERS else []
    return logs["late"], np.concatenate([each.ravel() for each in model.get_weights()]).tolist(), found
"""
ALL = "\nprint(json.dumps({kind.__name__: answer(kind) for kind in (ByTape, ByNorm, Divides, Reads)}))\n"
ALONE = "\nprint(json.dumps(answer(ByTape)))\n"


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_on_pieces_of_the_weights(together, tmp_path):
    (alone,) = together("WORKERS = False" + SCRIPT + ALONE, {"worker": 1}, tmp_path, timeout=550).values()
    answers = list(together("WORKERS = True" + SCRIPT + ALL, {"worker": 2}, tmp_path, timeout=550).values())
    assert answers[0] == answers[1]
    logs, weights, verdict = answers[0].pop("ByTape")
    assert verdict == ["by rows"]
    np.testing.assert_allclose(logs, alone[0], rtol=1e-5)
    np.testing.assert_allclose(weights, alone[1], atol=2e-6)
    for name, why in {"ByNorm": "a piece of", "Divides": "the gradients would", "Reads": "could not be tried"}.items():
        assert f"{name}.train_step" in answers[0][name] and why in answers[0][name] and "stage=2" in answers[0][name]

"""What was found of each piece of a step is kept: by rows or on all rows, why, and the bytes that travel."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import InputError
from tfgpu.core import extensions
from tfgpu.core.row_mixing import verdicts
from tfgpu.core.row_mixing.verdicts import Piece

X, Y = np.random.default_rng(0).random((8, 5), "float32"), np.ones((8, 3), "float32")


class Centered(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self):
        return self.most + 0.0


@tfgpu.by_rows
def squares(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def ratio(y_true, y_pred):
    return 1 - keras.ops.sum(y_true * y_pred) / keras.ops.sum(y_true + y_pred)


def fitted(*, kind=keras.Model, unproven="gather", loss=ratio, metrics=()):
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"], unproven=unproven)
    with strategy.scope():
        inputs = keras.Input((5,))
        x = Doubled(name="doubled")(Centered(name="centered")(inputs))
        model = kind(inputs, keras.layers.Dense(3, activation="sigmoid")(x))
        model.compile("sgd", loss, metrics=[each() if isinstance(each, type) else each for each in metrics])
    model.fit(X, Y, batch_size=8, verbose=0)
    return {piece.name: piece for piece in verdicts.of(strategy)}


def test_each_piece_is_kept_with_its_bytes(caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        found = fitted(metrics=[Largest, squares, keras.losses.dice])
    centered = found["layer 'centered' (Centered)"]
    assert (centered.verdict, centered.source) == (verdicts.ON_ALL_ROWS, verdicts.TRIED)
    assert centered.traffic == "160 bytes a step"  # 8 rows of 5 numbers
    assert found["layer 'doubled' (Doubled)"].verdict == verdicts.BY_ROWS
    assert found["loss 'ratio'"].traffic == "192 bytes a step"  # 8 rows of 3 labels and 3 outputs
    largest = found["metric 'largest' (Largest)"]
    assert largest.verdict == verdicts.ON_ALL_ROWS and largest.bytes_a_row == 24
    marked = found["metric 'squares'"]
    assert (marked.verdict, marked.source) == (verdicts.BY_ROWS, verdicts.MARKED)
    assert found["loss 'dice'"] == Piece(
        "loss 'dice'", verdicts.ON_ALL_ROWS, "it divides sums over the batch", verdicts.KNOWN, fixed_bytes=12
    )
    said = " ".join(record.getMessage() for record in caplog.records)
    assert said.count("160 bytes a step") == 1 and said.count("192 bytes a step") == 2  # the loss's and the metric's


@pytest.mark.slow
def test_the_outputs_of_a_step_that_sees_all_rows_travel(caplog):
    class Clips(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return ratio(y, y_pred)

    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        step = fitted(kind=Clips)["step Clips.compute_loss"]
    assert (step.verdict, step.source) == (verdicts.ON_ALL_ROWS, verdicts.TRIED)
    assert step.traffic == "96 bytes a step" and "(96 bytes a step)" in caplog.text


def test_what_is_refused_is_kept():
    class Breaks(keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if tf.executing_eagerly():
                raise ValueError("on drawn numbers")

        def result(self):
            return 0.0

    heard = []
    extensions.verdict_listeners.register(heard.append)
    with pytest.raises(InputError, match="could not be tried"):
        fitted(unproven="refuse", loss="mse", metrics=[Breaks])
    assert heard[-1].verdict == verdicts.REFUSED and "on drawn numbers" in heard[-1].why


def test_a_batch_of_unknown_size():
    piece = Piece("loss 'l'", verdicts.ON_ALL_ROWS, "", verdicts.TRIED, 4)
    assert piece.traffic == "4 bytes for each row of a batch"
    assert Piece("loss 'l'", verdicts.ON_ALL_ROWS, "", verdicts.TRIED, None).traffic == "an unknown number of bytes"
    assert Piece("loss 'l'", verdicts.BY_ROWS, "", verdicts.TRIED).traffic == "none"

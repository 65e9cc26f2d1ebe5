"""The plain convolutional network."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tfgpu import models
from tfgpu.errors import InputError


def test_default_parameters_by_hand():
    # convolutions without bias, two trainable numbers a channel for each batch normalization
    stage1 = 9 * 1 * 32 + 64 + 9 * 32 * 32 + 64
    stage2 = 9 * 32 * 64 + 128 + 9 * 64 * 64 + 128
    head = 2 * 2 * 64 * 128 + 256 + 128 * 10 + 10
    model = models.cnn()
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == stage1 + stage2 + head == 99_498


@pytest.mark.slow
def test_the_default_learns_the_digits():
    digits = load_digits()
    x, y = (digits.images[..., None] / 16).astype("float32"), digits.target
    keras.utils.set_random_seed(0)
    model = models.cnn()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    model.fit(x[:1437], y[:1437], batch_size=64, epochs=4, verbose=0)
    # The last fifth comes from other writers: an unshuffled split is the hard one.
    assert model.evaluate(x[1437:], y[1437:], verbose=0)[1] > 0.9


@pytest.mark.parametrize(
    ("shape", "head", "features"),
    [
        ((8, 8, 1), "auto", 256),
        ((64, 64, 3), "auto", 64),
        ((12, 8, 1), "average", 64),
        ((64, 64, 3), "flatten", 16384),
    ],
)
def test_heads(shape, head, features):
    with keras.StatelessScope(initialize_variables=False):
        model = models.cnn(shape, 10, head=head, units=0)
    assert model.layers[-1].input.shape == (None, features)


def test_more_stages_than_halvings_still_fit():
    with keras.StatelessScope(initialize_variables=False):
        assert models.cnn((3, 5, 1), 2, filters=(2, 2, 2, 2)).output_shape == (None, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("filters", ()),
        ("filters", 8),
        ("filters", (8, 0)),
        ("convolutions", 0),
        ("kernel", 0),
        ("units", -1),
        ("head", "x"),
    ],
)
def test_wrong_arguments(option, value):
    with pytest.raises(InputError, match=option):
        models.cnn(**{option: value})

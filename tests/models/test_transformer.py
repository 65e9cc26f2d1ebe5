"""The language model: causal attention and parameter counts."""

import keras
import numpy as np
import pytest

from tfgpu import models
from tfgpu.errors import InputError

SMALL = {"width": 8, "depth": 2, "heads": 2}


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_a_position_sees_only_itself_and_those_before(attention_dropout):
    keras.utils.set_random_seed(0)
    options = {**SMALL, "attention_dropout": attention_dropout}
    model = models.transformer((6,), 11, **options)
    before = np.array([[1, 2, 3, 4, 5, 6]], "int32")
    after = np.array([[1, 2, 3, 9, 5, 6]], "int32")
    moved = np.abs(model(before) - model(after)).max(axis=(0, 2))
    np.testing.assert_allclose(moved[:3], 0.0, atol=1e-6)
    assert (moved[3:] > 1e-4).all()


def test_parameters_by_hand():
    # 11 tokens, 6 positions, width 8, two blocks with an MLP of 32
    embeddings = 11 * 8 + 6 * 8
    block = 16 + 4 * (8 * 8 + 8) + 16 + 8 * 32 + 32 + 32 * 8 + 8
    assert models.transformer((6,), 11, **SMALL).count_params() == embeddings + 2 * block + 16 + 8 * 11 + 11


@pytest.mark.slow
def test_it_learns_to_copy_what_it_saw():
    keras.utils.set_random_seed(0)
    model = models.transformer((8,), 5, width=16, depth=1, heads=2)
    x = np.tile(np.arange(8) % 4, (16, 1)).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss=loss, metrics=["accuracy"], run_eagerly=True)
    history = model.fit(x, (x + 1) % 4, epochs=15, verbose=0).history
    assert history["accuracy"][-1] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_shape": (8, 8, 1)}, r"needs `input_shape` as \(length,\)"),
        ({"width": 30, "heads": 4}, "Use width=32"),
        ({"depth": 0}, "`depth`"),
        ({"heads": -1}, "`heads`"),
        ({"mlp_width": 0}, "`mlp_width`"),
        ({"normalization": "batch"}, "Unknown normalization 'batch'"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(InputError, match=message):
        models.transformer(**options)

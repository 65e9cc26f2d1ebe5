"""The multilayer perceptron."""

import pytest

from tfgpu import models
from tfgpu.errors import InputError


def test_parameters_by_hand():
    # 64*32 + 32, 32*16 + 16, 16*10 + 10
    assert models.mlp((8, 8, 1), 10, widths=(32, 16)).count_params() == 2080 + 528 + 170


def test_no_hidden_layer_is_a_linear_model():
    assert models.mlp((4,), 3, widths=()).count_params() == 4 * 3 + 3


@pytest.mark.parametrize("shape", [(), (0,), (4, -1), "ab", None, 5])
def test_wrong_shapes(shape):
    with pytest.raises(InputError, match="input_shape"):
        models.mlp(shape, 3)


@pytest.mark.parametrize("widths", [(0,), (3, "4"), 8, "8", (2.0,)])
def test_wrong_widths(widths):
    with pytest.raises(InputError, match="widths"):
        models.mlp((4,), 3, widths=widths)

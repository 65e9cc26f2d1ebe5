"""A model that ends in a softmax or a sigmoid: Keras's losses find the logits behind it in every layout."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.parallel import Mesh, apply, pipeline, recompute, tensor

layers = keras.layers
RNG = np.random.default_rng(0)
X = 20 * RNG.normal(size=(50, 8)).astype("float32")  # so that some outputs are 0 or 1 to the last digit
CLASSES, TRUTHS = RNG.integers(0, 3, 50), RNG.integers(0, 2, (50, 4)).astype("float32")


class Operation(layers.Layer):
    """An activation without Keras's mark: the loss looks at the operation."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


ENDS = {
    "softmax": lambda: [layers.Dense(3, "softmax", name="last")],
    "sigmoid": lambda: [layers.Dense(4, "sigmoid", name="last")],
    "a softmax by itself": lambda: [layers.Dense(3, name="last"), Operation(keras.ops.softmax)],
    "a sigmoid by itself": lambda: [layers.Dense(4, name="last"), Operation(keras.ops.sigmoid)],
}
LAYOUTS = {
    "pipeline": lambda model: pipeline(model, 2, 4),
    "pipeline that keeps": lambda model: pipeline(model, 2, 4, schedule="gpipe", recompute=False),
    "data x pipeline": lambda model: apply(model, Mesh(data=2, pipeline=2)),
    "tensor": lambda model: tensor(model, devices=2, plan={"last": "column"}),
    "parameters in pieces": lambda model: apply(model, Mesh(data=2), zero=3),
    "recomputed": lambda model: recompute(model, "layers"),
}
FAST = ("pipeline", "softmax"), ("tensor", "sigmoid")
TRIALS = [
    pytest.param(layout, end, marks=() if (layout, end) in FAST else pytest.mark.slow)
    for layout in LAYOUTS
    for end in ENDS
    if layout != "tensor" or "sigmoid" in end  # a softmax looks at all columns
]


def trained(end, layout=None):
    tfgpu.repair_keras()
    keras.utils.set_random_seed(1)
    first = [keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(16, "relu")]
    model = keras.Sequential(first + ENDS[end]())
    if layout is not None:
        model = LAYOUTS[layout](model)
    y, loss = (TRUTHS, "binary_crossentropy") if "sigmoid" in end else (CLASSES, "sparse_categorical_crossentropy")
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.02), loss, jit_compile=False)
    return model, model.fit(X, y, 16, epochs=5, shuffle=False, verbose=0).history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "end"), TRIALS)
def test_the_loss_is_one_devices(layout, end):
    (one, expected), (model, losses) = trained(end), trained(end, layout)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for mine, others in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=1e-5)

"""Activation recomputation (gradient checkpointing): blocks that trade time for memory."""

import inspect
from collections.abc import Callable

import keras

from tfgpu.parallel.rematerialization.remat import remat


@keras.saving.register_keras_serializable(package="tfgpu")
class Recompute(keras.layers.Wrapper):
    """Wraps a layer or a model; its activations are recomputed in the backward pass instead of stored.

    A model of n such blocks stores n block inputs and, one block at a time, the activations within it. Each block runs
    forward twice: about a third more time per step if the backward pass takes twice as long as the forward pass. The
    result is the same: dropout draws the same mask again, BatchNormalization counts a batch once, losses of `add_loss`
    keep their gradient; also under a strategy, in mixed precision, and with `jit_compile=True`. Only random numbers
    without a Keras seed (`tf.random`, Python's `random`) differ in the second run. It does not support a `tf.cond` or
    `tf.while_loop` whose gradient is taken outside.

    Use large blocks (a residual block, a transformer block): a block of a single layer saves almost nothing.

    Args:
        layer: a Keras layer or model that maps one tensor (or structure of tensors) to tensors of any shapes and
            dtypes.
        **kwargs: those of every Keras layer, such as `name` and `trainable`.

    Raises:
        InputError: when called with ragged or sparse floats.

    Example:
        >>> inputs = keras.Input((8,))
        >>> hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(8, "gelu")(inputs))
        >>> block = keras.Model(inputs, keras.layers.Add()([inputs, hidden]))
        >>> Recompute(block)(keras.ops.ones((2, 8))).shape
        TensorShape([2, 8])

    Source: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174
    """

    def __init__(self, layer: keras.layers.Layer, **kwargs):
        super().__init__(layer, autocast=False, **kwargs)  # the inner layers have their own dtype policies
        self.supports_masking = True
        self._takes_training = "training" in inspect.signature(layer.call).parameters

    def call(self, inputs, training=None):
        # Within another layer's call Keras propagates `training`; `stateless_call` does not.
        passed = {"training": training} if self._takes_training and training is not None else {}
        return remat(self.layer)(inputs, **passed)


def block(x, add: Callable, *, recompute: bool, name: str):
    """Adds layers to `x`, either directly or as one block that is recomputed in the backward pass.

    Args:
        x: a symbolic tensor.
        add: adds the layers to a symbolic tensor and returns their output.
        recompute: whether they become one `Recompute`.
        name: that layer's name.

    Returns:
        The output, a symbolic tensor.

    Example:
        >>> block(keras.Input((4,)), keras.layers.Dense(3), recompute=True, name="block1").shape
        (None, 3)
    """
    if not recompute:
        return add(x)
    inputs = keras.Input(x.shape[1:], dtype=x.dtype, name=f"{name}_input")
    return Recompute(keras.Model(inputs, add(inputs), name=f"{name}_layers"), name=name)(x)

"""The experts of a mixture: feed-forward networks side by side, each on tokens of its own."""

from collections.abc import Callable

import keras
from keras import ops


class _ForEach:
    """An initializer whose draw for each expert is that of one network: its fans do not grow with the experts."""

    def __init__(self, initializer, count: int):
        self._each = [_clone(initializer, at) for at in range(count)]

    def __call__(self, shape, dtype=None):
        return ops.stack([each(shape[1:], dtype=dtype) for each in self._each])


def _clone(initializer, at: int):
    """The initializer with a seed for this expert; one without a seed, such as zeros, itself."""
    config = initializer.get_config() if isinstance(initializer, keras.Initializer) else {}
    seed = config.get("seed", 0)
    if "seed" not in config or not (seed is None or isinstance(seed, int)):
        return initializer
    return type(initializer).from_config({**config, "seed": None if seed is None else seed + at})


@keras.saving.register_keras_serializable(package="tfgpu")
class FeedForwardExperts(keras.layers.Layer):
    """`num_experts` feed-forward networks, each of which gets its own tokens: `MixtureOfExperts` holds one.

    Args:
        num_experts: how many.
        intermediate_dim: the width between the two kernels of an expert.
        gated: the activation's result is multiplied by that of a third kernel ("SwiGLU", where the activation is silu).
        activation: a name or a function.
        use_bias: whether each kernel has a bias.
        kernel_initializer, bias_initializer: each expert draws for itself.
        **kwargs: those of every Keras layer.

    Example:
        >>> FeedForwardExperts(4, 16)(keras.ops.ones((4, 5, 8))).shape  # 5 tokens of width 8 for each of 4 experts
        TensorShape([4, 5, 8])

    Source of the gate: Shazeer, 2020, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
    """

    def __init__(
        self,
        num_experts: int,
        intermediate_dim: int,
        *,
        gated: bool = False,
        activation: str | Callable = "gelu",
        use_bias: bool = True,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        bias_initializer: str | keras.initializers.Initializer = "zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_experts, self.intermediate_dim = num_experts, intermediate_dim
        self.gated, self.use_bias = gated, use_bias
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)

    def build(self, input_shape):
        width, hidden = input_shape[-1], self.intermediate_dim
        self.up_kernel, self.up_bias = self._add("up", width, hidden)
        if self.gated:
            self.gate_kernel, self.gate_bias = self._add("gate", width, hidden)
        self.down_kernel, self.down_bias = self._add("down", hidden, width)

    def _add(self, name: str, inputs: int, outputs: int) -> tuple:
        count = self.num_experts
        kernel = self.add_weight(
            shape=(count, inputs, outputs),
            initializer=_ForEach(self.kernel_initializer, count),
            name=f"{name}_kernel",
        )
        bias = None
        if self.use_bias:
            initializer = _ForEach(self.bias_initializer, count)
            bias = self.add_weight(shape=(count, outputs), initializer=initializer, name=f"{name}_bias")
        return kernel, bias

    def call(self, inputs):
        """[experts, tokens of each, width] of the same shape."""
        hidden = _linear(inputs, self.up_kernel, self.up_bias)
        if self.gated:
            hidden = hidden * self.activation(_linear(inputs, self.gate_kernel, self.gate_bias))
        else:
            hidden = self.activation(hidden)
        return _linear(hidden, self.down_kernel, self.down_bias)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return super().get_config() | {
            "num_experts": self.num_experts,
            "intermediate_dim": self.intermediate_dim,
            "gated": self.gated,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }


def _linear(inputs, kernel, bias):
    found = ops.matmul(inputs, kernel)
    return found if bias is None else found + ops.expand_dims(bias, 1)

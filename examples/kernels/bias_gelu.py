"""gelu(x + bias) in one pass over the memory, where the library is built; in TensorFlow's operations elsewhere.

Build it: tfgpu build-kernel examples/kernels/bias_gelu.cc examples/kernels/bias_gelu.cu
"""

from pathlib import Path

import keras
import tensorflow as tf

from tfgpu.interop import CustomOp, custom_op

LIBRARY = Path(__file__).with_name("libbias_gelu.so")


def load(library: str | Path = LIBRARY) -> CustomOp:
    """Makes the function `(x [..., n], bias [n]) -> [..., n]`."""
    return custom_op(library, "ExampleBiasGelu", fallback=in_tensorflow, gradient=gradient)


def in_tensorflow(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """The same in TensorFlow's operations; in float32 where `x` is of 16 bits, as the kernel computes."""
    wide = x.dtype if x.dtype == tf.float64 else tf.float32
    u = tf.cast(x, wide) + tf.cast(bias, wide)
    return tf.cast(u * 0.5 * (1.0 + tf.math.erf(u * 0.5**0.5)), x.dtype)  # tf.nn.gelu's root has float32's digits alone


def gradient(inputs, output, upstream, operations):
    """The backward pass has a kernel too; the bias's gradient is the sum over all rows."""
    dx = operations.example_bias_gelu_grad(*inputs, upstream)
    return dx, tf.reduce_sum(dx, axis=tf.range(tf.rank(dx) - 1))


class BiasGelu(keras.layers.Layer):
    """A dense layer's bias and activation, fused: use it after `Dense(n, use_bias=False)`."""

    def __init__(self, library: str | Path = LIBRARY, **kwargs):
        super().__init__(**kwargs)
        self._library = str(library)
        self._run = load(library)

    def build(self, shape):
        """Makes the bias, [n]."""
        self.bias = self.add_weight(shape=(shape[-1],), initializer="zeros", name="bias")

    def call(self, x):
        """x: [..., n]."""
        return self._run(x, tf.cast(self.bias, x.dtype))

    def get_config(self):
        """What a saved model needs to make the layer anew."""
        return {**super().get_config(), "library": self._library}

    def compute_output_shape(self, shape):
        """As its input's."""
        return shape

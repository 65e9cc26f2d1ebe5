"""How Keras's quantized Dense and EinsumDense store their kernels, and how they compute."""

import keras
import tensorflow as tf
from keras import ops

from tfgpu.compat import layers


def call_name(layer: keras.layers.Layer) -> str:
    """The method that computes when a layer is called."""
    return "call" if mode(layer) is None else "quantized_call"


def mode(layer: keras.layers.Layer) -> str | None:
    """Such as `"int8"`; None for a layer that is not quantized."""
    return getattr(layer, "quantization_mode", None)


def kernel_shape(layer: keras.layers.Layer) -> tuple[int, ...]:
    """The shape of the kernel in floats, however it is stored."""
    if mode(layer) == "int4" and is_flat(layer):
        if isinstance(layer, keras.layers.EinsumDense):
            return tuple(layer.original_kernel_shape)
        return layer._orig_input_dim, layer._orig_output_dim
    return tuple(layers.raw_kernel(layer).shape)


def is_flat(layer: keras.layers.Layer) -> bool:
    """Whether the kernel of an int4 layer is a table of inputs by pairs of outputs, as since Keras 3.14."""
    return hasattr(layer, "_int4_block_size")


def open_axis(layer: keras.layers.Layer, axis: int) -> None:
    """Lets an int4 layer take a part of its kernel for the kernel, also in the gradient, which is computed later.

    Args:
        layer: its kernel has its inputs first, and then its outputs.
        axis: of the table: 0 where the inputs are split, 1 where the outputs are.
    """
    if isinstance(layer, keras.layers.EinsumDense):
        shape = list(layer.original_kernel_shape)
        shape[len(layer._kernel_reduced_axes) if axis else 0] = -1
        object.__setattr__(layer, "original_kernel_shape", tuple(shape))


def part_of_flat(layer: keras.layers.Layer, axis: int, ways: int) -> dict[str, int]:
    """By name, the sizes of an int4 layer that computes with a part of its table.

    Args:
        layer: as for `open_axis`.
        axis: as there.
        ways: how many parts there are.
    """
    dense, einsum = ("_orig_input_dim", "_orig_output_dim"), ("_int4_rows", "_int4_unpacked_column_size")
    name = (dense if isinstance(layer, keras.layers.Dense) else einsum)[axis]
    return {name: getattr(layer, name) // ways}


def summed_axes(layer: keras.layers.Layer) -> int | tuple[int, ...]:
    """The axes of an int8 layer's inputs that share a scale, and over which it sums."""
    return layer.quantization_axis if isinstance(layer, keras.layers.EinsumDense) else -1


def product(layer: keras.layers.Layer, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """The product of inputs and a kernel, or of a matrix with the kernel's axes; of int8 it is int32."""
    if isinstance(layer, keras.layers.EinsumDense):
        return ops.einsum(layer.equation, inputs, kernel)
    return ops.matmul(inputs, kernel)


def output_scale(layer: keras.layers.Layer, inputs_scale: tf.Tensor, kernel_scale: tf.Tensor) -> tf.Tensor:
    """By what the product is divided."""
    if isinstance(layer, keras.layers.EinsumDense):
        inputs_scale = layer._adjust_scale_for_quant(inputs_scale, "input")
    return ops.multiply(inputs_scale, kernel_scale)


def inputs_gradient(
    layer: keras.layers.Layer, upstream: tf.Tensor, kernel: tf.Tensor, kernel_scale: tf.Tensor
) -> tf.Tensor:
    """The gradient of the inputs: that of a product with the kernel in floats."""
    kernel = ops.cast(kernel, layer.compute_dtype)
    if isinstance(layer, keras.layers.EinsumDense):
        kernel = ops.divide(kernel, layer._adjust_scale_for_dequant(kernel_scale))
        return ops.einsum(layer._custom_gradient_equation, upstream, kernel)
    return ops.matmul(upstream, ops.transpose(ops.divide(kernel, kernel_scale)))


def stored_names(layer: keras.layers.Layer) -> list[str]:
    """The attributes of the variables that a file holds for a quantized layer, in their order there."""
    names = layer.variable_serialization_spec[mode(layer)]
    names = [layers.KERNEL if name == "kernel" else name for name in names]
    return [name for name in names if getattr(layer, name, None) is not None]


def assigned_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer's own that its calls may assign: those that do not train, but not a quantized kernel."""
    return [] if mode(layer) in ("int8", "int4") else layers.own_non_trainable(layer)

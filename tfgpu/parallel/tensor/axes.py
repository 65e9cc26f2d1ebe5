"""The axes along which a layer's variables, and its activations, are split for tensor parallelism."""

from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import layers, quantized


@dataclass(frozen=True)
class VariableSplit:
    """How one variable of a layer is split.

    Attributes:
        layer: the layer that holds it.
        attribute: the attribute of the layer that holds it.
        axis: along which it is split; None for a bias that only the first term of a sum adds.
    """

    layer: keras.layers.Layer
    attribute: str
    axis: int | None


def columns(layer: keras.layers.Layer) -> list[VariableSplit]:
    """The splits of a column-parallel layer: by its outputs."""
    axis = _kernel_axis(layer, "column")
    found = [*_kernel(layer, "column", axis), *lora(layer, axis)]
    if layer.bias is None:
        return found
    at = axis_of(layer, "column") if isinstance(layer, keras.layers.EinsumDense) else -1
    return [*found, VariableSplit(layer, "bias", len(layer.bias.shape) + at)]


def rows(layer: keras.layers.Layer) -> list[VariableSplit]:
    """The splits of a row-parallel layer: by its inputs. Its bias stays whole."""
    axis = _kernel_axis(layer, "row")
    return [*_kernel(layer, "row", axis), *lora(layer, axis)]


def _kernel_axis(layer: keras.layers.Layer, style: str) -> int:
    """The axis along which the kernel of floats is split."""
    if isinstance(layer, keras.layers.EinsumDense):
        return _einsum(layer, style)[0]
    return len(quantized.kernel_shape(layer)) - (1 if style == "column" else 2)


def _kernel(layer: keras.layers.Layer, style: str, axis: int) -> list[VariableSplit]:
    """The splits of what a layer keeps of its kernel, where the kernel of floats is split along an axis."""
    mode = quantized.mode(layer)
    if mode == "int4":  # a table of inputs by outputs
        kept = (layers.KERNEL, "g_idx") if style == "row" else (layers.KERNEL, "kernel_scale", "kernel_zero")
        values = [(name, getattr(layer, name, None)) for name in kept]
        along = [(name, 0 if style == "row" else len(value.shape) - 1) for name, value in values if value is not None]
        return [VariableSplit(layer, name, at) for name, at in along]
    found = [VariableSplit(layer, layers.KERNEL, axis)]
    if mode == "int8" and style == "column":  # a scale for each output, in the outputs' axes
        found.append(VariableSplit(layer, "kernel_scale", len(layer.kernel_scale.shape) + axis_of(layer, "column")))
    return found


def lora(layer: keras.layers.Layer, axis: int) -> list[VariableSplit]:
    """The split of LoRA's matrices where the kernel is split along an axis: the product is split as the kernel is.

    The second matrix has the kernel's last axis, the first one the others; the other matrix stays whole.
    """
    if not getattr(layer, "lora_enabled", False):
        return []
    is_last = axis == len(quantized.kernel_shape(layer)) - 1
    return [VariableSplit(layer, "lora_kernel_b", 1) if is_last else VariableSplit(layer, "lora_kernel_a", axis)]


def heads(layer: keras.layers.MultiHeadAttention) -> list[VariableSplit]:
    """The splits of an attention layer by its heads."""
    found = []
    for inner in (layer.query_dense, layer.key_dense, layer.value_dense, layers.attention_gate(layer)):
        if inner is not None:
            found.append(VariableSplit(inner, layers.KERNEL, len(inner.kernel.shape) - 2))
            found += lora(inner, found[-1].axis)
            found += [VariableSplit(inner, "bias", len(inner.bias.shape) - 2)] if inner.bias is not None else []
    last = layer.output_dense
    found += [VariableSplit(last, layers.KERNEL, 0), *lora(last, 0)]
    return found + ([VariableSplit(last, "bias", None)] if last.bias is not None else [])


def channels(layer: keras.layers.Layer) -> list[VariableSplit]:
    """The splits of a BatchNormalization between two split layers, by its channels; none for other layers."""
    if not isinstance(layer, keras.layers.BatchNormalization):
        return []
    names = ["gamma"] * layer.scale + ["beta"] * layer.center + ["moving_mean", "moving_variance"]
    return [VariableSplit(layer, name, 0) for name in names]


def axis_of(layer: keras.layers.Layer, how: str) -> int:
    """The axis of activations that is split, from the last: of the outputs for a column, of the inputs for a row."""
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return -2 * layers.attention_rank(layer) - 1  # the axis of the attention scores, for dropout
    if isinstance(layer, keras.layers.EinsumDense):
        return _einsum(layer, how)[1]
    if getattr(layer, "data_format", None) == "channels_first":
        return 1 - len(layer.kernel.shape)
    return -1


def einsum_size(layer: keras.layers.EinsumDense, how: str) -> int | None:
    """The number of columns or rows; None where the equation has no axis that can be split so."""
    found = _einsum(layer, how)
    return None if found is None else quantized.kernel_shape(layer)[found[0]]


def _einsum(layer: keras.layers.EinsumDense, how: str) -> tuple[int, int] | None:
    """The axis of the kernel that is split, and that of the activations, from the last."""
    inputs, result = layer.equation.replace(" ", "").split("->")
    given, kernel = inputs.split(",")
    made = [letter for letter in kernel if letter in result and letter not in given]
    summed = [letter for letter in kernel if letter in given and letter not in result]
    letters, side = (made, result) if how == "column" else (summed, given)
    if not letters or "..." in side[side.index(letters[0]) :]:
        return None
    at = side.index(letters[0]) - len(side)
    if how == "column" and layer.bias is not None:
        shape = layer.bias.shape
        if len(shape) < -at or shape[at] != quantized.kernel_shape(layer)[kernel.index(letters[0])]:
            return None
    return kernel.index(letters[0]), at


def is_convolution(layer: keras.layers.Layer) -> bool:
    """Whether a layer is one of the convolutions that can be split."""
    return type(layer) in (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def convolved(layer: keras.layers.Layer, inputs: tf.Tensor) -> tf.Tensor:
    """What a convolution computes with some of its filters; Keras's `call` needs a bias of `layer.filters` numbers."""
    return finished(layer, term(layer, inputs))


def term(layer: keras.layers.Layer, value: tf.Tensor) -> tf.Tensor:
    """What a row-parallel layer computes from its part of the input: a term of the sum, without bias and activation."""
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(value, layer.kernel)
    if isinstance(layer, keras.layers.EinsumDense):
        return keras.ops.einsum(layer.equation, value, layer.kernel)
    kernel = tf.convert_to_tensor(layer.kernel)
    if layer.padding != "causal":
        return layer.convolution_op(value, kernel)
    padding, positions = [[0, 0]] * 3, 1 if layer.data_format == "channels_last" else 2
    padding[positions] = [layer.dilation_rate[0] * (layer.kernel_size[0] - 1), 0]
    return keras.ops.conv(
        keras.ops.pad(value, padding),
        kernel,
        strides=list(layer.strides),
        padding="valid",
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
    )


def finished(layer: keras.layers.Layer, total: tf.Tensor) -> tf.Tensor:
    """What a row-parallel layer computes from the sum: adds the bias and applies the activation."""
    bias = layer.bias
    if bias is not None:
        if getattr(layer, "data_format", None) == "channels_first":
            bias = keras.ops.reshape(bias, (1, -1) + (1,) * (len(total.shape) - 2))
        total = keras.ops.add(total, bias)
    return total if layer.activation is None else layer.activation(total)

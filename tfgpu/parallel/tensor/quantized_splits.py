"""Quantized Dense and EinsumDense layers over several devices: which can be split, and what a row computes.

A column computes with its parts of the kernel and of the scales, as Keras does; so does a row whose inputs are floats,
as in int4. In int8 a row rounds its inputs by the largest number of them all, which the devices find together, and the
devices' products are summed as whole numbers: so the result is one device's to the bit.
"""

import functools
import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import ops

from tfgpu.compat import layers, quantized
from tfgpu.compat.patch import override
from tfgpu.parallel import compiled_calls, device_placement, shard_patches
from tfgpu.parallel.tensor import collectives, local_shards
from tfgpu.parallel.tensor.axes import VariableSplit
from tfgpu.parallel.tensor.collectives import Placements
from tfgpu.parallel.tensor.local_shards import on_shards


def why_not_split(layer: keras.layers.Layer, style: str, ways: int) -> str | None:
    """Why a layer cannot be split in a style because it, or one within it, is quantized; None where it can."""
    if all(quantized.mode(each) is None for each in layers.layers_within(layer)):
        return None
    mode = quantized.mode(layer)
    if style not in ("column", "row") or mode not in ("int8", "int4"):
        return f"it is quantized to {mode}" if mode else "it is quantized"
    quantizer = layer.inputs_quantizer
    if style == "row" and quantizer is not None:
        if mode != "int8" or type(quantizer) is not keras.quantizers.AbsMaxQuantizer:
            return f"its inputs are quantized by {type(quantizer).__name__}"
    return _why_not_in_int4(layer, style, ways) if mode == "int4" else None


def _why_not_in_int4(layer: keras.layers.Layer, style: str, ways: int) -> str | None:
    if not quantized.is_flat(layer):
        return "it is quantized to int4 by a version of Keras before 3.14"
    summed = 1
    if isinstance(layer, keras.layers.EinsumDense):
        given, kernel = layer.equation.replace(" ", "").split("->")[0].split(",")
        summed = sum(letter in given for letter in kernel)
        if any(letter in given for letter in kernel[summed:]):
            return f"the kernel of {layer.equation!r} does not begin with the axes that are summed"
    columns = math.prod(quantized.kernel_shape(layer)[summed:])
    if style == "column" and columns % (2 * ways):
        return f"its {columns} columns are stored in pairs, which do not divide into {ways} shards"
    return None


def install(layer: keras.layers.Layer, splits: Sequence[VariableSplit], ways: int) -> None:
    """Makes a layer whose variables are split compute with a device's shards, and save what one device has."""
    if quantized.mode(layer) == "int4":
        (axis,) = (split.axis for split in splits if split.attribute == layers.KERNEL)
        part, stock = quantized.part_of_flat(layer, axis, ways), layer.quantized_call
        quantized.open_axis(layer, axis)

        @functools.wraps(stock)
        def call(*args, **kwargs):
            if not local_shards.is_computing():
                return stock(*args, **kwargs)
            with local_shards.attributes(layer, part):
                return stock(*args, **kwargs)

        override(layer, "quantized_call", call, by=__name__)
    if not layer.lora_enabled:  # whose class saves the sum of the kernel and LoRA's product
        override(layer, "save_own_variables", functools.partial(_save, layer), by=__name__)
        override(layer, "load_own_variables", functools.partial(_load, layer), by=__name__)


def row_total(
    layer: keras.layers.Layer, stock: Callable, inputs: Sequence[tf.Tensor], placements: Placements
) -> tf.Tensor:
    """What a row computes on the first device, before its bias and activation.

    Args:
        layer: int8 or int4.
        stock: what computes it, with bias and activation, where the layer is whole.
        inputs: a part for each device.
        placements: of the shards.
    """
    if layer.inputs_quantizer is not None:
        total = _int8_total(layer, inputs, placements)
        return _with_lora(layer, total, inputs, placements) if layer.lora_enabled else total

    def term(value: tf.Tensor) -> tf.Tensor:
        with local_shards.attributes(layer, {"bias": None, "activation": None}):
            return stock(value)

    terms = on_shards(lambda at, value: _compiled(layer, term, (value,), placements[at]), placements, inputs)
    with device_placement.scope(placements[0]):
        return collectives.sum_terms(terms)


def _int8_total(layer: keras.layers.Layer, inputs: Sequence[tf.Tensor], placements: Placements) -> tf.Tensor:
    kernels = on_shards(lambda at, value: tf.convert_to_tensor(layers.raw_kernel(layer)), placements, inputs)
    kernel_scale, axes = tf.convert_to_tensor(layer.kernel_scale), quantized.summed_axes(layer)
    low, high = layer.inputs_quantizer.value_range

    @tf.custom_gradient
    def total(*values):
        largest = on_shards(lambda at, value: ops.max(ops.abs(value), axes, keepdims=True), placements, values)
        with device_placement.scope(placements[0]):
            _, scale = layer.inputs_quantizer(functools.reduce(ops.maximum, largest), axis=axes)
        scales = collectives.copy_to_all(scale, placements)

        def term(at, value):
            rounded = ops.cast(ops.clip(ops.round(ops.multiply(value, scales[at])), low, high), "int8")
            found = _compiled(layer, quantized.product, (layer, rounded, kernels[at]), placements[at])
            return ops.cast(found, "float32")  # whole up to 2^24; a GPU would sum integers on the host

        terms = on_shards(term, placements, values)
        with device_placement.scope(placements[0]):
            product = ops.cast(collectives.sum_terms(terms), layer.compute_dtype)
            result = ops.divide(product, quantized.output_scale(layer, scale, kernel_scale))

        def input_gradient(at, value):
            return quantized.inputs_gradient(layer, value, kernels[at], kernel_scale)

        def gradient(upstream):
            return on_shards(input_gradient, placements, collectives.copy_to_all(upstream, placements))

        return result, gradient

    return total(*inputs)


def _with_lora(
    layer: keras.layers.Layer, total: tf.Tensor, inputs: Sequence[tf.Tensor], placements: Placements
) -> tf.Tensor:
    """Adds LoRA's product, of which only the narrow tensor between its matrices is summed over the devices."""
    terms = on_shards(lambda at, value: quantized.product(layer, value, layer.lora_kernel_a), placements, inputs)
    with device_placement.scope(placements[0]):
        added = ops.matmul(collectives.sum_terms(terms), layer.lora_kernel_b)
        total = ops.add(total, (layer.lora_alpha / layer.lora_rank) * added)
        return ops.cast(total, layer.compute_dtype)


def _compiled(layer: keras.layers.Layer, compute: Callable, args: tuple, placement) -> tf.Tensor:
    return compiled_calls.run(layer, compute, args, {}, placement.local_device)


def _save(layer: keras.layers.Layer, store) -> None:
    shard_patches.write_variables([getattr(layer, name) for name in quantized.stored_names(layer)], store)


def _load(layer: keras.layers.Layer, store) -> None:
    shard_patches.read_variables(layer, [getattr(layer, name) for name in quantized.stored_names(layer)], store)

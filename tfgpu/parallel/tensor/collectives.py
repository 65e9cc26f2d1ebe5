"""Moves tensors between the devices of a tensor-parallel group, with the gradients that belong to it."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgpu.compat.keras import get_mask, set_mask
from tfgpu.parallel import device_placement

SUM, SUM_BACK = "tensor_sum", "tensor_sum_back"
"""The names in a graph of the sums over devices in the forward and the backward pass; each is one all-reduce."""

Placements = Sequence[device_placement.DevicePlacement]


def sum_terms(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of one term per device, on the current device."""
    return tf.add_n(list(terms), name=SUM)


def copy_to_all(value: tf.Tensor, placements: Placements) -> list[tf.Tensor]:
    """A copy on each device. The gradient is the sum over the copies', which is taken once."""
    value = tf.convert_to_tensor(value)
    repeated = [value] * len(placements)
    if value.dtype.is_floating:
        with device_placement.scope(placements[0]):  # a custom gradient adds one more operation
            repeated = _repeated(value, placements)
    copies = on_each(tf.identity, placements, repeated)
    return _with_masks(value, copies, lambda mask: on_each(tf.identity, placements, [mask] * len(placements)))


def _repeated(value: tf.Tensor, placements: Placements) -> list[tf.Tensor]:
    @tf.custom_gradient
    def repeat(given):
        def gradient(*upstream):
            with device_placement.scope(placements[0]):
                return tf.add_n(list(upstream), name=SUM_BACK)

        return [tf.identity(given) for _ in placements], gradient

    return repeat(value)


def scatter(value: tf.Tensor, placements: Placements, axis: int) -> list[tf.Tensor]:
    """An equal part of the tensor along an axis for each device."""
    parts = on_each(tf.identity, placements, tf.split(value, len(placements), axis))
    return _with_masks(value, parts, lambda mask: [mask] * len(placements))


def on_each(function: Callable, placements: Placements, *columns: Sequence) -> list:
    """The function's value on each device, of that device's arguments."""
    found = []
    for placement, *row in zip(placements, *columns, strict=True):
        with device_placement.scope(placement):
            found.append(function(*row))
    return found


def _with_masks(value: tf.Tensor, found: list, masks_of: Callable) -> list[tf.Tensor]:
    mask = get_mask(value)
    if mask is not None:
        for each, own in zip(found, masks_of(mask), strict=True):
            set_mask(each, own)
    return found

"""The cross-entropy and the accuracy of outputs whose positions are on several devices, without gathering them."""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.core import logits
from tfgpu.parallel.sequence import positions


def remember_parts(joined: tf.Tensor, parts: Sequence[tf.Tensor], devices: Sequence[str]) -> None:
    """Keeps with a tensor the parts along axis 1 that it was joined from, and their devices."""
    slots.of(joined).sequence_parts = tuple(parts), tuple(devices)


@functools.cache
def install() -> None:
    """Computes what is of each token where the token's outputs are."""

    @wrap("nn.sparse_categorical_crossentropy")
    def sparse(stock, target, output, from_logits=False, axis=-1):
        found = logits.noted(output, "sequence_parts")
        if found is None or not from_logits or axis not in (-1, len(output.shape) - 1) or len(output.shape) < 3:
            return stock(target, output, from_logits, axis)
        parts, devices = found

        def losses(own, part):
            return stock(own, tf.cast(part, output.dtype), from_logits, axis)

        own = tf.split(tf.convert_to_tensor(target), len(parts), 1)
        return tf.concat(positions.on_each(losses, devices, own, parts), 1)

    @wrap("numpy.argmax")
    def argmax(stock, x, axis=None, keepdims=False):
        found = logits.noted(x, "sequence_parts")
        if found is None or keepdims or len(x.shape) < 3 or axis not in (-1, len(x.shape) - 1):
            return stock(x, axis, keepdims)
        parts, devices = found
        # In int64, because concatenating int32 works in host memory.
        found = positions.on_each(lambda part: tf.cast(stock(part, -1, False), tf.int64), devices, parts)
        return tf.cast(tf.concat(found, 1), tf.int32)

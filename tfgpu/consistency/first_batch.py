"""Looks at the first batch of a `fit` before its first step, and hands it on to that step.

The data is read once: a generator, or a shuffle without a seed, would give something else the second time.
"""

import tensorflow as tf

from tfgpu.core import batch_sharding, step_blocks
from tfgpu.core.feed import sharded_dataset


def peek(block: object) -> object:
    """Reads the next batch; the block's first step gets it.

    Args:
        block: the block of steps that comes next.

    Returns:
        The whole batch, in host memory; None if the data has ended, or is not whole on this worker. Where a worker
        makes only its rows of the batches, it makes all rows of the first besides.
    """
    if not isinstance(block, step_blocks.Block):
        return None
    if sharded_dataset.has_rows(block.iterator):
        return block.iterator.first_batch()
    iterator, gives_row_ranges = sharded_dataset.source_of(block.iterator)
    if gives_row_ranges is None or not isinstance(iterator, tf.data.Iterator):
        return None
    with batch_sharding.on_host():
        found = iterator.get_next_as_optional()
        if not found.has_value():
            return None
        batch = found.get_value()
        block.first = _iterator_of(batch, iterator.element_spec)
    return batch


def _iterator_of(batch: object, spec: object) -> tf.data.Iterator:
    """An iterator of one batch, with the spec of the data, so that the step need not be traced again for it."""

    @tf.autograph.experimental.do_not_convert
    def give(_):
        tensors = tf.nest.flatten(batch, expand_composites=True)
        shapes = tf.nest.flatten(spec, expand_composites=True)
        given = [_with_shape(tensor, each) for tensor, each in zip(tensors, shapes, strict=True)]
        return tf.nest.pack_sequence_as(spec, given, expand_composites=True)

    return iter(tf.data.Dataset.from_tensors(0).map(give))


def _with_shape(tensor: tf.Tensor | None, spec: tf.TensorSpec) -> tf.Tensor | None:
    """A tensor of which the graph knows the shape of the spec only."""
    return None if tensor is None else tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape)

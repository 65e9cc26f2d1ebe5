"""Fetches examples that are far away before they are read."""

from collections.abc import Callable

import tensorflow as tf

_BATCHES_AHEAD = 4


def fetched_ahead(batches: tf.data.Dataset, ahead: Callable, column: int) -> tf.data.Dataset:
    """Begins to fetch the examples of some batches of keys in advance.

    Args:
        batches: int64 [n, columns], the keys of a batch's examples.
        ahead: maps indices (int64 [n]) to a tensor, and begins to fetch those examples.
        column: which column holds the index; a negative one stands for no example.
    """

    def begin(key):
        index = key[:, column]
        with tf.control_dependencies([ahead(tf.boolean_mask(index, index >= 0))]):
            return tf.identity(key)

    return batches.map(begin).prefetch(_BATCHES_AHEAD)

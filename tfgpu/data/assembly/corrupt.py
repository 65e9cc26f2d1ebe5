"""Names the example that cannot be decoded: a decoder's error names no file."""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.data.position import parted


def named(cut: tf.data.Dataset, *, expected: Callable, index: Callable, where: Callable) -> tf.data.Dataset:
    """Stops at the first gap in the numbers of the examples, where a corrupt one was dropped, and names it.

    Catching the error per example, in a dataset of one, costs ten times as much as decoding a JPEG (measured); finding
    a gap costs nothing.

    Args:
        cut: batches `(key, x)` of the examples that could be decoded. `key` is int64 [n, columns], the position with
            which the iteration began (`position.parted`) in the first column and the example's number in the epoch in
            the last.
        expected: maps a batch's number to the numbers of its examples, consecutive int64.
        index: maps the epoch and a number to the example's index.
        where: maps an index to the example's name.
    """

    def look(number, batch):
        key, x = batch
        epoch, first = parted(key[0, 0])
        wanted, got = expected(first + number), key[:, -1]
        got = tf.pad(got, [[0, tf.size(wanted) - tf.size(got)]], constant_values=-1)
        missing = wanted[tf.argmax(got != wanted)]
        whole = tf.reduce_all(got == wanted)

        def stop():
            name = where(index(epoch, missing))
            with tf.control_dependencies([tf.debugging.Assert(whole, ["Corrupt:", name])]):
                return tf.identity(key)

        return tf.cond(whole, lambda: key, stop), x

    return cut.enumerate().map(look)

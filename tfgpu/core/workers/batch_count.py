"""Counts the batches that a compiled loop has read, readable while it runs.

If the data of one worker ends first, it goes on to the end of the block, while the others wait for it in a step. No
error comes of that. So the thread of `watch.py` compares the counts.
"""

import uuid

import tensorflow as tf


class BatchCount:
    """Two numbers in host memory: batches read so far, and whether the data has ended."""

    def __init__(self):
        with tf.init_scope(), tf.device("CPU:0"):  # no variables: a strategy would make copies on each replica
            self._count, self._has_ended = (
                tf.raw_ops.VarHandleOp(dtype=dtype, shape=[], shared_name=f"tfgpu-{uuid.uuid4()}")
                for dtype in (tf.int64, tf.bool)
            )
            tf.raw_ops.AssignVariableOp(resource=self._count, value=tf.constant(0, tf.int64))
        self.begin()

    def begin(self) -> None:
        """Called before a loop."""
        tf.raw_ops.AssignVariableOp(resource=self._has_ended, value=tf.constant(False))

    def note_batch(self) -> None:
        """Called in a loop, when it has a batch."""
        tf.raw_ops.AssignAddVariableOp(resource=self._count, value=tf.constant(1, tf.int64))

    def note_end(self) -> None:
        """Called in a loop, after its last batch."""
        tf.raw_ops.AssignVariableOp(resource=self._has_ended, value=tf.constant(True))

    def read(self) -> tuple[int, bool]:
        """The batches read so far, and whether the data has ended; from any thread."""
        with tf.device("CPU:0"):
            count = tf.raw_ops.ReadVariableOp(resource=self._count, dtype=tf.int64)
            return int(count), bool(tf.raw_ops.ReadVariableOp(resource=self._has_ended, dtype=tf.bool))

"""Reads batches and discards them, as fast as they come."""

import time
from collections.abc import Callable

import tensorflow as tf


class Reader:
    """Reads and discards batches, epoch after epoch.

    Args:
        dataset: the batches; one iteration is an epoch.
        steps: batches in an epoch.
        draw: `(iterator, count)` -> the number of examples in the next `count` batches, a tf.function.

    Attributes:
        cpu_us: CPU microseconds of this process per example, of each call.
    """

    def __init__(self, dataset: tf.data.Dataset, steps: int, draw: Callable):
        self._dataset, self._steps, self._draw = dataset, steps, draw
        self._iterator, self._left, self._count = None, 0, 1
        self.cpu_us: list[float] = []

    def __call__(self, seconds: float) -> float:
        """Reads for about this long; returns examples per second."""
        begun, cpu, seen = time.perf_counter(), time.process_time(), 0
        while (passed := time.perf_counter() - begun) < seconds:
            if not self._left:
                self._iterator, self._left = iter(self._dataset), self._steps
            count = min(self._left, self._count)
            seen += int(self._draw(self._iterator, tf.constant(count)))
            self._left -= count
            if time.perf_counter() - begun - passed < seconds / 50:  # A call costs as much as a small batch.
                self._count *= 2
        self.cpu_us.append((time.process_time() - cpu) / seen * 1e6)
        return seen / (time.perf_counter() - begun)


def drawing(labels: Callable) -> Callable:
    """A function for `Reader`, where `labels(batch)` has a row for each example.

    Readers of batches of the same shapes can share one, which is traced once.
    """

    @tf.function
    def draw(iterator, count):
        seen = tf.constant(0)
        for _ in tf.range(count):
            seen += tf.shape(labels(next(iterator)))[0]
        return seen

    return draw

"""How long the steps of a running `fit` compute and how many rows they have, measured at next to no cost for the step.

tf.data keeps statistics of each iterator: among them the time from the end of one request for a batch to the start of
the next, which is the step's own time. The rest of a step is waiting for data. Reading the statistics takes some 50 us
in the calling thread, and does not slow the step.
"""

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.core.feed import sharded_dataset
from tfgpu.core.step_blocks import Run

_FEWEST = 5
_PAUSE = 10.0


def computing_s(run: Run) -> float | None:
    """The time that a step computes, in seconds: from receiving its batch to asking for the next.

    Args:
        run: the `fit`.

    Returns:
        The mean over at most the last 100 steps, or blocks of steps whose batches are read ahead to a GPU; `None` if
        unknown: the data does not come from one tf.data iterator of this machine, or has only begun.
    """
    block = run.block
    if block is not None and block.computing_s is not None:
        return block.computing_s
    iterator, _ = sharded_dataset.source_of(block.iterator if block is not None else None)
    resource = private.iterator_resource(iterator)
    if resource is None:
        return None
    # TensorFlow's own description of the message, which no public module has.
    from tensorflow.core.framework import model_pb2

    with contextlib.suppress(tf.errors.OpError, ValueError):
        told = tf.raw_ops.IteratorGetModelProto(iterator=resource).numpy()
        return mean_gap([gap / 1e6 for gap in model_pb2.ModelProto.FromString(told).gap_times])
    return None


def mean_gap(gaps: Sequence[float]) -> float | None:
    """The mean of times between requests, without pauses: validation, a checkpoint, a callback.

    Example:
        >>> mean_gap([0.1] * 9 + [5.0])
        0.1
    """
    if len(gaps) < _FEWEST:
        return None
    most = _PAUSE * statistics.median(gaps)
    return statistics.fmean(gap for gap in gaps if gap <= most)


class RowCounter:
    """Counts the rows that the loss has seen since an epoch began, on this process's replicas.

    Keras's loss tracker counts them in float32: exactly up to 16,777,216. An `evaluate` that a callback calls resets
    that count and adds its own rows, which are excluded here.

    Args:
        run: the `fit`; `None` if the repairs are off: such an `evaluate` then goes unnoticed.
    """

    def __init__(self, run: Run | None):
        self._before, self._begin = 0.0, 0.0
        self.model: keras.Model | None = None
        if run is not None:
            run.asides.append(self._aside)

    def begin(self, model: keras.Model) -> None:
        """Starts an epoch; Keras has reset its count."""
        self.model, self._before, self._begin = model, 0.0, sum(_counted(model) or ())

    def count(self, steps: int) -> int | None:
        """The rows of the epoch so far; `None` if they are not counted.

        A custom training step may count steps instead, by `update_state(loss)` without a weight. A count that is no
        larger than the number of steps says nothing about rows.

        Args:
            steps: steps of the epoch so far.
        """
        found = _counted(self.model)
        if found is None:
            return None
        total = self._before + sum(found) - self._begin
        counts_rows = type(self.model).train_step is keras.Model.train_step or total > steps * len(found)
        return round(total) if counts_rows else None

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self._before += sum(_counted(self.model) or ()) - self._begin
        try:
            yield
        finally:
            self._begin = sum(_counted(self.model) or ())


def _counted(model: keras.Model | None) -> list[float] | None:
    """The loss tracker's count, for each replica of this process."""
    tracker = next((each for each in getattr(model, "metrics", ()) if each.name == "loss"), None)
    count = getattr(tracker, "count", None)
    if model is None or count is None:
        return None
    with contextlib.suppress(tf.errors.OpError, ValueError, RuntimeError, TypeError):
        return [float(part) for part in model.distribute_strategy.experimental_local_results(count.value)]
    return None

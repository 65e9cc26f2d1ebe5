"""How long the steps of a running `fit` compute, and how many rows they had, asked without a word in the step.

tf.data keeps a model of each iterator, and in it the time between the end of one request for a batch and the begin of
the next: that is the step's own time. What a step takes beyond it, it has waited for data. To ask costs no step
anything: some 50 us in whatever thread asks.
"""

import contextlib
import statistics
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfgpu.core import batch_sharding
from tfgpu.core.step_blocks import Run

_FEWEST = 5
_PAUSE = 10.0


def computing_s(run: Run) -> float | None:
    """The time that a step computes, in seconds: from when it has its batch to when it asks for the next.

    Args:
        run: the `fit`.

    Returns:
        The mean over the last steps, a hundred at most; `None` where the data does not tell: it comes by another way
        than one iterator of tf.data on this machine's CPU, or has only begun.
    """
    block = run.block
    iterator = block.iterator if block is not None else None
    if isinstance(iterator, batch_sharding.DealtIterator):
        iterator = iterator.source
    resource = getattr(iterator, "_iterator_resource", None)
    if resource is None:
        return None
    # TensorFlow's own description of the message; no public module has it.
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


class Rows:
    """The rows that the loss has seen since an epoch began, of this process's replicas.

    Keras's tracker of the loss counts them, in float32: exactly up to 16,777,216. An `evaluate` that a callback calls
    in between begins that count anew and adds its own rows; they are left out.

    Args:
        run: the `fit`; `None` where the repairs are off, and such an `evaluate` is not seen.
    """

    def __init__(self, run: Run | None):
        self._before, self._begin = 0.0, 0.0
        self.model: keras.Model | None = None
        if run is not None:
            run.asides.append(self._aside)

    def begin(self, model: keras.Model) -> None:
        """An epoch begins: Keras has set its count back."""
        self.model, self._before, self._begin = model, 0.0, sum(_counted(model) or ())

    def count(self, steps: int) -> int | None:
        """The rows; `None` where nobody counts them.

        A training step of one's own may count steps instead, by `update_state(loss)` without a weight: a count that is
        no more than that says nothing about rows.

        Args:
            steps: that the epoch has had.
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
    """What the tracker of the loss has counted, by replica of this process."""
    tracker = next((each for each in getattr(model, "metrics", ()) if each.name == "loss"), None)
    count = getattr(tracker, "count", None)
    if model is None or count is None:
        return None
    with contextlib.suppress(tf.errors.OpError, ValueError, RuntimeError, TypeError):
        return [float(part) for part in model.distribute_strategy.experimental_local_results(count.value)]
    return None

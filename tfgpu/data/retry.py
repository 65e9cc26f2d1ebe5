"""Retries a dataset whose source fails temporarily, such as a network drive, a server or a bucket."""

import functools
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import worker_rows
from tfgpu.errors import InputError, MachineError, is_number, whole_number

_LASTING = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.CancelledError,
    tf.errors.UnauthenticatedError,
)
"""Errors that another attempt would only repeat."""

_MOST_WAIT_S = 60.0

_log = logging.getLogger(__name__)


def retry(data: tf.data.Dataset, limit: int = 3, *, wait_s: float = 1.0) -> tf.data.Dataset:
    """Reopens a dataset after a read error and continues with the next element.

    Permanent errors, such as a wrong shape or an image that cannot be decoded, are raised at once.

    Args:
        data: yields the same elements in the same order each time it is opened, so random shuffling belongs after
            `retry`. The `train` of `tfgpu.data.load` can be passed as it is.
        limit: consecutive attempts for one element. The wait doubles with each attempt, up to a minute.
        wait_s: seconds before the first retry.

    Returns:
        A dataset of the same elements. They pass through Python, which copies each once, so apply it to batches.

    Raises:
        InputError: a setting is out of range.
        MachineError: raised by `fit`, `evaluate` and `predict` when the last attempt has failed (elsewhere TensorFlow
            turns it into a `tf.errors.UnknownError`). Checkpoints that `tfgpu.callbacks.Checkpoint` has saved remain.

    Example:
        >>> bad = {"reads": 0}
        >>> def read():
        ...     yield from (1, 2)
        ...     bad["reads"] += 1
        ...     if bad["reads"] == 1:
        ...         raise OSError("the drive is gone")
        ...     yield 3
        >>> numbers = tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec([], tf.int32))
        >>> [int(n) for n in retry(numbers, wait_s=0)]
        [1, 2, 3]
    """
    _check(data, limit, wait_s)
    counter = slots.get(data, "epochs")

    def again(data: tf.data.Dataset) -> tf.data.Dataset:
        elements = functools.partial(_elements, data, counter, limit, wait_s)
        found = tf.data.Dataset.from_generator(elements, output_signature=data.element_spec)
        if int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY:
            found = found.apply(tf.data.experimental.assert_cardinality(data.cardinality()))
        return found.with_options(data.options())  # above all, how workers shard it

    found = again(data)
    if counter is not None:
        slots.of(found).epochs = counter
    own = worker_rows.of(data)
    if own is not None:
        worker_rows.register(found, worker_rows.WorkerRows(lambda ranges: again(own.make(ranges)), own.first))
    return found


def _check(data: tf.data.Dataset, limit: int, wait_s: float) -> None:
    if not isinstance(data, tf.data.Dataset):
        raise InputError(
            f"`retry` needs a tf.data.Dataset, which it can reopen. Received: {type(data).__name__}. Use "
            "tf.data.Dataset.from_generator(function, output_signature=...)."
        )
    whole_number("limit", limit)
    if not is_number(wait_s) or wait_s < 0:
        raise InputError(f"`wait_s` must be a number of seconds from 0. Received: {wait_s!r}.")
    ragged = [spec for spec in tf.nest.flatten(data.element_spec) if isinstance(spec, tf.RaggedTensorSpec)]
    if any(spec.ragged_rank == 0 for spec in ragged):
        raise InputError("`retry` cannot yield single rows of a ragged tensor. Apply it after `batch`.")


def _elements(data: tf.data.Dataset, counter: Any, limit: int, wait_s: float) -> Iterator:
    """Yields the elements; after an error, reopens the dataset and skips those already yielded."""
    epoch = None if counter is None else counter.next
    given = failed = 0
    while True:
        if counter is not None:
            counter.next = epoch
        source = iter(data)
        try:
            _skip(source, given)
            for element in source:
                yield element
                given, failed = given + 1, 0
            return
        except tf.errors.OpError as error:
            failed += 1
            _raise_if_final(error, given, failed, limit)
            reason = _reason(error)
        pause = min(wait_s * 2 ** (failed - 1), max(wait_s, _MOST_WAIT_S))
        _log.warning(
            "The data failed after %d elements (%s); retry %d of %d in %g s.", given, reason, failed, limit, pause
        )
        time.sleep(pause)


def _skip(source: Iterator, given: int) -> None:
    if sum(1 for _ in itertools.islice(source, given)) < given:
        raise InputError(
            f"The data failed after {given} elements, and has fewer now that it was reopened. `retry` needs data that "
            "yields the same elements each time."
        )


def _raise_if_final(error: tf.errors.OpError, given: int, failed: int, limit: int) -> None:
    if isinstance(error, _LASTING):
        raise InputError(f"The data cannot be read beyond {given} elements: {_reason(error)}") from error
    if failed > limit:
        raise MachineError(
            f"The data failed {failed} times in a row after {given} elements: {_reason(error)}. Fix its source and "
            "start again; training with a Checkpoint resumes from the last save. Or increase `limit` or `wait_s` of "
            "`retry`."
        ) from error


def _reason(error: tf.errors.OpError) -> str:
    """Returns the error message without TensorFlow's notes on where it happened."""
    line = next(iter(str(error.message).splitlines()), "") or type(error).__name__
    return line.rpartition("}} ")[2]

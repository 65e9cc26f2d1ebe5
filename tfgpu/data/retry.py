"""Data that fails in the middle, and is read again from where it was: a network drive, a server, a bucket."""

import itertools
import logging
import time
from collections.abc import Iterator

import tensorflow as tf

from tfgpu.errors import InputError, MachineError

_LASTING = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.CancelledError,
    tf.errors.UnauthenticatedError,
)
"""What another try would only meet again."""

_MOST_WAIT_S = 60.0

_log = logging.getLogger(__name__)


def retry(data: tf.data.Dataset, limit: int = 3, *, wait_s: float = 1.0) -> tf.data.Dataset:
    """Reads on where data fails: opens it anew, passes over what it has given, and goes on with the next element.

    Errors that are no fault of the moment, such as a wrong shape or an image that cannot be decoded, end it at once.

    Args:
        data: gives the same elements in the same order each time: what shuffles anew each time comes after `retry`. The
            `train` of `tfgpu.data.pipeline` repeats its epochs, and can be given as it is.
        limit: tries in a row for one element, from 1; each waits twice as long as the one before, up to a minute.
        wait_s: seconds before the first of them.

    Returns:
        A data set of the same elements. They pass through Python: one copy each. Put it where elements are batches, or
        few.

    Raises:
        InputError: a setting is out of range.
        MachineError: by `fit`, `evaluate` and `predict`, where the last try has failed too (elsewhere TensorFlow makes
            a `tf.errors.UnknownError` of it). A `tfgpu.callbacks.Checkpoint` keeps what was saved before.

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
    if not isinstance(data, tf.data.Dataset):
        raise InputError(
            f"`retry` needs a tf.data.Dataset, which it can open again. Received: {type(data).__name__}. Take "
            "tf.data.Dataset.from_generator(function, output_signature=...)."
        )
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"`limit` must be a whole number of tries from 1. Received: {limit!r}.")
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or wait_s < 0:
        raise InputError(f"`wait_s` must be a number of seconds from 0. Received: {wait_s!r}.")
    ragged = [spec for spec in tf.nest.flatten(data.element_spec) if isinstance(spec, tf.RaggedTensorSpec)]
    if any(spec.ragged_rank == 0 for spec in ragged):
        raise InputError("`retry` cannot pass on rows of a ragged tensor one by one. Put it after `batch`.")
    counter = getattr(data, "tfgpu_epochs", None)

    def elements() -> Iterator:
        epoch = None if counter is None else counter.next
        given = failed = 0
        while True:
            if counter is not None:
                counter.next = epoch
            source = iter(data)
            try:
                if sum(1 for _ in itertools.islice(source, given)) < given:
                    raise InputError(
                        f"The data gave {given} elements and failed; opened anew it has fewer. `retry` needs data that "
                        "gives the same elements each time."
                    )
                for element in source:
                    yield element
                    given, failed = given + 1, 0
                return
            except tf.errors.OpError as error:
                failed, reason = failed + 1, _reason(error)
                if isinstance(error, _LASTING):
                    raise InputError(f"The data cannot be read beyond {given} of its elements: {reason}") from error
                if failed > limit:
                    raise MachineError(
                        f"The data failed {failed} times in a row after {given} of its elements: {reason}. Mend what "
                        "it is read from and start again; with a Checkpoint the training goes on from there. Or raise "
                        "`limit` or `wait_s` of `retry`."
                    ) from error
            pause = min(wait_s * 2 ** (failed - 1), max(wait_s, _MOST_WAIT_S))
            _log.warning(
                "The data failed after %d elements (%s); try %d of %d in %g s.", given, reason, failed, limit, pause
            )
            time.sleep(pause)

    found = tf.data.Dataset.from_generator(elements, output_signature=data.element_spec)
    if int(data.cardinality()) != tf.data.UNKNOWN_CARDINALITY:
        found = found.apply(tf.data.experimental.assert_cardinality(data.cardinality()))
    found = found.with_options(data.options())  # how workers share it, above all
    if counter is not None:
        found.tfgpu_epochs = counter
    return found


def _reason(error: tf.errors.OpError) -> str:
    """What went wrong, without TensorFlow's notes of where."""
    line = next(iter(str(error.message).splitlines()), "") or type(error).__name__
    return line.rpartition("}} ")[2]

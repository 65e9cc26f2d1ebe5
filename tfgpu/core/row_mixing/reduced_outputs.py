"""Numbers that a function of `strategy.run` returns, and whose sum over the replicas is one device's, not their mean.

A Keras loss is one: it is weighted by its replica's share of the batch. Under stock Keras each replica returns the mean
of its own rows, and scripts take `strategy.reduce("MEAN", ...)` of it: here a warning says what to take.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.compat.patch import wrap
from tfgpu.core.row_mixing.trials import comparison

_log = logging.getLogger(__name__)


def are_sums(whole: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]], close: float) -> set[int]:
    """Which outputs of all rows are the sum of the parts' and not their mean.

    Example:
        >>> are_sums([np.array(3.0)], [[np.array(1.0)], [np.array(2.0)]], 1e-5)
        {0}
    """
    found = set()
    for at, value in enumerate(whole):
        each = [part[at] for part in parts]
        if not value.ndim and comparison.is_close(value, sum(each), close):
            if not comparison.is_close(value, sum(each) / len(each), close):
                found.add(at)
    return found


def marked(strategy: tf.distribute.Strategy, function: Callable, outputs: object) -> object:
    """What a function has returned, with a note at each tensor that a trial has found to be such a sum."""
    key = slots.get(strategy, "function_keys", {}).get(getattr(function, "__code__", None))
    sums = slots.get(strategy, "sums", {}).get(key, ())
    for at, each in enumerate(filter(_is_floating, tf.nest.flatten(outputs) if sums else ())):
        if at in sums and isinstance(each, distribute.PerReplica):
            slots.of(each).is_share_of = getattr(function, "__name__", type(function).__name__)
    return outputs


def warn_of_means() -> None:
    """Wraps `strategy.reduce`."""

    @wrap("tf.distribute.Strategy.reduce")
    def reduce(stock, self, reduce_op, value, axis):
        is_mean = axis is None and str(getattr(reduce_op, "value", reduce_op)).upper() == "MEAN"
        names = {slots.get(each, "is_share_of") for each in tf.nest.flatten(value)} if is_mean else ()
        for name in filter(None, names):
            _tell(self, name)
        return stock(self, reduce_op, value, axis)


def _tell(strategy: tf.distribute.Strategy, name: str) -> None:
    told = vars(slots.of(strategy)).setdefault("means_told", set())
    if name not in told:
        told.add(name)
        _log.warning(
            '`strategy.reduce("MEAN", ...)` of what `%s` returns is not one device\'s number: each replica returns its '
            'share of it (a Keras loss is weighted by the replica\'s rows). Use `strategy.reduce("SUM", ...)`.',
            name,
        )


def _is_floating(leaf: object) -> bool:
    first = leaf.values[0] if isinstance(leaf, distribute.PerReplica) else leaf
    return tf.is_tensor(first) and tf.as_dtype(first.dtype).is_floating

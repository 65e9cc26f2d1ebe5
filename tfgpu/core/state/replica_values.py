"""Reads, assigns and aggregates variables that hold another value on each replica."""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import replication
from tfgpu.core.state import broadcast
from tfgpu.core.state.array_slices import ArraySlices, flat_part


def gather(strategy: tf.distribute.Strategy, variable) -> np.ndarray:
    """Every replica's value of a variable, stacked in the order of the replicas, as bits (`to_bits`).

    On several workers this is a collective: every worker must call it.
    """
    mine = to_bits(np.stack([np.array(copy.numpy()) for copy in variable.values]))
    if not replication.spans_processes(strategy):
        return mine
    return broadcast.of_all_workers(strategy, mine).reshape(-1, *mine.shape[1:])


def assign(strategy: tf.distribute.Strategy, variable, values: np.ndarray | ArraySlices, aggregation: str) -> None:
    """Assigns this process's replicas their values.

    If the number of replicas has changed, the first replica gets the aggregate and the others get zeros; for a mean,
    all get the aggregate.

    Args:
        strategy: the variable's.
        variable: holds another value on each replica.
        values: what `gather` returned, perhaps on another number of replicas. Of slices, no more is read than needed.
        aggregation: as for `aggregate`.
    """
    dtype, shape = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype), values.shape[1:]
    if values.shape[0] == strategy.num_replicas_in_sync:
        size = math.prod(shape)
        assign_each(strategy, variable, lambda at: from_bits(flat_part(values, at * size, size), dtype).reshape(shape))
        return
    whole = aggregate(from_bits(np.asarray(values), dtype), aggregation)
    zeros = whole if aggregation == "mean" else np.zeros_like(whole)
    assign_each(strategy, variable, lambda replica: zeros if replica else whole)


def assign_each(strategy: tf.distribute.Strategy, variable, value_of: Callable[[int], np.ndarray]) -> None:
    """Assigns each of this process's replicas what `value_of` returns for its number, one after the other."""
    own, count = variable.values, strategy.num_replicas_in_sync
    first = distribute.worker_index(strategy) * len(own) if len(own) < count else 0
    for at, copy in enumerate(own, first):
        copy.assign(value_of(at))


def aggregate(values: np.ndarray, aggregation: str) -> np.ndarray:
    """The value on one device: the replicas' `"sum"` or `"mean"`; for any other aggregation the first replica's."""
    if aggregation == "sum":
        return values.astype("float64").sum(0).astype(values.dtype) if values.dtype.kind == "f" else values.sum(0)
    return values.mean(0).astype(values.dtype) if aggregation == "mean" else values[0]


def to_bits(value) -> np.ndarray:
    """bfloat16 and similar types as integers of the same bits, the only form that safetensors and NumPy share."""
    value = np.asarray(value)
    return value.view(f"u{value.itemsize}") if value.dtype.kind == "V" else value


def from_bits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of `to_bits`, for a value of this dtype."""
    return array.view(dtype) if dtype.kind == "V" else array

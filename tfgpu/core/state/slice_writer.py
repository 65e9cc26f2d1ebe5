"""Writes variables into HDF5 files by slices, so that no array is held as a whole beside the variable itself."""

import math
from collections.abc import Iterator
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.compat.variables import held, local_copy
from tfgpu.core import replication
from tfgpu.core.state.sharded_variable import AxisSharding, ShardedVariable

_SLICE_BYTES = 1 << 22
"""The most bytes of a slice; smaller arrays are left to Keras."""

Chunk = tuple[tuple[slice, ...], np.ndarray]


def write(group: h5py.Group, key: str, value: Any) -> bool:
    """Writes an array of a known form by slices.

    Args:
        group: of the file.
        key: the array's name there.
        value: a variable, the shards of one, or an array.

    Returns:
        False if it is left to Keras, which makes an array of it: small, of a dtype that HDF5 lacks, or read by a
        collective.
    """
    dtype = _dtype(value)
    if dtype is None or math.prod(value.shape) * dtype.itemsize <= _SLICE_BYTES:
        return False
    if isinstance(value, np.ndarray):
        group.create_dataset(key, data=value)
        return True
    found = chunks(value)
    if found is None:
        return False
    dataset = group.create_dataset(key, shape=tuple(value.shape), dtype=dtype)
    for index, chunk in found:
        dataset[index] = chunk
    return True


def _dtype(value: Any) -> np.dtype | None:
    if isinstance(value, np.ndarray):
        return value.dtype if value.dtype.kind in "fiu" else None
    if not isinstance(value, keras.Variable | ShardedVariable):
        return None
    dtype = tf.as_dtype(keras.backend.standardize_dtype(value.dtype)).as_numpy_dtype
    return np.dtype(dtype) if np.dtype(dtype).kind in "fiu" else None


def chunks(value: keras.Variable | ShardedVariable) -> Iterator[Chunk] | None:
    """The slices of a variable, with their places in it; None if its copies are to be summed or gathered first."""
    if not isinstance(value, ShardedVariable):
        source = held(value)
        is_plain = isinstance(source, tf.Variable) or isinstance(source, tf.distribute.DistributedValues)
        if not is_plain or getattr(source, "synchronization", None) == tf.VariableSynchronization.ON_READ:
            return None
        return _slices(local_copy(value))
    if isinstance(value.sharding, AxisSharding):
        inner = [chunks(shard) for shard in value.shards]
        return None if None in inner else _beside(value, inner)
    copies = held(value.shards[0]) if isinstance(value.shards[0], keras.Variable) else None
    if not value.sharding.over_replicas or not isinstance(copies, tf.distribute.DistributedValues):
        return None
    strategy = copies.distribute_strategy
    if replication.spans_processes(strategy) and distribute.num_workers(strategy) > 1:
        return None
    return _rows_of_pieces(copies.values, tuple(value.shape))


def _slices(variable: tf.Variable) -> Iterator[Chunk]:
    """Slices along the longest axis."""
    tensor = variable.read_value()  # once: some variables are copied when they are read
    shape = tuple(tensor.shape)
    axis = max(range(len(shape)), key=lambda at: shape[at])
    of_one = math.prod(shape) // max(shape[axis], 1) * tensor.dtype.size
    step = max(1, _SLICE_BYTES // max(of_one, 1))
    for begin in range(0, shape[axis], step):
        index = (*[slice(None)] * axis, slice(begin, min(begin + step, shape[axis])))
        yield index, tensor[index].numpy()


def _beside(value: ShardedVariable, inner: list[Iterator[Chunk]]) -> Iterator[Chunk]:
    """The slices of shards that lie side by side along an axis."""
    axis, start = value.sharding.axis, 0
    for shard, found in zip(value.shards, inner, strict=True):
        size = shard.shape[axis]
        for index, chunk in found:
            whole = [*index, *[slice(None)] * (len(value.shape) - len(index))]
            low, high, _ = whole[axis].indices(size)
            whole[axis] = slice(start + low, start + high)
            yield tuple(whole), chunk
        start += size


def _rows_of_pieces(pieces: tuple[tf.Variable, ...], shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Rows of an array whose numbers lie, one after another, in pieces of equal length."""
    tensors = [tf.reshape(piece.read_value(), [-1]) for piece in pieces]
    length, row = int(tensors[0].shape[0]), math.prod(shape[1:])
    step = max(1, _SLICE_BYTES // max(row * tensors[0].dtype.size, 1))
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        begin, end = first * row, last * row
        found = np.empty(end - begin, tensors[0].dtype.as_numpy_dtype)
        for at in range(begin // length, -(-end // length)):
            low, high = max(begin, at * length), min(end, (at + 1) * length)
            found[low - begin : high - begin] = tensors[at][low - at * length : high - at * length].numpy()
        yield (slice(first, last),), found.reshape(last - first, *shape[1:])

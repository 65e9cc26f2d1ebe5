"""What each worker saves of a training's state: what lives with it, and its share of what all workers have.

An array is a row of numbers (in C order) in stretches. A piece of a variable that is sharded over replicas, and a
replica's own value, are saved by the worker that has them. Of what differs between replicas but counts for the first
alone, as statistics under `batch_norm="replica"`, the chief saves the first one's. What all workers have is laid end to
end and cut into one equal stretch per worker; small arrays stay whole. Shards along an axis are saved one by one, as
`NAME~0`, `NAME~1`.

Every worker computes the whole layout, from shapes alone, and copies its own stretches.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.compat.variables import has_copies, held
from tfgpu.core import replication
from tfgpu.core.state import host_copies, replica_values, training_state
from tfgpu.core.state.sharded_variable import AxisSharding, ShardedVariable

_CUT_BYTES = 1 << 16
"""Smaller arrays that all workers have are not cut."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
        key: its name there: an array's name, or `NAME[BEGIN:END]` for a stretch of an array.
        shape: of the tensor; a stretch has one dimension.
        dtype: of the tensor.
        chunks: its numbers, in order, in one or several arrays of any shapes.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[np.ndarray, ...] = field(repr=False)


@dataclass(frozen=True)
class StateParts:
    """What this worker saves, and what a reader must know of all.

    Attributes:
        own: this worker's tensors.
        cut: the shapes of arrays that are saved in stretches.
        axes: the axes along which arrays are joined that are saved in shards.
    """

    own: list[Stored] = field(repr=False)
    cut: dict[str, tuple[int, ...]]
    axes: dict[str, int]


@dataclass(frozen=True)
class _Stretch:
    """Numbers `begin` to `end` of an array; on their worker also the variable or array that holds them, and where."""

    worker: int
    begin: int
    end: int
    source: Any = None
    offset: int = 0


@dataclass(frozen=True)
class _Array:
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stretches: tuple[_Stretch, ...] = ()
    source: Any = None
    """Of an array that all workers have."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def whole(arrays: dict[str, np.ndarray]) -> StateParts:
    """Arrays that one process saves."""
    return StateParts([as_stored(name, array) for name, array in arrays.items()], {}, {})


def as_stored(name: str, array: np.ndarray) -> Stored:
    """An array that is saved whole."""
    array = replica_values.to_bits(array)
    return Stored(name, array.shape, array.dtype, (array,))


def copy(
    model, *, metrics: bool = False, instead: Mapping[str, np.ndarray] | None = None, without: Collection[str] = ()
) -> StateParts:
    """Copies this worker's part of the state as it is now, after `settle`; on several workers, each must call it.

    Args:
        model: the compiled and built model.
        metrics: whether to include the metrics, as in the middle of an epoch.
        instead: arrays to save in place of the state's of the same names; the same on all workers.
        without: the names of arrays that are left out.
    """
    training_state.settle(model)
    layout = _Layout(model.distribute_strategy)
    for name, source in {**training_state.sources(model, metrics=metrics), **(instead or {})}.items():
        if name not in without:
            layout.add(name, source)
    return layout.copied(model)


class _Layout:
    """Where each array is saved.

    Args:
        strategy: the model's.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        spans = replication.spans_processes(strategy)
        self._workers = distribute.num_workers(strategy) if spans else 1
        self._rank = distribute.worker_index(strategy) if spans else 0
        self._arrays: list[_Array] = []
        self._axes: dict[str, int] = {}

    def add(self, name: str, source: Any) -> None:
        if isinstance(source, training_state.EachReplica):
            copies = source.variable.values
            shape = tuple(copies[0].shape)
            self._add_copies(name, (len(copies) * self._workers, *shape), copies)
        elif isinstance(source, ShardedVariable) and isinstance(source.sharding, AxisSharding):
            self._axes[name] = source.sharding.axis
            for at, shard in enumerate(source.shards):
                self.add(f"{name}~{at}", shard)
        elif isinstance(source, ShardedVariable) and source.sharding.holder is not None:
            self._add_copy(name, tuple(source.shape), held(source.shards[0]).values, source.sharding.holder)
        elif isinstance(source, ShardedVariable) and source.sharding.over_replicas:
            self._add_copies(name, tuple(source.shape), held(source.shards[0]).values)
        elif not isinstance(source, np.ndarray) and training_state.differs_by_replica(source):
            # A shard along an axis, as of a gradient that waits: the value of one device, on all workers.
            value = replica_values.to_bits(np.array(source.numpy()))
            self._arrays.append(_Array(name, value.shape, value.dtype, source=value))
        elif _is_of_first_replica(source):
            stretch = _Stretch(0, 0, math.prod(source.shape), source)
            self._arrays.append(_Array(name, tuple(source.shape), _bits_dtype(source), (stretch,)))
        else:
            self._arrays.append(_Array(name, tuple(source.shape), _bits_dtype(source), source=source))

    def _add_copies(self, name: str, shape: tuple[int, ...], copies: Iterable[tf.Variable]) -> None:
        """An array whose stretches are the replicas' copies of a variable; the last may be longer than its stretch."""
        copies, size, found = tuple(copies), math.prod(shape), []
        step = math.prod(copies[0].shape)
        for replica in range(len(copies) * self._workers):
            worker, begin, end = replica // len(copies), replica * step, min((replica + 1) * step, size)
            source = copies[replica % len(copies)] if worker == self._rank else None
            if begin < end:
                found.append(_Stretch(worker, begin, end, source))
        self._arrays.append(_Array(name, shape, _bits_dtype(copies[0]), tuple(found)))

    def _add_copy(self, name: str, shape: tuple[int, ...], copies: Sequence[tf.Variable], replica: int) -> None:
        """An array that one replica has."""
        worker = replica // len(copies)
        source = copies[replica % len(copies)] if worker == self._rank else None
        stretch = _Stretch(worker, 0, math.prod(shape), source)
        self._arrays.append(_Array(name, shape, _bits_dtype(copies[0]), (stretch,)))

    def copied(self, model) -> StateParts:
        arrays, cut = list(self._dealt()), {}
        own = [stretch for array in arrays for stretch in array.stretches if stretch.worker == self._rank]
        chunks = iter(_copies(model, own))
        stored = []
        for array in arrays:
            for worker, group in itertools.groupby(array.stretches, lambda stretch: stretch.worker):
                found = list(group)
                begin, end = found[0].begin, found[-1].end
                is_whole = (begin, end) == (0, array.size)
                if not is_whole:
                    cut[array.name] = array.shape
                if worker == self._rank:
                    key = array.name if is_whole else f"{array.name}[{begin}:{end}]"
                    shape = array.shape if is_whole else (end - begin,)
                    stored.append(Stored(key, shape, array.dtype, tuple(itertools.islice(chunks, len(found)))))
        return StateParts(stored, cut, self._axes)

    def _dealt(self) -> Iterable[_Array]:
        """The arrays, those that all workers have cut into one equal share for each."""
        whole = [array for array in self._arrays if array.source is not None]
        shares = iter(deal([(array.size, array.dtype.itemsize) for array in whole], self._workers))
        for array in self._arrays:
            if array.source is None:
                yield array
            else:
                cuts = [_Stretch(worker, begin, end, array.source, begin) for worker, begin, end in next(shares)]
                yield replace(array, stretches=tuple(cuts))


def deal(sizes: Sequence[tuple[int, int]], workers: int) -> list[list[tuple[int, int, int]]]:
    """Cuts arrays that lie end to end into one equal share per worker; small ones stay whole.

    Args:
        sizes: the numbers of each array, and the bytes of one.
        workers: how many there are.

    Returns:
        For each array its stretches: the worker, the first number and the one after the last.

    Example:
        >>> deal([(100_000, 4), (1, 8), (20_000, 4)], 2)
        [[(0, 0, 60001), (1, 60001, 100000)], [(1, 0, 1)], [(1, 0, 20000)]]
    """
    total, at, found = sum(size * width for size, width in sizes), 0, []
    for size, width in sizes:
        if workers == 1 or size * width < _CUT_BYTES:
            middle = at + size * width // 2
            found.append([(min(middle * workers // max(total, 1), workers - 1), 0, size)])
        else:
            ends = [-((at - total * (worker + 1) // workers) // width) for worker in range(workers - 1)]
            ends = [0, *(min(max(end, 0), size) for end in ends), size]
            cuts = [(worker, *pair) for worker, pair in enumerate(itertools.pairwise(ends))]
            found.append([cut for cut in cuts if cut[1] < cut[2]])
        at += size * width
    return found


def _copies(model, stretches: list[_Stretch]) -> list[np.ndarray]:
    """Copies of stretches of variables, and views of arrays, in their order."""
    variables = [at for at, stretch in enumerate(stretches) if not isinstance(stretch.source, np.ndarray)]
    ranges = [(each.offset, each.offset + each.end - each.begin) for each in stretches]
    given = [stretches[at].source for at in variables]
    copied = host_copies.copy(model, given, stretches=[ranges[at] for at in variables])
    found = dict(zip(variables, copied, strict=True))
    for at, stretch in enumerate(stretches):
        if at not in found:
            begin, end = ranges[at]
            found[at] = np.reshape(stretch.source, -1)[begin:end]
    return [replica_values.to_bits(found[at]) for at in range(len(stretches))]


def _is_of_first_replica(source: Any) -> bool:
    """Whether replicas may hold other values, and the first one's is saved: so the chief saves it."""
    if not isinstance(source, keras.Variable) or held(source) is None or not has_copies(source):
        return False
    return any(slots.get(copy, "differs_by_replica") for copy in held(source).values)


def _bits_dtype(source: Any) -> np.dtype:
    """The dtype in a file: of bfloat16 and similar types, integers of as many bits."""
    dtype = source.dtype if isinstance(source, np.ndarray) else training_state.dtype_of(source)
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype

"""Shards the global batch: one shard per replica, with the range of its rows in the batch.

TensorFlow's own sharding does not tell a replica about the other shards, so each step would need a collective to count
rows. And by default it shards files, not batches, if the data comes from files: a batch then holds other rows than on
one device.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpu.compat import distribute, slots, training
from tfgpu.compat.patch import wrap
from tfgpu.core import nested_functions, replication, step_context, worker_vote
from tfgpu.core.workers import ledger

_UNEQUAL = "All parts of a batch must have the same number of rows."


class ReplicaBatch(NamedTuple):
    """A replica's shard of a batch.

    Attributes:
        data: its rows, in the batch's structure; where it has none, the batch's first row stands in.
        local: how many rows are its own, int32 scalar.
        offset: rows of the batch before its own, int32 scalar; 0 where it has none.
        total: rows of the whole batch, int32 scalar.
        whole: the whole batch, in host memory, for a step that sees all rows; else None.
    """

    data: object
    local: tf.Tensor
    offset: tf.Tensor
    total: tf.Tensor
    whole: object = None


def shard_batches() -> None:
    """Gives each replica its shard of every batch, equal but for one row, and tells it which rows those are.

    Every worker makes the whole batch, as one device does, and keeps its shards. If the data asks for another way of
    sharding (`experimental_distribute.auto_shard_policy` FILE, HINT or OFF), TensorFlow shards it.
    """

    @wrap("TFEpochIterator.__init__")
    def init(stock, self, distribute_strategy=None, *args, **kwargs):
        strategy = distribute_strategy
        if isinstance(strategy, tf.distribute.OneDeviceStrategy):
            stock(self, Undistributed(), *args, **kwargs)
            training.set_iterator_strategy(self, strategy)
            return
        if not replication.is_replicated(strategy):
            return stock(self, strategy, *args, **kwargs)
        distributor = _Distributor(strategy)
        stock(self, distributor, *args, **kwargs)
        training.set_iterator_strategy(self, strategy)
        if not replication.spans_processes(strategy):
            return
        if not distributor.was_asked:  # the user has distributed the data
            worker_vote.check_same_run(strategy, -1, same_data=False)
        elif distributor.cuts:
            ledger.compare("began to read data", {"batches": str(training.batches_known(self))})
        else:  # Each worker's part may have another length. An epoch lasts until all have ended.
            training.forget_batches(self)


def replica_batch(batch, at, count: int, *, stand_in: bool = True) -> ReplicaBatch:
    """Shard number `at` of `count` of a batch: any structure of tensors, ragged and sparse ones too.

    Scalars go whole to each replica. A shard without rows holds the batch's first row, on which the step computes as on
    any other; without `stand_in` it is empty.
    """
    values = [v for v in tf.nest.flatten(batch) if v is not None]
    batched = [v for v in values if v.shape.rank != 0]
    if not batched:
        return ReplicaBatch(batch, tf.constant(1), tf.cast(at, tf.int32), tf.constant(count))
    at, total = tf.cast(at, tf.int32), _common_rows(batched)
    if isinstance(total, int) and total % count == 0:
        # All shards have one static shape, so the step needs no special case for empty ones.
        rows = total // count
        data = tf.nest.map_structure(lambda v: sliced(v, at * rows, rows), batch)
        return ReplicaBatch(data, tf.constant(rows), at * rows, tf.constant(total))
    rows, start, offset, held = _uneven_range(total, at, count)
    held = held if stand_in else rows
    data = tf.nest.map_structure(lambda v: sliced(v, offset if stand_in else start, held), batch)
    return ReplicaBatch(data, rows, offset, tf.convert_to_tensor(total))


def shard(
    strategy: tf.distribute.Strategy,
    batch,
    *,
    gives_row_ranges: bool = True,
    gives_whole: bool = False,
    rows: int | None = None,
):
    """Splits a whole batch into a distributed value: per replica of this process a `ReplicaBatch`, or only its rows.

    Args:
        strategy: of replicas.
        batch: any structure of tensors.
        gives_row_ranges: whether a replica is told which rows it gets.
        gives_whole: whether a `ReplicaBatch` holds the whole batch too; a device copies only what its step uses of it.
        rows: of the batch, if known although the shapes of its tensors do not say it.
    """
    batch = tf.nest.map_structure(lambda v: v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v), batch)
    if rows is not None:
        with on_host():
            batch = tf.nest.map_structure(lambda v: _with_rows(v, rows), batch)

    def of_replica(context):
        at = replication.shard_index(strategy, context.replica_id_in_sync_group)
        found = replica_batch(batch, at, context.num_replicas_in_sync, stand_in=gives_row_ranges)
        if gives_row_ranges and gives_whole:
            return found._replace(whole=batch)
        return found if gives_row_ranges else found.data

    with on_host():
        return strategy.experimental_distribute_values_from_function(of_replica)


def on_host() -> contextlib.AbstractContextManager:
    """Keeps what the block makes in this process's host memory: TensorFlow would place it on the first GPU."""
    return tf.device("CPU:0")


def rows_and_range(data) -> tuple[Any, tf.Tensor, tuple | None]:
    """What a replica received: its data, the number of rows, and (offset, total) if known.

    Data that is not in a `ReplicaBatch` gets a stand-in row if it is empty.
    """
    if isinstance(data, ReplicaBatch):
        return data.data, data.local, (data.offset, data.total)
    local = num_rows(data)
    return data if tf.get_static_value(local) else tf.nest.map_structure(with_stand_in_row, data), local, None


def num_rows(data) -> tf.Tensor:
    """Rows of a replica's data: the first dimension of its first tensor, or 1 if that is a scalar."""
    for value in tf.nest.flatten(data):
        if value is not None and value.shape.rank != 0:
            return tf.convert_to_tensor(rows_in(value))
    return tf.constant(1)


def with_stand_in_row(value):
    """The tensor; if it is empty, a row of ones (zeros for integers), which is safe in logarithms and norms."""
    if not tf.is_tensor(value) or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) or value.shape.rank == 0:
        return value
    if value.shape[0]:
        return value

    def one():
        shape = tf.concat([[1], tf.shape(value)[1:]], 0)
        return tf.ones(shape, value.dtype) if value.dtype.is_floating else tf.zeros(shape, value.dtype)

    row = tf.cond(tf.shape(value)[0] > 0, lambda: value, one)  # passes the tensor on without a copy
    if value.shape[0] is None:
        row.set_shape(value.shape)
    return row


class _Distributor:
    """Takes the strategy's place where Keras distributes its dataset."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self.was_asked, self.cuts = False, True

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset):
        self.was_asked = True
        policies = tf.data.experimental.AutoShardPolicy
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if replication.spans_processes(self._strategy):
            own_cut = policy in (policies.AUTO, policies.DATA)
            worker_vote.check_same_run(self._strategy, int(dataset.cardinality()), same_data=own_cut)
            self.cuts = own_cut
            if not own_cut:
                return self._strategy.experimental_distribute_dataset(dataset)
        return _sharded(self._strategy, dataset, step_context.current().gives_row_ranges)


class Undistributed:
    """Takes the place of a one-device strategy where Keras distributes a dataset: returns it unchanged.

    TensorFlow's own iterator asks in each step whether there is data, and takes each batch from a GPU to the host and
    back to answer.
    """

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset


class ShardedDataset:
    """A dataset whose batches the compiled step shards on the host.

    One plain tf.data iterator yields whole batches. The step slices them in host memory, which costs a tenth of a `map`
    in tf.data, and each device copies its own shard. TensorFlow's own iterator asks all workers at every step whether
    they have data, copies each batch from a GPU to the host and back, and loses the batch's size.

    Args:
        strategy: the strategy whose replicas get the shards.
        dataset: a dataset of whole batches, the same on every worker.
        gives_row_ranges: whether a replica is told which rows it gets.
    """

    def __init__(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool):
        self._strategy, self._gives_row_ranges, self.dataset = strategy, gives_row_ranges, dataset
        self._shard = _compiled_shard(strategy, dataset, gives_row_ranges)

    @functools.cached_property
    def element_spec(self):
        """What one replica gets of a batch. Takes some 30 ms, and only a model that is not built needs it."""
        return self.dataset.map(_cut(self._strategy, self.dataset, self._gives_row_ranges)).element_spec[0]

    def __iter__(self):
        return ShardedIterator(iter(self.dataset), self._gives_row_ranges, self._shard)


@dataclass
class ShardedIterator:
    """The shards of batch after batch as values of the strategy.

    Attributes:
        source: iterator of whole batches; compiled loops read and shard it themselves.
        gives_row_ranges: whether a replica is told which rows it gets.
    """

    source: tf.data.Iterator
    gives_row_ranges: bool
    _shard: Callable

    def __iter__(self):
        return self

    def __next__(self):
        return self._shard(next(self.source))


def source_of(iterator: object) -> tuple[Any, bool | None]:
    """What a compiled loop reads, and whether its shards tell their row ranges; None if the loop does not shard."""
    if isinstance(iterator, ShardedIterator):
        return iterator.source, iterator.gives_row_ranges
    return iterator, None


def spec_of(data: object) -> object:
    """The specs of a batch: of one in Python, or of those (or one replica's part of those) that an iterator gives."""
    iterator, _ = source_of(data)
    if not hasattr(iterator, "element_spec"):
        data = data.data if isinstance(data, ReplicaBatch) else data
        return tf.nest.map_structure(
            lambda v: None if v is None else distribute.replica_spec(tf.type_spec_from_value(v)), data
        )
    spec = iterator.element_spec
    return tf.nest.map_structure(distribute.replica_spec, spec.data if isinstance(spec, ReplicaBatch) else spec)


def next_batch(iterator: tf.data.Iterator | tf.distribute.DistributedIterator) -> tuple[tf.Tensor, Callable]:
    """Whether an iterator has another batch (bool scalar), and a function that returns it, to call only if it has."""
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return distribute.next_batch(iterator)
    with on_host():  # `identity` has a device of its own, and `get_value` goes where the optional is
        batch = tf.nest.map_structure(tf.identity, iterator.get_next_as_optional(), expand_composites=True)

    def get_value():
        with on_host():
            return batch.get_value()

    return batch.has_value(), get_value


def _sharded(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool) -> ShardedDataset:
    """Kept with the dataset, because its sharding function takes some 30 ms to trace."""
    kept = vars(slots.of(dataset)).setdefault("sharded", {})
    key = strategy, gives_row_ranges
    if key not in kept:
        kept[key] = ShardedDataset(strategy, dataset, gives_row_ranges)
    return kept[key]


def _compiled_shard(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool) -> Callable:
    """`shard` as a tf.function, kept with the strategy: one per dataset would be traced at each `predict`.

    Data whose shapes differ in more than the number of rows gets another function: with `reduce_retracing`, a shared
    one could lose the rank.
    """

    def but_for_rows(spec):
        is_plain = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_plain else spec

    kept = vars(slots.of(strategy)).setdefault("compiled_shards", {})
    key = repr(tf.nest.map_structure(but_for_rows, dataset.element_spec)), gives_row_ranges
    if key not in kept:
        cut = functools.partial(shard, strategy, gives_row_ranges=gives_row_ranges)
        kept[key] = nested_functions.own(cut, reduce_retracing=True)
    return kept[key]


def _cut(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool) -> Callable:
    """A tf.data function from a batch to the shards of this process's replicas, in order."""
    devices, count = len(strategy.extended.worker_devices), strategy.num_replicas_in_sync
    first = distribute.worker_index(strategy) * devices if replication.spans_processes(strategy) else 0
    places = [replication.shard_index(strategy, first + device) for device in range(devices)]

    @tf.autograph.experimental.do_not_convert
    def cut(*batch):
        batch = batch if type(dataset.element_spec) is tuple else batch[0]  # as tf.data does: no namedtuple
        shards = [replica_batch(batch, at, count, stand_in=gives_row_ranges) for at in places]
        return tuple(each if gives_row_ranges else each.data for each in shards)

    return cut


def row_range(total: int | tf.Tensor, at, count: int) -> tuple:
    """Which of `total` rows are shard number `at` of `count`: how many, rows before them, `total`, and rows held.

    A shard without rows holds one that stands in, the first. All are numbers or int32 scalars.
    """
    at = tf.cast(at, tf.int32)
    if isinstance(total, int) and total % count == 0:
        return total // count, at * (total // count), total, total // count
    local, _, offset, held = _uneven_range(total, at, count)
    return local, offset, total, held


def _uneven_range(total: int | tf.Tensor, at: tf.Tensor, count: int) -> tuple[tf.Tensor, ...]:
    rows, left = total // count, total % count
    start, rows = at * rows + tf.minimum(at, left), rows + tf.cast(at < left, tf.int32)
    return rows, start, tf.where(rows > 0, start, 0), tf.minimum(tf.maximum(rows, 1), total)


def _common_rows(values: list) -> int | tf.Tensor:
    """The number of rows of a batch's tensors: an int if all are known, else an int32 scalar that checks them.

    Raises:
        ValueError: they have different numbers of rows.
    """
    static = {v.shape[0] for v in values} - {None}
    if len(static) > 1:
        raise ValueError(f"{_UNEQUAL} Received: {sorted(static)} rows.")
    total = static.pop() if static and all(v.shape[0] for v in values) else rows_in(values[0])
    if isinstance(total, int):
        return total
    checks = [tf.debugging.assert_equal(rows_in(v), total, _UNEQUAL) for v in values[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(total)


def _with_rows(value, rows: int):
    """A tensor whose shape says how many rows it has; other values are passed on."""
    if not isinstance(value, tf.Tensor) or value.shape.rank in (0, None):
        return value
    return tf.ensure_shape(value, [rows, *value.shape[1:]])


def rows_in(value) -> int | tf.Tensor:
    """Rows of a tensor: an int if known, else an int32 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0] if value.shape[0] is None else value.shape[0]


def sliced(value, start, rows):
    """`rows` rows of a tensor from `start` on; a scalar stays whole."""
    if value is None or value.shape.rank == 0:
        return value
    if isinstance(value, tf.SparseTensor):
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros([value.shape.rank - 1], tf.int64)], 0)
        size = tf.concat([[tf.cast(rows, tf.int64)], value.dense_shape[1:]], 0)
        return tf.sparse.slice(value, begin, size)
    part = value[start : start + rows]
    if isinstance(rows, int) and isinstance(value, tf.Tensor):
        part = tf.ensure_shape(part, [rows, *value.shape[1:]])
    return part

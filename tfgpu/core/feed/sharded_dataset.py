"""Distributes the dataset of `fit`, `evaluate` and `predict`: the compiled step shards each batch, or `shards_ahead`.

TensorFlow's own sharding does not tell a replica about the other shards, so each step would need a collective to count
rows. And by default it shards files, not batches, if the data comes from files: a batch then holds other rows than on
one device.
"""

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import tensorflow as tf

from tfgpu.compat import distribute, slots, training
from tfgpu.compat.device_iterators import Dealer, DeviceIterators
from tfgpu.compat.patch import wrap
from tfgpu.core import nested_graphs, replication, step_blocks, step_context, worker_rows, worker_vote
from tfgpu.core.batch_sharding import ReplicaBatch, on_host, ranges_of, replica_batch, shard, shard_rows
from tfgpu.core.dealing import sharing
from tfgpu.core.feed import early_cut, read_ahead, shards_ahead
from tfgpu.core.workers import ledger


def shard_batches() -> None:
    """Gives each replica its shard of every batch, equal but for one row, and tells it which rows those are.

    Every worker makes its own rows of each batch where the data can tell how (`worker_rows`), else the whole batch, as
    one device does, of which it keeps its shards. If the data asks for another way of sharding
    (`experimental_distribute.auto_shard_policy` FILE, HINT or OFF), TensorFlow shards it.
    """

    @wrap("TFEpochIterator.__init__")
    def init(stock, self, distribute_strategy=None, *args, **kwargs):
        strategy = distribute_strategy
        if isinstance(data := kwargs.get("x"), tf.data.Dataset) and worker_rows.of(data) is not None:
            kwargs["shuffle"] = False  # Keras would warn that it cannot shuffle what `tfgpu.data` has shuffled
        if isinstance(strategy, tf.distribute.OneDeviceStrategy):
            stock(self, Undistributed(strategy), *args, **kwargs)
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
    """Takes the place of a one-device strategy where Keras distributes a dataset: returns it, read ahead for a GPU.

    TensorFlow's own iterator asks in each step whether there is data, and takes each batch from a GPU to the host and
    back to answer.

    Args:
        strategy: the strategy whose device reads ahead; None to return datasets unchanged.
    """

    def __init__(self, strategy: tf.distribute.OneDeviceStrategy | None = None):
        self._strategy = strategy

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if self._strategy is None else read_ahead.read_ahead(self._strategy, dataset)


class ShardedDataset:
    """A dataset whose batches the compiled step shards on the host.

    One plain tf.data iterator yields whole batches, or this worker's rows of them. The step slices them in host memory,
    which costs a tenth of a `map` in tf.data, and each device copies its own shard. TensorFlow's own iterator asks all
    workers at every step whether they have data, copies each batch from a GPU to the host and back, and loses the
    batch's size.

    Args:
        strategy: the strategy whose replicas get the shards.
        dataset: a dataset of whole batches, the same on every worker.
        gives_row_ranges: whether a replica gets the range of its rows.
    """

    def __init__(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool):
        self.strategy, self.gives_row_ranges, self.dataset = strategy, gives_row_ranges, dataset
        is_shared = replication.spans_processes(strategy) and distribute.num_workers(strategy) > 1
        self.worker_rows = _worker_rows(strategy, dataset) if is_shared else None
        self._read: dict[Given, tf.data.Dataset] = {}

    @functools.cached_property
    def element_spec(self):
        """What one replica gets of a batch. Takes some 30 ms, and only a model that is not built needs it."""
        return self.dataset.map(_cut(self.strategy, self.dataset, self.gives_row_ranges)).element_spec[0]

    @functools.cached_property
    def batch_rows(self) -> int | None:
        """Rows of each whole batch, if its shapes say it."""
        specs = [spec for spec in tf.nest.flatten(self.dataset.element_spec) if hasattr(spec, "shape")]
        sizes = {spec.shape[0] for spec in specs if spec.shape.rank}
        return sizes.pop() if len(sizes) == 1 and all(spec.shape.rank is not None for spec in specs) else None

    @functools.cached_property
    def _dealer(self) -> Dealer:
        return shards_ahead.dealer(self.strategy, self.dataset)

    def __iter__(self):
        kind = Given.WHOLE if self.worker_rows is None else _given(self.worker_rows)
        if kind is Given.WHOLE and self.gives_row_ranges and shards_ahead.can_read_ahead(self.strategy, self.dataset):
            return ShardedIterator(self, Given.AHEAD, self._dealer.iterator())
        if kind not in self._read:
            ranges = ranges_of(self.strategy)
            self._read[kind] = {
                Given.WHOLE: lambda: self.dataset,
                Given.ROWS: lambda: self.worker_rows.make(ranges),
                Given.SHOWN: lambda: self.worker_rows.make_showing(ranges, 0),
            }[kind]()
        return ShardedIterator(self, kind, iter(self._read[kind]))


def _worker_rows(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> worker_rows.WorkerRows | None:
    found, ranges = worker_rows.of(dataset), ranges_of(strategy)
    if found is None and sharing.is_made_by_python(dataset):
        return sharing.rows_of(strategy, dataset, ranges)
    return found or early_cut.rows_of(dataset, ranges)


class Given(Enum):
    """What an iterator gives: whole batches; a worker's rows of them, or those after the first batch whole; shards."""

    WHOLE = "whole"
    ROWS = "rows"
    SHOWN = "shown"
    AHEAD = "ahead"


def _given(rows: worker_rows.WorkerRows) -> Given:
    """What the iterator gives that is made now; all workers choose alike.

    An iterator draws the order of its data when it is made, so that cannot wait until a step is tried.
    """
    run = step_blocks.current()
    if run is None:
        return Given.ROWS
    if shards_ahead.may_see_whole_batch(run):
        return Given.WHOLE
    if not run.looks_at_first_batch or rows.first is not None:
        return Given.ROWS
    return Given.WHOLE if rows.make_showing is None else Given.SHOWN


class ShardedIterator:
    """The shards of batch after batch as values of the strategy.

    Args:
        data: what it iterates over.
        given: what the source gives.
        unread: the source, from which nothing was read.

    Attributes:
        data: what it iterates over.
        unread: the source, for those that do not read from it.
        has_rows: the source gives this worker's rows of each batch and the batch's number of rows, not whole batches.
        is_ahead: the source gives shards on their devices (`shards_ahead`).
    """

    def __init__(self, data: ShardedDataset, given: Given, unread: tf.data.Iterator | DeviceIterators):
        self.data, self.unread = data, unread
        self.has_rows, self.is_ahead = given in (Given.ROWS, Given.SHOWN), given is Given.AHEAD
        self._is_shown, self._shown = given is Given.SHOWN, None

    @property
    def source(self) -> tf.data.Iterator:
        """Iterator of whole batches, or of this worker's rows; compiled loops read and shard it themselves."""
        self._read_shown()
        return self.unread

    def first_batch(self) -> object:
        """The first batch, whole, for a comparison of workers; None if it is not known. Leaves out no batch."""
        if self.has_rows and self.data.worker_rows.first is not None:
            return self.data.worker_rows.first()
        self._read_shown()
        return self._shown

    def _read_shown(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._shown = _whole(self.unread)

    def __iter__(self):
        return self

    def __next__(self):
        if self.is_ahead:
            try:
                return shards_ahead.next_shards(self.data.strategy, self.unread)
            except tf.errors.OutOfRangeError:
                raise StopIteration from None
        return _compiled_shard(self.data, self.has_rows)(next(self.source))


def _whole(shown: tf.data.Iterator) -> object:
    """The whole batch that `WorkerRows.make_showing` adds, or None."""
    with on_host():
        part, total = next(shown, (None, 0))
        if not total:
            return None
        parts, rows = [part], int(worker_rows.common_rows([v for v in tf.nest.flatten(part) if v is not None]))
        parts += [next(shown)[0] for _ in range(1, -(-int(total) // rows))]
        return tf.nest.map_structure(lambda *each: worker_rows.first_rows(each, int(total)), *parts)


def source_of(iterator: object) -> tuple[Any, bool | None]:
    """What a compiled loop reads, and whether its shards tell their row ranges; None if the loop does not shard."""
    if isinstance(iterator, ShardedIterator):
        return iterator.source, None if iterator.is_ahead else iterator.data.gives_row_ranges
    return iterator, None


def is_ahead(iterator: object) -> bool:
    """Whether the loop reads shards that are on their devices."""
    return isinstance(iterator, ShardedIterator) and iterator.is_ahead


def has_rows(iterator: object) -> bool:
    """Whether the loop reads this worker's rows of each batch, with the batch's number of rows."""
    return isinstance(iterator, ShardedIterator) and iterator.has_rows


def spec_of(data: object) -> object:
    """The specs of a batch: of one in Python, or of those (or one replica's part of those) that an iterator gives."""
    iterator = data.data.dataset if isinstance(data, ShardedIterator) else data
    if not hasattr(iterator, "element_spec"):
        data = data.data if isinstance(data, ReplicaBatch) else data
        return tf.nest.map_structure(
            lambda v: None if v is None else distribute.replica_spec(tf.type_spec_from_value(v)), data
        )
    spec = iterator.element_spec
    return tf.nest.map_structure(distribute.replica_spec, spec.data if isinstance(spec, ReplicaBatch) else spec)


def next_batch(
    iterator: tf.data.Iterator | tf.distribute.DistributedIterator, device: str | None = None
) -> tuple[tf.Tensor, Callable]:
    """Whether an iterator has another batch (bool scalar), and a function that returns it, to call only if it has.

    Args:
        iterator: yields the batches.
        device: where it yields them, if that is not host memory.
    """
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return distribute.next_batch(iterator)
    where = functools.partial(tf.device, device) if device else on_host
    with where():  # `identity` has a device of its own, and `get_value` goes where the optional is
        batch = tf.nest.map_structure(tf.identity, iterator.get_next_as_optional(), expand_composites=True)

    def get_value():
        with where():
            return batch.get_value()

    return batch.has_value(), get_value


def _sharded(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool) -> ShardedDataset:
    """Kept with the dataset, because its sharding function takes some 30 ms to trace."""
    kept = vars(slots.of(dataset)).setdefault("sharded", {})
    key = strategy, gives_row_ranges
    if key not in kept:
        kept[key] = ShardedDataset(strategy, dataset, gives_row_ranges)
    return kept[key]


def _compiled_shard(data: ShardedDataset, has_rows: bool) -> Callable:
    """`shard` or `shard_rows` as a tf.function, kept with the strategy: one per dataset would be traced each `predict`.

    Data whose shapes differ in more than the number of rows gets another function: with `reduce_retracing`, a shared
    one could lose the rank.
    """

    def but_for_rows(spec):
        is_plain = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_plain else spec

    strategy, gives_row_ranges = data.strategy, data.gives_row_ranges
    kept = vars(slots.of(strategy)).setdefault("compiled_shards", {})
    rows = data.batch_rows if has_rows else None
    key = repr(tf.nest.map_structure(but_for_rows, data.dataset.element_spec)), gives_row_ranges, has_rows, rows
    if key not in kept:
        cut = functools.partial(shard_rows if has_rows else shard, strategy, gives_row_ranges=gives_row_ranges)
        kept[key] = nested_graphs.own(functools.partial(cut, rows=rows), reduce_retracing=True)
    return kept[key]


def _cut(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, gives_row_ranges: bool) -> Callable:
    """A tf.data function from a batch to the shards of this process's replicas, in order."""
    ranges = ranges_of(strategy)

    @tf.autograph.experimental.do_not_convert
    def cut(*batch):
        batch = batch if type(dataset.element_spec) is tuple else batch[0]  # as tf.data does: no namedtuple
        shards = [replica_batch(batch, at, ranges.count, stand_in=gives_row_ranges) for at in ranges.shards]
        return tuple(each if gives_row_ranges else each.data for each in shards)

    return cut

"""The global batch in pieces: one a replica, each with the place of its rows in the batch.

TensorFlow's own cut says nothing of the other replicas' pieces, so each step would need a collective to count rows. And
by default it shares out files, not batches, where it finds files: the rows that meet in a batch are then others than on
one device.
"""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, data_order, nested_functions, replication, step_blocks, step_context
from tfgpu.errors import InputError
from tfgpu.parallel import remote_devices


class Piece(NamedTuple):
    """What one replica gets of a batch.

    Attributes:
        data: its rows, in the batch's structure; where it has none, the batch's first row stands in.
        local: how many rows are its own, int32 scalar.
        offset: rows of the batch before its own, int32 scalar; 0 where it has none.
        total: rows of the whole batch, int32 scalar.
    """

    data: object
    local: tf.Tensor
    offset: tf.Tensor
    total: tf.Tensor


def cut_evenly() -> None:
    """Gives each replica its part of every batch, equal but for one row, and tells it where that part lies.

    Every worker makes the whole batch, as one device does, and keeps its parts. Where the data asks for another way of
    sharing out (`experimental_distribute.auto_shard_policy` FILE, HINT or OFF), TensorFlow's cut stays.
    """

    @wrap(keras_trainer.TFEpochIterator, "__init__")
    def init(stock, self, distribute_strategy=None, *args, **kwargs):
        if _is_one_cpu(distribute_strategy):
            stock(self, Whole(), *args, **kwargs)
            self._distribute_strategy = distribute_strategy
            return
        if not replication.is_replicated(distribute_strategy):
            return stock(self, distribute_strategy, *args, **kwargs)
        cutter = _Cutter(distribute_strategy)
        stock(self, cutter, *args, **kwargs)
        self._distribute_strategy = distribute_strategy
        if not cutter.was_asked and replication.spans_processes(
            distribute_strategy
        ):  # the user has distributed the data
            _agree(distribute_strategy, -1, same_length=False)

    # An epoch iterator that someone else makes gives the rows alone, as it does in stock Keras.
    for name in ("fit", "evaluate", "predict"):

        @wrap(keras_trainer.TensorFlowTrainer, name)
        def method(stock, self, *args, name=name, **kwargs):
            # XLA cannot drop a stand-in row.
            with step_context.scope(gives_row_ranges=name != "predict" or not self.jit_compile):
                return stock(self, *args, **kwargs)


def piece_of_batch(batch, at, count: int, *, stand_in: bool = True) -> Piece:
    """Piece number `at` of `count` of a batch: any structure of tensors, ragged and sparse ones too.

    A scalar, and a batch of nothing but scalars, goes whole to each. A piece without rows holds the batch's first one,
    which the step can bear as it bears any other; without `stand_in` it holds none.
    """
    values = [v for v in tf.nest.flatten(batch) if v is not None]
    batched = [v for v in values if v.shape.rank != 0]
    if not batched:
        return Piece(batch, tf.constant(1), tf.cast(at, tf.int32), tf.constant(count))
    static = {v.shape[0] for v in batched} - {None}
    if len(static) > 1:
        raise ValueError(f"The parts of a batch must have equally many rows. Received: {sorted(static)} rows.")
    total = static.pop() if static and all(v.shape[0] for v in batched) else _rows(batched[0])
    if not isinstance(total, int):
        same = [tf.debugging.assert_equal(_rows(v), total, _UNEQUAL) for v in batched[1:]]
        with tf.control_dependencies([check for check in same if check is not None]):
            total = tf.identity(total)
    elif total % count == 0:  # every piece has the same shape, which spares the step its care for empty ones
        rows, at = total // count, tf.cast(at, tf.int32)
        data = tf.nest.map_structure(lambda v: _part(v, at * rows, rows), batch)
        return Piece(data, tf.constant(rows), at * rows, tf.constant(total))
    at = tf.cast(at, tf.int32)
    rows, left = total // count, total % count
    start, rows = at * rows + tf.minimum(at, left), rows + tf.cast(at < left, tf.int32)
    offset = tf.where(rows > 0, start, 0)
    held = tf.minimum(tf.maximum(rows, 1), total) if stand_in else rows
    data = tf.nest.map_structure(lambda v: _part(v, offset if stand_in else start, held), batch)
    return Piece(data, rows, offset, tf.convert_to_tensor(total))


def _dealing(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, with_places: bool) -> Callable:
    """`deal` as a tf.function, which the strategy keeps: one of each data set's own would be traced at each `predict`.

    Data of other shapes, but for the number of rows, has another one: what `reduce_retracing` made of both could have
    no rank.
    """

    def but_for_rows(spec):
        is_plain = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if is_plain else spec

    kept = vars(strategy).setdefault("_tfgpu_dealing", {})
    key = repr(tf.nest.map_structure(but_for_rows, dataset.element_spec)), with_places
    if key not in kept:
        cut = functools.partial(deal, strategy, with_places=with_places)
        kept[key] = nested_functions.own(cut, reduce_retracing=True)
    return kept[key]


def rows_of(data) -> tf.Tensor:
    """Rows of a replica's data: the first dimension of its first tensor, or 1 where that is a scalar."""
    for value in tf.nest.flatten(data):
        if value is not None and value.shape.rank != 0:
            return tf.convert_to_tensor(_rows(value))
    return tf.constant(1)


def with_stand_in_row(value):
    """The tensor; in place of no rows a row of ones (zeros for whole numbers), which logarithms and norms can bear."""
    if not tf.is_tensor(value) or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) or value.shape.rank == 0:
        return value
    if value.shape[0]:
        return value

    def one():
        shape = tf.concat([[1], tf.shape(value)[1:]], 0)
        return tf.ones(shape, value.dtype) if value.dtype.is_floating else tf.zeros(shape, value.dtype)

    row = tf.cond(tf.shape(value)[0] > 0, lambda: value, one)  # passes the tensor on uncopied
    if value.shape[0] is None:
        row.set_shape(value.shape)
    return row


_UNEQUAL = "The parts of a batch must have equally many rows."


class _Cutter:
    """Stands where Keras asks a strategy to distribute its dataset."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self.was_asked = False

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset):
        self.was_asked = True
        policies = tf.data.experimental.AutoShardPolicy
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if replication.spans_processes(self._strategy):
            own_cut = policy in (policies.AUTO, policies.DATA)
            _agree(self._strategy, int(dataset.cardinality()), same_length=own_cut)
            if not own_cut:
                return self._strategy.experimental_distribute_dataset(dataset)
        with_places = step_context.current().gives_row_ranges
        if (
            _on_host(self._strategy) or remote_devices.connection() is not None
        ):  # TensorFlow's iterator stays in a process
            # Kept with the data set: what deals its batches out one by one takes some 30 ms to trace.
            kept = vars(dataset).setdefault("_tfgpu_dealt", {})
            key = self._strategy, with_places
            if key not in kept:
                kept[key] = Dealt(self._strategy, dataset, with_places)
            return kept[key]
        cut = _cut(self._strategy, dataset, with_places)

        def of_worker(worker: tf.distribute.InputContext) -> tf.data.Dataset:
            devices = len(self._strategy.extended.worker_devices)
            return dataset.map(cut).flat_map(_one_after_another).prefetch(devices)

        return self._strategy.distribute_datasets_from_function(of_worker)


class Whole:
    """Stands where Keras asks the strategy of one CPU to distribute a data set: there is nothing to distribute.

    TensorFlow's own iterator would ask at each step whether there is data: three times as long as a small model's step.
    """

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset


class Dealt:
    """A dataset whose batches this process deals to its replicas in pieces, where all of them compute on the CPU.

    One plain tf.data iterator gives whole batches, which the compiled step cuts itself: slices in its graph cost a
    tenth of a `map` in tf.data. TensorFlow's own iterator has one a device, asks all workers at every step whether they
    have data, and forgets the batch's size on workers.

    Args:
        strategy: whose replicas get the pieces.
        dataset: of whole batches, the same on every worker.
        with_places: whether a piece says where it lies in the batch.
    """

    def __init__(self, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, with_places: bool):
        self._strategy, self._dataset, self._with_places = strategy, dataset, with_places
        self._deal = _dealing(strategy, dataset, with_places)

    @functools.cached_property
    def element_spec(self):
        """What one replica gets of a batch. To find it takes some 30 ms, and only a model that is not built asks."""
        return self._dataset.map(_cut(self._strategy, self._dataset, self._with_places)).element_spec[0]

    def __iter__(self):
        return DealtIterator(iter(self._dataset), self._with_places, self._deal)


@dataclass
class DealtIterator:
    """The pieces of batch after batch as values of the strategy.

    Attributes:
        source: of whole batches; compiled steps read it, and deal, themselves.
        with_places: whether a piece says where it lies in the batch.
    """

    source: tf.data.Iterator
    with_places: bool
    _deal: Callable

    def __iter__(self):
        return self

    def __next__(self):
        return self._deal(next(self.source))


def deal(strategy: tf.distribute.Strategy, batch, *, with_places: bool = True):
    """Cuts a whole batch into values of the strategy: a `Piece` for each replica of this process, or its rows alone."""
    batch = tf.nest.map_structure(lambda v: v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v), batch)

    def piece(ctx):
        at = replication.shard_index(strategy, ctx.replica_id_in_sync_group)
        found = piece_of_batch(batch, at, ctx.num_replicas_in_sync, stand_in=with_places)
        return found if with_places else found.data

    return strategy.experimental_distribute_values_from_function(piece)


def _cut(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, with_places: bool) -> Callable:
    """The function for tf.data from a batch of `dataset` to the pieces of this process's replicas, in their order."""
    devices, count = len(strategy.extended.worker_devices), strategy.num_replicas_in_sync
    first = strategy.extended._id_in_cluster * devices if replication.spans_processes(strategy) else 0
    places = [replication.shard_index(strategy, first + device) for device in range(devices)]

    @tf.autograph.experimental.do_not_convert
    def cut(*batch):
        batch = batch if type(dataset.element_spec) is tuple else batch[0]  # as tf.data asks: no namedtuple
        pieces = [piece_of_batch(batch, at, count, stand_in=with_places) for at in places]
        return tuple(piece if with_places else piece.data for piece in pieces)

    return cut


def _one_after_another(*pieces) -> tf.data.Dataset:
    """The pieces of a batch as elements, one a device."""
    found = tf.data.Dataset.from_tensors(pieces[0])
    for piece in pieces[1:]:
        found = found.concatenate(tf.data.Dataset.from_tensors(piece))
    return found


def _agree(strategy: tf.distribute.Strategy, length: int, *, same_length: bool) -> None:
    """Tells the workers, who ask nobody later on, that all will run the same blocks of steps.

    Every worker makes the whole batch: a shorter data set would hang the others. So would a callback that only one
    worker has, and that wants to be called after every batch: if one does, all do.

    Raises:
        InputError: on all workers, where their data sets have different numbers of batches or are shuffled by
            different seeds, or some lack a callback that meets the others'.
    """
    run = step_blocks.current()
    asked = list(run.every_batch.values()) if run is not None else []
    on_all = run.on_all if run is not None else ()
    digest = zlib.crc32(repr(on_all).encode()) & 0xFFFFF  # whose square can be summed up
    seed = data_order.seed_mark()
    mine = [1, length, length * length, digest, digest * digest, seed, seed * seed, *map(int, asked)]
    count, total, squares, meeting, meeting_squares, seeds, seed_squares, *asking = collectives.sum_over_workers(
        strategy, mine
    )
    if meeting * meeting != count * meeting_squares:
        raise InputError(
            "A Checkpoint must be among the callbacks of every worker (only the chief writes), and so must SkipNaN. "
            f"This one has {', '.join(on_all) or 'none of them'}. Give `fit` the same callbacks on each worker."
        )
    if run is not None:
        run.every_batch = {kind: bool(number) for kind, number in zip(run.every_batch, asking, strict=True)}
    if same_length and total * total != count * squares:
        raise InputError(
            "The workers have data sets of different lengths; "
            f"this one's has {length if length >= 0 else 'unknown'} batches. Give each worker the whole data set; "
            "where each has data of its own, set `experimental_distribute.auto_shard_policy` in the data set's "
            "options to OFF."
        )
    if same_length and seeds * seeds != count * seed_squares:
        raise data_order.refuse_seeds(strategy)


def _is_one_cpu(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, tf.distribute.OneDeviceStrategy) and _on_host(strategy)


def _on_host(strategy: tf.distribute.Strategy) -> bool:
    return all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in strategy.extended.worker_devices)


def _rows(value):
    """Rows of a tensor: a number where that is known, else an int32 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0] if value.shape[0] is None else value.shape[0]


def _part(value, start, rows):
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

"""The global batch in pieces: one a replica, each with the place of its rows in the batch.

TensorFlow's own cut says nothing of the other replicas' pieces, so each step would need a collective to count rows. And
by default it shares out files, not batches, where it finds files: the rows that meet in a batch are then others than on
one device.
"""

import contextlib
import threading
from typing import NamedTuple

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgpu.keras_fixes import replica
from tfgpu.keras_fixes.seam import wrap

_here = threading.local()


class Piece(NamedTuple):
    """What one replica gets of a batch.

    Attributes:
        data: its rows, in the batch's structure.
        offset: rows of the batch before its own, int32 scalar; 0 where it has none.
        total: rows of the whole batch, int32 scalar.
    """

    data: object
    offset: tf.Tensor
    total: tf.Tensor


def cut_evenly() -> None:
    """Gives each replica its part of every batch, equal but for one row, and tells it where that part lies.

    Every worker makes the whole batch, as one device does, and keeps its parts. Where the data asks for another way of
    sharing out (`experimental_distribute.auto_shard_policy` FILE, HINT or OFF), TensorFlow's cut stays.
    """

    @wrap(keras_trainer.TFEpochIterator, "__init__")
    def init(stock, self, distribute_strategy=None, *args, **kwargs):
        if not replica.is_spread(distribute_strategy):
            return stock(self, distribute_strategy, *args, **kwargs)
        stock(self, _Cutter(distribute_strategy), *args, **kwargs)
        self._distribute_strategy = distribute_strategy

    # An epoch iterator that someone else makes gives the rows alone, as it does in stock Keras.
    for name, wanted in (("fit", True), ("evaluate", True), ("predict", False)):

        @wrap(keras_trainer.TensorFlowTrainer, name)
        def method(stock, self, *args, wanted=wanted, **kwargs):
            with places(wanted):
                return stock(self, *args, **kwargs)


@contextlib.contextmanager
def places(wanted: bool):
    """Whether the epoch iterators that are made inside tell each replica where its rows lie in the batch."""
    before, _here.places = getattr(_here, "places", False), wanted
    try:
        yield
    finally:
        _here.places = before


def piece_of_batch(batch, at, count: int) -> Piece:
    """Piece number `at` of `count` of a batch: any structure of tensors, ragged and sparse ones too.

    A scalar, and a batch of nothing but scalars, goes whole to each.
    """
    values = [v for v in tf.nest.flatten(batch) if v is not None]
    batched = [v for v in values if v.shape.rank != 0]
    if not batched:
        return Piece(batch, tf.cast(at, tf.int32), tf.constant(count))
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
        return Piece(tf.nest.map_structure(lambda v: _part(v, at * rows, rows), batch), at * rows, tf.constant(total))
    at = tf.cast(at, tf.int32)
    rows, left = total // count, total % count
    start, rows = at * rows + tf.minimum(at, left), rows + tf.cast(at < left, tf.int32)
    data = tf.nest.map_structure(lambda v: _part(v, start, rows), batch)
    return Piece(data, tf.where(rows > 0, start, 0), tf.convert_to_tensor(total))


def rows_of(data) -> tf.Tensor:
    """Rows of a replica's data: the first dimension of its first tensor, or 1 where that is a scalar."""
    for value in tf.nest.flatten(data):
        if value is not None and value.shape.rank != 0:
            return tf.convert_to_tensor(_rows(value))
    return tf.constant(1)


_UNEQUAL = "The parts of a batch must have equally many rows."


class _Cutter:
    """Stands where Keras asks a strategy to distribute its dataset."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset):
        policies = tf.data.experimental.AutoShardPolicy
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if policy not in (policies.AUTO, policies.DATA) and replica.spans_processes(self._strategy):
            return self._strategy.experimental_distribute_dataset(dataset)
        with_places = getattr(_here, "places", False)

        def of_worker(worker: tf.distribute.InputContext) -> tf.data.Dataset:
            devices = len(self._strategy.extended.worker_devices)
            count, first = self._strategy.num_replicas_in_sync, worker.input_pipeline_id * devices

            def cut(*batch):
                batch = batch if isinstance(dataset.element_spec, tuple) else batch[0]

                def piece(device):
                    at = replica.piece_of(self._strategy, first + tf.cast(device, tf.int32))
                    found = piece_of_batch(batch, at, count)
                    return found if with_places else found.data

                return tf.data.Dataset.range(devices).map(piece)

            return dataset.flat_map(cut).prefetch(devices)

        return self._strategy.distribute_datasets_from_function(of_worker)


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

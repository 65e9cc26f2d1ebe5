"""`strategy.experimental_distribute_dataset`: each worker makes its rows of each batch alone, of sparse tensors too.

TensorFlow lets every worker make whole batches, cuts each into one piece per replica and drops those of the other
workers. Where a dataset can be cut early, the pieces are made from the worker's own rows instead: the same pieces, also
of a smaller last batch. What is distributed stays TensorFlow's own `DistributedDataset`.
"""

import functools
import re

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrap
from tfgpu.core import replication, worker_rows
from tfgpu.core.batch_sharding import ranges_of
from tfgpu.core.feed import early_cut
from tfgpu.core.worker_rows import Ranges, WorkerRows

_POLICIES = tf.data.experimental.AutoShardPolicy
_READERS = re.compile(r"_?(ArrayRecord|FixedLengthRecord|RecordIO|SSTable|TextLine|TFRecord)Dataset(V\d)?")
"""Stages whose files TensorFlow deals to the workers under the policy AUTO."""


def make_own_rows() -> None:
    """Lets each worker make its own pieces of the data that a script distributes, and replicas have no sparse rows."""

    @wrap("tf.distribute.Strategy.experimental_distribute_dataset")
    def experimental_distribute_dataset(stock, self, dataset, options=None):
        distributed = stock(self, dataset, options)
        is_cut = tf.executing_eagerly() and replication.is_replicated(self)
        if not (is_cut and isinstance(dataset, tf.data.Dataset)):
            return distributed
        is_spread = replication.spans_processes(self) and distribute.num_workers(self) > 1
        is_sparse = any(isinstance(each, tf.SparseTensorSpec) for each in tf.nest.flatten(dataset.element_spec))
        if (is_spread and _is_cut_by_rows(dataset)) or (is_sparse and not is_spread):
            spec = distribute.pieces_of(distributed).element_spec
            made = sparse_pieces if is_sparse else own_pieces
            if (pieces := made(dataset, ranges_of(self), spec)) is not None:
                distribute.set_pieces(distributed, pieces)
        return distributed


def own_pieces(dataset: tf.data.Dataset, ranges: Ranges, spec: object) -> tf.data.Dataset | None:
    """One worker's pieces of each batch, one after another, as TensorFlow cuts them; None if it must make all rows.

    Args:
        dataset: of whole batches.
        ranges: the worker's.
        spec: of a piece.
    """
    if not all(isinstance(each, tf.TensorSpec) and each.shape.rank for each in tf.nest.flatten(spec)):
        return None
    ranges = Ranges(ranges.shards, ranges.count, is_even=False)
    found: WorkerRows | None = worker_rows.of(dataset) or early_cut.rows_of(dataset, ranges)
    if found is None:
        return None
    made = found.make(ranges).flat_map(functools.partial(_parted, ranges, spec))
    made = made.prefetch(len(ranges.shards)).with_options(dataset.options())
    return made if made.element_spec == spec else None


def sparse_pieces(dataset: tf.data.Dataset, ranges: Ranges, spec: object) -> tf.data.Dataset | None:
    """One worker's pieces of each batch with sparse tensors, as TensorFlow cuts them if there are enough rows.

    TensorFlow fails where a replica gets none: "Serialized sparse should have at least 1 serialized tensor".
    Arguments as for `own_pieces`.
    """
    if not all(isinstance(each, (tf.TensorSpec, tf.SparseTensorSpec)) for each in tf.nest.flatten(spec)):
        return None
    all_shards = Ranges(tuple(range(ranges.count)), ranges.count, is_even=False)

    @tf.autograph.experimental.do_not_convert
    def parted(*element):
        batch = element if isinstance(dataset.element_spec, tuple) else element[0]
        total = worker_rows.rows_in(tf.nest.flatten(batch)[0])
        places = all_shards.own(tf.convert_to_tensor(total))
        return _pieces([places[at] for at in ranges.shards], spec, batch)

    made = dataset.flat_map(parted).prefetch(len(ranges.shards)).with_options(dataset.options())
    return made if made.element_spec == spec else None


@tf.autograph.experimental.do_not_convert
def _parted(ranges: Ranges, spec: object, rows: object, total: tf.Tensor) -> tf.data.Dataset:
    return _pieces(ranges.own(total), spec, rows)


def _pieces(places: list[tuple], spec: object, rows: object) -> tf.data.Dataset:
    """Pieces of rows: of each, where it begins and its length."""
    starts, sizes = zip(*places, strict=True)

    @tf.autograph.experimental.do_not_convert
    def piece(start, size):
        def cut(value, each):
            found = worker_rows.sliced(value, start, size)
            if not isinstance(found, tf.SparseTensor):
                return tf.ensure_shape(found, each.shape)
            found.set_shape(each.shape)
            return found

        return tf.nest.map_structure(cut, rows, spec)

    return tf.data.Dataset.from_tensor_slices((list(starts), list(sizes))).map(piece)


def _is_cut_by_rows(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow shards the dataset by rows of its batches, not by files."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy == _POLICIES.DATA or (policy == _POLICIES.AUTO and not _reads_files(dataset))


def _reads_files(dataset: tf.data.Dataset) -> bool:
    found = [private.operations_of(each.function.graph) for each in private.functions_of(dataset)]
    kinds = {type(dataset).__name__}.union(*found)
    return any(map(_READERS.fullmatch, kinds)) or any(map(_reads_files, private.sources_of(dataset)))

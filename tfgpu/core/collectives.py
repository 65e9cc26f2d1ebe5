"""Sums over all replicas of a step, and over all workers outside of one."""

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.compat import tensorflow as private
from tfgpu.core import replication, step_context, traffic
from tfgpu.core.replication import replica_context, replica_number, shard_index, spans_processes
from tfgpu.errors import InputError

_PACKED_BYTES = 1 << 20
"""Slices of up to this size, on all replicas together, are summed in the pack of the dense gradients."""
_BASE = 1 << 12  # of the two digits of a row's index: each is exact in float32


def all_reduce(values: list, options: tf.distribute.experimental.CommunicationOptions | None = None) -> list:
    """Sums tensors or IndexedSlices over all replicas, outside XLA's clusters; None stays None."""
    present = [value for value in values if value is not None]
    with step_context.outside_xla():
        sums = _sum_on_host(present) if _shares_memory() else _sum_by_collectives(present, options)
    sums = iter(sums)
    return [None if value is None else next(sums) for value in values]


def sum_small(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums a few small tensors over all replicas: on the host where one process holds every replica."""
    if spans_processes(replica_context().strategy):
        return all_reduce(values)
    with step_context.outside_xla():
        return _sum_on_host(values)


def sum_over_workers(strategy: tf.distribute.Strategy, numbers) -> np.ndarray:
    """Adds up each process's whole numbers: an int64 vector, the same on all. Every worker must call it."""

    @tf.autograph.experimental.do_not_convert
    def mine(values):
        """Of several replicas in a process one gives them; the same tensor on all would be taken for one replica's."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return values * tf.cast(replica % len(strategy.extended.worker_devices) == 0, values.dtype)

    @tf.autograph.experimental.do_not_convert
    def total(values):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(mine, args=(values,)), axis=None)

    # One function per strategy: eager collectives make TensorFlow warn, and a new function would be traced each time.
    kept = slots.of(strategy)
    if not hasattr(kept, "sum_over_workers"):
        kept.sum_over_workers = tf.function(total, autograph=False, reduce_retracing=True)
    return kept.sum_over_workers(tf.convert_to_tensor(numbers, tf.int64)).numpy()


def at_own_place(value: tf.Tensor, at: int | tf.Tensor | None = None) -> tf.Tensor:
    """This replica's value at its place in a table of all replicas', with zeros elsewhere, so that a sum stacks them.

    The value is padded, not multiplied by 0 and 1: a GPU may round a matrix product to TF32, and NaN times 0 is NaN.

    Args:
        value: of the same shape on all replicas, and of known rank.
        at: its place, from 0; None is the number of the replica.

    Returns:
        A tensor [replicas, *value.shape].
    """
    context = replica_context()
    at, count = replica_number(context) if at is None else at, context.num_replicas_in_sync
    placed = tf.pad(value[None], [[at, count - 1 - at], *[[0, 0]] * value.shape.rank])
    return tf.ensure_shape(placed, [count, *value.shape])


def added(parts: list) -> tf.Tensor | tf.IndexedSlices:
    """The sum of tensors; of IndexedSlices, all their slices."""
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    values, indices = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def communication_options() -> tf.distribute.experimental.CommunicationOptions | None:
    """The strategy's own options for collectives: on workers TensorFlow forgets them where replicas ask for a sum."""
    return distribute.communication_options(replica_context().strategy)


def set_reduce_dtype(strategy: tf.distribute.Strategy, dtype: str) -> None:
    """Lets a strategy's gradients travel between replicas in a narrower dtype."""
    slots.of(strategy).reduce_dtype = tf.as_dtype(dtype)


def to_reduce_dtype(values: list) -> list:
    """Gradients (tensors, IndexedSlices or None) in the dtype in which they travel between replicas."""
    dtype = slots.get(replica_context().strategy, "reduce_dtype")
    return list(values) if dtype is None else [_cast(v, dtype) if _is_wider(v, dtype) else v for v in values]


def from_reduce_dtype(values: list, like: list) -> list:
    """Gradients that have travelled, each in the dtype of the value in `like` at its place."""
    return [v if v is None or v.dtype == w.dtype else _cast(v, w.dtype) for v, w in zip(values, like, strict=True)]


def _is_wider(value, dtype: tf.DType) -> bool:
    return value is not None and value.dtype.is_floating and value.dtype.size > dtype.size


def _cast(value, dtype: tf.DType):
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(value.values, dtype), value.indices, value.dense_shape)
    return tf.cast(value, dtype)


def _shares_memory() -> bool:
    """Whether all replicas compute on this process's CPUs, and nobody has chosen how they sum.

    A sum then needs no collective, which would copy everything into a pack and out of it.
    """
    strategy = replica_context().strategy
    if not isinstance(strategy, tf.distribute.MirroredStrategy) or not distribute.adds_by_default(strategy):
        return False
    if private.is_compiled_by_xla(tf.compat.v1.get_default_graph()):
        return False
    return replication.is_on_host(strategy)


def _sum_on_host(values: list) -> list:
    """Sums tensors, or joins IndexedSlices, of replicas in this process, on its CPU."""
    traffic.note(values)

    def add(strategy, *columns):
        with tf.device("CPU:0"):
            return [added(strategy.experimental_local_results(column)) for column in columns]

    with _explained_merge_call():
        return list(replica_context().merge_call(add, args=tuple(values)))


def _sum_by_collectives(values: list, options) -> list:
    """Sums tensors and IndexedSlices; small slices travel as two dense tensors, behind the others."""
    _note_varying_shapes(values)
    is_packed = [_can_be_packed(value) for value in values]
    whole = [value for value, packed in zip(values, is_packed, strict=True) if not packed]
    slices = [value for value, packed in zip(values, is_packed, strict=True) if packed]
    sent = whole + [part for each in slices for part in _pack(each)]
    traffic.note(sent)
    sums = _sum_by_dtype(sent, options)
    parts = sums[len(whole) :]
    unpacked = map(_unpack, parts[::2], parts[1::2], slices)
    whole = iter(sums[: len(whole)])
    return [next(unpacked if packed else whole) for packed in is_packed]


def _sum_by_dtype(values: list, options) -> list:
    """One call of TensorFlow's all-reduce for each dtype: values of one dtype make one pack."""
    sums = [None] * len(values)
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [at for at, value in enumerate(values) if value.dtype == dtype]
        with _explained_merge_call():
            found = replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, [values[at] for at in places], options or communication_options()
            )
        for at, value in zip(places, found, strict=True):
            sums[at] = value
    return sums


def _note_varying_shapes(values: list) -> None:
    """Tells the step that a collective has another shape in another step: such steps cannot share one call."""
    facts = step_context.step()
    if facts is not None:
        shapes = [(v.values if isinstance(v, tf.IndexedSlices) else v).shape for v in values]
        facts.has_varying_shapes |= not all(shape.is_fully_defined() for shape in shapes)


def _can_be_packed(value) -> bool:
    """Whether slices go into the pack of the dense gradients: TensorFlow gathers them in six collectives of their own.

    Every worker sends as many rows as all have together, so it pays for few. All must have equally many.
    """
    facts, replica = step_context.step(), replica_context()
    if not isinstance(value, tf.IndexedSlices) or facts is None or not spans_processes(replica.strategy):
        return False
    local, total = tf.get_static_value(facts.rows.local), tf.get_static_value(facts.rows.total)
    replicas, shape = replica.num_replicas_in_sync, value.values.shape
    is_even = local is not None and total is not None and local * replicas == total
    return is_even and shape.is_fully_defined() and replicas * shape.num_elements() * value.dtype.size <= _PACKED_BYTES


def _pack(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """This replica's rows and their indices at its place among those of all, with zeros elsewhere, to be summed."""
    replica = replica_context()
    at = shard_index(replica.strategy, replica_number(replica))
    rows, indices = slices.values, tf.ensure_shape(slices.indices, slices.values.shape[:1])
    digits = tf.stack([indices // _BASE, indices % _BASE], axis=1)
    return at_own_place(rows, at), at_own_place(tf.cast(digits, tf.float32), at)


def _unpack(rows: tf.Tensor, digits: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    high, low = tf.unstack(tf.cast(tf.reshape(digits, [-1, 2]), like.indices.dtype), axis=1)
    return tf.IndexedSlices(tf.reshape(rows, [-1, *like.values.shape[1:]]), high * _BASE + low, like.dense_shape)


@contextlib.contextmanager
def _explained_merge_call() -> Iterator[None]:
    """Says what to do where TensorFlow says that `merge_call` was called in another graph.

    Raises:
        InputError: the replicas were to communicate in a graph within the step's.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise InputError(
            "Replicas cannot communicate inside tf.cond, tf.while_loop or a tf.function with jit_compile=True, as Batch"
            "Normalization and `optimizer.apply` must. Move it out, or compute both sides and choose with tf.where."
        ) from error

"""Sums over all replicas in a step, and over all workers outside a step."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.compat import collective_order, device_groups, distribute, slots
from tfgpu.compat import tensorflow as private
from tfgpu.core import replication, step_context, traffic, travel
from tfgpu.core.replication import replica_context, replica_number, spans_processes
from tfgpu.core.sparse import exchange, index_origin, merging
from tfgpu.core.workers import ledger
from tfgpu.errors import InputError

PACK_BYTES = 32 << 20
"""Bytes in one collective between GPUs, so that the gradients that are computed first are sent first."""


def all_reduce(
    values: list, options: tf.distribute.experimental.CommunicationOptions | None = None, *, in_groups: bool = False
) -> list:
    """Sums tensors or IndexedSlices over all replicas, outside XLA's clusters; None stays None.

    Args:
        values: this replica's values, of any dtype; each sum has the dtype of its value.
        options: overrides the strategy's own options for these collectives.
        in_groups: sum values on the devices where they are, which in a spread model are not only the replicas' own.
    """
    present = [value for value in values if value is not None]
    if replica_context().num_replicas_in_sync > 1:
        with step_context.outside_xla():
            present = _sum_on_host(present) if _shares_memory() else _sum_by_collectives(present, options, in_groups)
        index_origin.mark(present, alike=True)
    sums = iter(present)
    return [None if value is None else next(sums) for value in values]


def sum_gradients(gradients: list) -> list:
    """Sums gradients (tensors, IndexedSlices or None) over all replicas; each is sent in the strategy's dtype.

    Slices of one index that one device has merged are merged (`sparse.merging`).
    """
    sent = travel.to_reduce_dtype(gradients)
    if replica_context().num_replicas_in_sync > 1:
        sent = merging.sum_merged(sent, functools.partial(all_reduce, in_groups=True))
    return travel.from_reduce_dtype(sent, gradients)


def packs_of(strategy: tf.distribute.Strategy, columns: Sequence[Sequence[tf.Tensor]]) -> list[list[int]]:
    """The positions of gradients that one collective sums, in the order in which a backward pass computes the packs.

    Args:
        strategy: in whose cross-replica context this is called.
        columns: for each gradient, its tensor on each replica of this process.
    """
    places = range(len(columns))
    if not isinstance(distribute.cross_device_ops(strategy), distribute.CollectiveAllReduce):
        return [list(places)]
    groups, most = _groups(strategy), communication_options(strategy).bytes_per_pack
    packs, open_packs = [], {}
    for at in reversed(places):  # the last layers' gradients are computed first
        value = columns[at][0]
        dtype, count = travel.dtype_sent(strategy, value), value.shape.num_elements()
        key = dtype, groups and groups.group_of(columns[at])
        pack, size = open_packs.get(key, (None, 0))
        if pack is None or 0 < most < size:
            pack, size = [], 0
            packs.append(pack)
        pack.insert(0, at)
        open_packs[key] = pack, size + (count or 0) * dtype.size
    return sorted(packs, key=min, reverse=True)


class CannotCommunicate(InputError):
    """Replicas tried to communicate in a graph inside the step's."""


def sum_columns(strategy: tf.distribute.Strategy, columns: Sequence[Sequence[tf.Tensor]]) -> list[Sequence[tf.Tensor]]:
    """Sums gradients over replicas, in cross-replica context; arguments as for `packs_of`.

    Returns:
        For each gradient, its sum on each replica of this process.
    """
    groups, options = _groups(strategy), communication_options(strategy)
    if groups is not None:
        return groups.sum(columns, options)
    values = [distribute.regroup(tuple(column)) for column in columns]
    sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(each, each) for each in values], options)
    return [strategy.experimental_local_results(each) for each in sums]


def sums_by_replica(
    strategy: tf.distribute.Strategy, columns: Sequence[Sequence[tf.Tensor]]
) -> list[device_groups.ReplicaSum]:
    """How each replica of this process sums a pack's gradients; empty if one operation sums those of all.

    Arguments as for `packs_of`, which made the pack. An eager collective would wait for those that are called after it.
    """
    if tf.executing_eagerly() or not distribute.sums_by_replica(strategy):
        return []
    return device_groups.sums_by_replica(strategy, columns[0], communication_options(strategy))


@contextlib.contextmanager
def as_packs() -> Iterator[None]:
    """A collective of the block runs as soon as what it sends is there; those made earlier may run after it."""
    replica = replica_context()
    if replica.num_replicas_in_sync == 1 or not distribute.can_gather(replica.strategy):
        yield
        return
    with collective_order.packs(replica.strategy, _number_in_process(replica)):
        yield


def sum_small(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums a few small tensors over all replicas: on the host if one process holds every replica."""
    replica = replica_context()
    if spans_processes(replica.strategy) or replica.num_replicas_in_sync == 1:
        return all_reduce(values)
    with step_context.outside_xla():
        found = _sum_on_host(values)
    index_origin.mark(found, alike=True)
    return found


def sum_over_workers(strategy: tf.distribute.Strategy, numbers) -> np.ndarray:
    """Adds up the processes' integers: an int64 vector, the same on all workers. Every worker must call it."""

    @tf.autograph.experimental.do_not_convert
    def mine(values):
        """One of a process's replicas contributes them; the same tensor on all would be taken for one replica's."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return values * tf.cast(replica % len(strategy.extended.worker_devices) == 0, values.dtype)

    @tf.autograph.experimental.do_not_convert
    def total(values):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(mine, args=(values,)), axis=None)

    # One function per strategy: eager collectives make TensorFlow warn, and a new function would be traced each time.
    kept = slots.of(strategy)
    if not hasattr(kept, "sum_over_workers"):
        kept.sum_over_workers = tf.function(total, autograph=False, reduce_retracing=True)
    with ledger.waiting():
        return kept.sum_over_workers(tf.convert_to_tensor(numbers, tf.int64)).numpy()


def added(parts: list) -> tf.Tensor | tf.IndexedSlices:
    """The sum of tensors; of IndexedSlices, all their slices."""
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    values, indices = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def communication_options(
    strategy: tf.distribute.Strategy, more: tf.distribute.experimental.CommunicationOptions | None = None
) -> tf.distribute.experimental.CommunicationOptions:
    """A strategy's options for its collectives, which TensorFlow drops when replicas on several workers request a sum.

    Args:
        strategy: a strategy of replicas.
        more: options that override its own.
    """
    own, pack = distribute.communication_options(strategy), slots.get(strategy, "bytes_per_pack")
    if pack is None:
        pack = own.bytes_per_pack or (0 if replication.is_on_host(strategy) else PACK_BYTES)
    own = own.merge(tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack))
    return own if more is None else own.merge(more)


def set_bytes_per_pack(strategy: tf.distribute.Strategy, count: int) -> None:
    """Makes a strategy's replicas sum their values in packs of about `count` bytes; 0 makes one pack of all."""
    slots.of(strategy).bytes_per_pack = count


def to_sum(value: tf.Tensor) -> tf.Tensor:
    """A tensor in the form in which replicas sum it: as `travel.to_sum`, except in the strategy's gradient dtype."""
    return value if value.dtype == slots.get(tf.distribute.get_strategy(), "reduce_dtype") else travel.to_sum(value)


def _from_sums(sums: Sequence, like: list) -> list:
    return [
        total if isinstance(total, tf.IndexedSlices) else travel.from_sum(total, value.dtype)
        for total, value in zip(sums, like, strict=True)
    ]


def _shares_memory() -> bool:
    """Whether all replicas compute on this process's CPUs, and no way of summing has been chosen.

    A sum then needs no collective, which would copy everything into a pack and back.
    """
    strategy = replica_context().strategy
    if not isinstance(strategy, tf.distribute.MirroredStrategy) or not distribute.uses_default_reduction(strategy):
        return False
    if private.is_compiled_by_xla(tf.compat.v1.get_default_graph()):
        return False
    return replication.is_on_host(strategy)


def _sum_on_host(values: list) -> list:
    """Sums tensors, or concatenates IndexedSlices, of replicas in this process, on its CPU."""
    sent = [value if isinstance(value, tf.IndexedSlices) else to_sum(value) for value in values]
    traffic.note(sent)

    def add(strategy, *columns):
        local = [strategy.experimental_local_results(column) for column in columns]
        packs, totals = travel.packs_to_host(local), []
        for pack in packs:
            parts = [travel.packed(list(values)) for values in zip(*(local[at] for at in pack), strict=True)]
            with tf.device("CPU:0"):
                totals.append(added(parts))
        return totals, packs

    with explained_merge_call():
        totals, packs = replica_context().merge_call(add, args=tuple(sent))
    sums = {}
    for pack, total in zip(packs, totals, strict=True):
        sums.update(travel.unpacked(total, sent, pack))
    return _from_sums([sums[at] for at in range(len(sent))], values)


_FORMS = ("dense", "few rows", "many rows")


def _sum_by_collectives(values: list, options, in_groups: bool) -> list:
    """Sums tensors and IndexedSlices; small slices are sent as two dense tensors, after the others."""
    _note_varying_shapes(values)
    forms = [_form(value) for value in values]
    dense, few, many = ([v for v, form in zip(values, forms, strict=True) if form == each] for each in _FORMS)
    sums = _sum_by_dtype(dense + [part for each in few for part in exchange.to_dense(each)], options, in_groups)
    parts = sums[len(dense) :]
    found = {
        "dense": iter(sums[: len(dense)]),
        "few rows": map(exchange.from_dense, parts[::2], parts[1::2], few),
        "many rows": iter(_sum_slices(many, options, in_groups)),
    }
    return [next(found[form]) for form in forms]


def _form(value) -> str:
    """How a value is sent: one of `_FORMS`."""
    if not isinstance(value, tf.IndexedSlices):
        return "dense"
    return "few rows" if exchange.can_be_packed(value) else "many rows"


def _sum_by_dtype(values: list[tf.Tensor], options, in_groups: bool) -> list[tf.Tensor]:
    """One call of TensorFlow's all-reduce for each dtype: values of one dtype share packs."""
    sent = [to_sum(value) for value in values]
    traffic.note(sent)
    if in_groups and _groups(replica_context().strategy) is not None:
        return _from_sums(_sum_in_groups(sent, options), values)
    sums = [None] * len(sent)
    for dtype in dict.fromkeys(value.dtype for value in sent):
        places = [at for at, value in enumerate(sent) if value.dtype == dtype]
        for at, value in zip(places, _all_reduce([sent[at] for at in places], options), strict=True):
            sums[at] = value
    return _from_sums(sums, values)


def _groups(strategy: tf.distribute.Strategy) -> device_groups.DeviceGroups | None:
    """The groups of devices that sum gradients; None if the replicas' own devices do."""
    return None if tf.executing_eagerly() else device_groups.of(strategy)


def _sum_in_groups(values: list[tf.Tensor], options) -> list[tf.Tensor]:
    replica = replica_context()
    options = communication_options(replica.strategy, options)

    def add(strategy, *columns):
        local = [strategy.experimental_local_results(column) for column in columns]
        return [distribute.regroup(tuple(sums)) for sums in device_groups.of(strategy).sum(local, options)]

    with explained_merge_call():
        return list(replica.merge_call(add, args=tuple(values)))


def _sum_slices(slices: list[tf.IndexedSlices], options, in_groups: bool) -> list[tf.IndexedSlices]:
    """All replicas' slices; if replicas cannot gather, TensorFlow's own way, a few collectives per table."""
    if not slices:
        return []
    strategy = replica_context().strategy
    if not distribute.can_gather(strategy):
        traffic.note(slices)
        return _all_reduce(slices, options)
    if in_groups and _groups(strategy) is not None:
        return _gather_in_groups(slices, options)
    return exchange.gather(slices, lambda value: all_gather(value, options))


def _gather_in_groups(slices: list[tf.IndexedSlices], options) -> list[tf.IndexedSlices]:
    """All replicas' slices of each table, where this replica's are."""
    replica, found, by_group = replica_context(), [None] * len(slices), {}

    def groups_of(strategy, *columns):
        return [device_groups.of(strategy).group_of(strategy.experimental_local_results(each)) for each in columns]

    with explained_merge_call():
        groups = replica.merge_call(groups_of, args=tuple(each.values for each in slices))
    for at, group in enumerate(groups):
        by_group.setdefault(group, []).append(at)
    for group, places in by_group.items():
        given = [slices[at] for at in places]
        with device_groups.of(replica.strategy).launcher(group, _number_in_process(replica)) as launcher:
            gathered = exchange.gather(given, functools.partial(all_gather, options=options, launcher=launcher))
        for at, each, own in zip(places, gathered, given, strict=True):
            found[at] = device_groups.moved_beside(each, own)
    return found


def _all_reduce(values: list, options) -> list:
    replica = replica_context()
    with explained_merge_call():
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, values, communication_options(replica.strategy, options))


def all_gather(
    value: tf.Tensor, options: tf.distribute.experimental.CommunicationOptions | None = None, launcher: object = None
) -> tf.Tensor:
    """The values of all replicas, [replicas, *value.shape], in a graph; in the order of TensorFlow's ranks.

    Args:
        value: has the same shape on all replicas, and at least 16 bits per number.
        options: as for `all_reduce`.
        launcher: of a group of devices (`device_groups`); None gathers on the replicas' own.
    """
    replica = replica_context()
    number = _number_in_process(replica)
    traffic.note([value])
    with step_context.outside_xla():
        bits = travel.to_carrier(value)[None]
        found = distribute.all_gather(bits, number, communication_options(replica.strategy, options), launcher)
        found = tf.ensure_shape(found, [replica.num_replicas_in_sync, *value.shape])
        found = tf.bitcast(found, value.dtype)
        index_origin.mark(found, alike=True)
        return found


def _number_in_process(replica: tf.distribute.ReplicaContext) -> int:
    return replica_number(replica) % len(replica.strategy.extended.worker_devices)


def _note_varying_shapes(values: list) -> None:
    """Tells the step that a collective's shape varies between steps: such steps cannot share one call."""
    facts = step_context.step()
    if facts is not None:
        shapes = [(v.values if isinstance(v, tf.IndexedSlices) else v).shape for v in values]
        facts.has_varying_shapes |= not all(shape.is_fully_defined() for shape in shapes)


@contextlib.contextmanager
def explained_merge_call() -> Iterator[None]:
    """Raises a clear error if TensorFlow says that `merge_call` was called in another graph.

    Raises:
        CannotCommunicate: the replicas tried to communicate in a graph inside the step's.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise CannotCommunicate(
            "Replicas cannot communicate inside tf.cond, tf.while_loop or a tf.function with jit_compile=True, but "
            "BatchNormalization and `optimizer.apply` need that. Move them out, or compute both sides and choose with "
            "tf.where."
        ) from error

"""Each replica gets the sum of its own row, or all replicas' rows: what a variable in pieces travels by.

In one process a replica reads what the others have made, on its own device. On several workers TensorFlow's collectives
do it: its reduce-scatter has no kernel for CPUs, so an all-to-all and a local sum stand for it, which sends as much.
"""

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.ops import collective_ops

from tfgpu.core import collectives, replication, step_context, traffic


def reduce_scatter(rows: tf.Tensor) -> tf.Tensor:
    """The sum over all replicas of the row of this one's number.

    Args:
        rows: [replicas, ...], of one static shape on all.
    """
    context = replication.replica_context()
    if context.num_replicas_in_sync == 1:
        return rows[0]
    traffic.note([rows])
    with step_context.outside_xla():
        if not replication.spans_processes(context.strategy):
            return context.merge_call(_sum_rows, args=(rows,))
        if tf.executing_eagerly():  # where raw collectives of several devices would wait for each other
            (total,) = context.all_reduce(tf.distribute.ReduceOp.SUM, [rows], collectives.communication_options())
            return total[replica_id()]
        return tf.reduce_sum(_collective(collective_ops.all_to_all_v2, rows), 0)


def all_gather(row: tf.Tensor, device: str) -> tf.Tensor:
    """The rows of all replicas, [replicas, ...], in their order.

    Args:
        row: this replica's, of one static shape on all.
        device: where this replica wants them.
    """
    context = replication.replica_context()
    if context.num_replicas_in_sync == 1:
        return row[None]
    traffic.note([row])
    with step_context.outside_xla():
        if not replication.spans_processes(context.strategy):
            with tf.device(device):
                place = tf.zeros([])  # tells where
            return context.merge_call(_stack_rows, args=(row, place))
        if tf.executing_eagerly():
            is_own = tf.range(context.num_replicas_in_sync) == replica_id()
            placed = tf.where(tf.reshape(is_own, [-1, *[1] * row.shape.rank]), row[None], tf.zeros([], row.dtype))
            (total,) = context.all_reduce(tf.distribute.ReduceOp.SUM, [placed], collectives.communication_options())
            return total
        with tf.device(device):
            found = _collective(collective_ops.all_gather_v2, tf.identity(row)[None])
            return tf.ensure_shape(found, [context.num_replicas_in_sync, *row.shape])


def replica_id():
    """This replica's number among all."""
    number = replication.replica_context().replica_id_in_sync_group
    known = tf.get_static_value(number)
    return number if known is None else int(known)


def _sum_rows(strategy, column):
    mine, found = strategy.experimental_local_results(column), []
    for at, own in enumerate(mine):
        rows = []
        for other in mine:
            with tf.device(other.device):  # so that only the row travels
                rows.append(other[at])
        with tf.device(own.device):
            found.append(tf.add_n(rows))
    return distribute_utils.regroup(tuple(found))


def _stack_rows(strategy, column, places):
    rows, found = strategy.experimental_local_results(column), []
    for place in strategy.experimental_local_results(places):
        with tf.device(place.device):
            found.append(tf.stack(rows))
    return distribute_utils.regroup(tuple(found))


def _collective(function, value: tf.Tensor) -> tf.Tensor:
    """One collective of TensorFlow's, in the order of all others of this replica's device."""
    strategy = replication.replica_context().strategy
    launchers = strategy.extended._cross_device_ops._launchers
    launcher = launchers[replica_id() % len(launchers)]
    options = launcher._options.merge(collectives.communication_options())
    with tf.device(launcher._device):
        return function(
            value,
            launcher._group_size,
            launcher._group_key,
            launcher._next_instance_key(),
            communication_hint=options.implementation.value,
            timeout=options.timeout_seconds,
            ordering_token=launcher._get_ordering_token(),
        )

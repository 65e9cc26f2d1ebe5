"""Reduce-scatter and all-gather among replicas.

In one process, a replica reads what the others have computed, on its own device. On several workers, TensorFlow's
collectives are used. TensorFlow has no reduce-scatter for CPUs, so it is an all-to-all and a local sum, which sends as
much.
"""

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import collectives, replication, step_context, traffic


def reduce_scatter(rows: tf.Tensor) -> tf.Tensor:
    """The sum over all replicas of one row: the row with this replica's number.

    Args:
        rows: [replicas, ...], of the same static shape on all replicas.
    """
    context = replication.replica_context()
    if context.num_replicas_in_sync == 1:
        return rows[0]
    traffic.note([rows])
    with step_context.outside_xla():
        if not replication.spans_processes(context.strategy):
            return context.merge_call(_sum_rows, args=(rows,))
        if tf.executing_eagerly():  # raw collectives of several devices would deadlock
            (total,) = context.all_reduce(tf.distribute.ReduceOp.SUM, [rows], collectives.communication_options())
            return total[replica_id()]
        return tf.reduce_sum(distribute.all_to_all(rows, _local_replica(), collectives.communication_options()), 0)


def all_gather(row: tf.Tensor, device: str) -> tf.Tensor:
    """The rows of all replicas, [replicas, ...], in their order.

    Args:
        row: this replica's, of the same static shape on all replicas.
        device: the device on which this replica needs them.
    """
    context = replication.replica_context()
    if context.num_replicas_in_sync == 1:
        return row[None]
    traffic.note([row])
    with step_context.outside_xla():
        if not replication.spans_processes(context.strategy):
            with tf.device(device):
                place = tf.zeros([])  # its device says where
            return context.merge_call(_stack_rows, args=(row, place))
        if tf.executing_eagerly():
            placed = collectives.at_own_place(row)
            (total,) = context.all_reduce(tf.distribute.ReduceOp.SUM, [placed], collectives.communication_options())
            return total
        with tf.device(device):
            found = distribute.all_gather(tf.identity(row)[None], _local_replica(), collectives.communication_options())
            return tf.ensure_shape(found, [context.num_replicas_in_sync, *row.shape])


def replica_id() -> int | tf.Tensor:
    """This replica's number among all."""
    return replication.replica_number(replication.replica_context())


def _sum_rows(strategy, column):
    local, found = strategy.experimental_local_results(column), []
    for at, own in enumerate(local):
        rows = []
        for other in local:
            with tf.device(other.device):  # so that only the row is sent
                rows.append(other[at])
        with tf.device(own.device):
            found.append(tf.add_n(rows))
    return distribute.regroup(tuple(found))


def _stack_rows(strategy, column, places):
    rows, found = strategy.experimental_local_results(column), []
    for place in strategy.experimental_local_results(places):
        with tf.device(place.device):
            found.append(tf.stack(rows))
    return distribute.regroup(tuple(found))


def _local_replica() -> int:
    """This replica's number in its process."""
    return replica_id() % len(replication.replica_context().strategy.extended.worker_devices)

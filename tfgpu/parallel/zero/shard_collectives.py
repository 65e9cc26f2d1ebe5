"""Reduce-scatter, all-gather and all-to-all among replicas.

In one process, a replica reads what the others have computed, on its own device. On several workers, TensorFlow's
collectives are used. It has a reduce-scatter only for NCCL, and an all-to-all that is right for all but NCCL; without
NCCL the sum is an all-to-all and a local sum, which sends as much.

TensorFlow ranks the replicas of a group by the names of their tasks, as text ("task:10" before "task:2"), and within a
task by the links between its GPUs. `learn_ranks` asks once which replica has which rank.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.core import collectives, replication, step_context, traffic, travel


def learn_ranks(strategy: tf.distribute.Strategy) -> None:
    """Learns which replica TensorFlow gives which rank. Every worker must call it, outside the strategy's replicas."""
    if not replication.spans_processes(strategy) or slots.get(strategy, "replicas_by_rank") is not None:
        return

    @tf.function(autograph=False)
    def gather():
        return strategy.run(lambda: collectives.all_gather(tf.constant(replica_id(), tf.int64)))

    found = strategy.experimental_local_results(gather())[0].numpy()
    slots.of(strategy).replicas_by_rank = [int(number) for number in found]


def reduce_scatter(rows: tf.Tensor) -> tf.Tensor:
    """The sum over all replicas of one row: the row with this replica's number.

    Args:
        rows: [replicas, ...], of the same static shape on all replicas.
    """
    strategy = replication.replica_context().strategy
    if strategy.num_replicas_in_sync == 1:
        return rows[0]
    dtype, rows = rows.dtype, collectives.to_sum(rows)
    with step_context.outside_xla():
        if not replication.spans_processes(strategy):
            total = _between_devices(rows, rows, lambda rows, at: rows[at], tf.add_n)
        elif tf.executing_eagerly():  # raw collectives of several devices would deadlock
            total = collectives.all_reduce([rows])[0][replica_id()]
        else:
            traffic.note([rows])
            options, rows = collectives.communication_options(strategy), in_order(rows, _replicas_by_rank(strategy))
            if distribute.asks_for_nccl(strategy) and not replication.is_on_host(strategy):
                total = distribute.reduce_scatter(rows, _local_replica(), options)
            else:
                total = tf.reduce_sum(distribute.all_to_all(rows, _local_replica(), options), 0)
        return tf.cast(total, dtype)


def all_gather(row: tf.Tensor, device: str) -> tf.Tensor:
    """The rows of all replicas, [replicas, ...], in their order.

    Args:
        row: this replica's, of the same static shape on all replicas.
        device: the device on which this replica needs them.
    """
    strategy = replication.replica_context().strategy
    if strategy.num_replicas_in_sync == 1:
        return row[None]
    with step_context.outside_xla():
        if not replication.spans_processes(strategy):
            return _between_devices(row, _place_on(device), lambda row, at: row, tf.stack)
        if tf.executing_eagerly():
            return collectives.all_reduce([travel.at_own_place(row)])[0]
        with tf.device(device):
            found = collectives.all_gather(tf.identity(row))
            return in_order(found, np.argsort(_replicas_by_rank(strategy)))


def all_to_all(rows: tf.Tensor, device: str) -> tf.Tensor:
    """The rows that all replicas have for this one, [replicas, ...], in their order.

    Args:
        rows: this replica's rows for each, [replicas, ...], of the same static shape on all replicas.
        device: the device on which this replica needs them.
    """
    strategy = replication.replica_context().strategy
    if strategy.num_replicas_in_sync == 1:
        return rows
    with step_context.outside_xla():
        if not replication.spans_processes(strategy):
            return _between_devices(rows, _place_on(device), lambda rows, at: rows[at], tf.stack)
        if tf.executing_eagerly():
            return collectives.all_reduce([travel.at_own_place(rows)])[0][:, replica_id()]
        with tf.device(device):
            ranks = _replicas_by_rank(strategy)
            if distribute.asks_for_nccl(strategy) and not replication.is_on_host(strategy):
                return in_order(collectives.all_gather(rows), np.argsort(ranks))[:, replica_id()]
            traffic.note([rows])
            options, bits = collectives.communication_options(strategy), travel.to_carrier(in_order(rows, ranks))
            found = distribute.all_to_all(bits, _local_replica(), options)
            return in_order(tf.bitcast(tf.ensure_shape(found, bits.shape), rows.dtype), np.argsort(ranks))


def in_order(rows: tf.Tensor, order: list[int] | np.ndarray) -> tf.Tensor:
    """The rows in an order."""
    return rows if np.array_equal(order, range(len(order))) else tf.gather(rows, order)


def replica_id() -> int | tf.Tensor:
    """This replica's number among all."""
    return replication.replica_number(replication.replica_context())


def _replicas_by_rank(strategy: tf.distribute.Strategy) -> list[int]:
    return slots.of(strategy).replicas_by_rank


def _place_on(device: str) -> tf.Tensor:
    """A tensor whose device says where a result is needed."""
    with tf.device(device):
        return tf.zeros([])


def _between_devices(value: tf.Tensor, place: tf.Tensor, piece: Callable, combine: Callable) -> tf.Tensor:
    """What this replica makes of a piece of every replica's value, where all replicas are in this process.

    Args:
        value: this replica's.
        place: a tensor on the device where this replica needs the result.
        piece: `(value, replica)` -> what that replica gets of a value; runs where the value is, and only that is sent.
        combine: makes the result of the pieces.
    """

    def exchange(strategy, column, places):
        values, found = strategy.experimental_local_results(column), []
        for at, place in enumerate(strategy.experimental_local_results(places)):
            pieces = []
            for value in values:
                with tf.device(value.device):
                    pieces.append(piece(value, at))
            with tf.device(place.device):
                found.append(combine(pieces))
        return distribute.regroup(tuple(found))

    traffic.note([value])
    return replication.replica_context().merge_call(exchange, args=(value, place))


def _local_replica() -> int:
    """This replica's number in its process."""
    return replica_id() % len(replication.replica_context().strategy.extended.worker_devices)

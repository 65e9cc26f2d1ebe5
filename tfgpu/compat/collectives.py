"""A two-level all-reduce: within each process, then between processes."""

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.values import Mirrored


class TwoLevelAllReduce(CollectiveAllReduce):
    """Sums within each process on its first device, then between those of all processes, and copies the sum back.

    With D devices in each of W processes, a flat ring of D W members takes 2 (D W - 1) sequential sends; this one takes
    2 (W - 1), and only one device of each process uses the network.

    Args:
        strategy: a strategy of several processes with several devices each.
    """

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy):
        extended = strategy.extended
        devices, options, keys = extended.worker_devices, extended._communication_options, extended._collective_keys
        super().__init__(devices, len(devices) * extended._num_workers, options, keys)
        self._between = CollectiveAllReduce(devices[:1], extended._num_workers, options, keys)

    def _all_reduce(self, reduce_op, value, replica_id, options):
        def meet(strategy, *columns):
            return self._all_reduce_per_replica_values(reduce_op, columns, options)

        if tf.distribute.in_cross_replica_context():
            return super()._all_reduce(reduce_op, value, replica_id, options)
        met = tf.distribute.get_replica_context().merge_call(meet, args=tuple(tf.nest.flatten(value)))
        return tf.nest.pack_sequence_as(value, met)

    def _all_reduce_per_replica_values(self, reduce_op, per_replica_values, options):
        with tf.device(self._devices[0]):
            mine = [added(value.values) for value in per_replica_values]
        # All collectives of a device run in one order: NCCL deadlocks if two groups run in different orders.
        self._between._launchers[0]._ordering_token = self._launchers[0]._ordering_token
        with self._lock:
            found = self._between._all_reduce(tf.distribute.ReduceOp.SUM, mine, 0, options)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            found = [_divided(value, self._group_size) for value in found]
        copies = [[_copied(value, device) for device in self._devices] for value in found]
        return [distribute_utils.regroup(each, wrap_class=Mirrored) for each in copies]


def added(parts) -> tf.Tensor | tf.IndexedSlices:
    """The sum of replicas' tensors; for IndexedSlices, their concatenation."""
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    rows, numbers = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(rows, numbers, parts[0].dense_shape)


def _copied(value, device: str):
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _divided(value, count: int):
    if not isinstance(value, tf.IndexedSlices):
        return value / count
    return tf.IndexedSlices(value.values / count, value.indices, value.dense_shape)

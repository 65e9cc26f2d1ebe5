"""TensorFlow's collectives: each strategy of a process gets keys of its own."""

import itertools

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.values import Mirrored

from tfgpu.compat.patch import wrap
from tfgpu.core import step_context

KEYS_A_STRATEGY = 100_000
"""TensorFlow's own tests leave this many keys between two strategies."""


def give_each_strategy_its_own_keys() -> None:
    """Numbers the collectives of a process's second strategy on from the first's.

    TensorFlow names a collective by a group key and an instance key, and never forgets one. Every new strategy starts
    at the same numbers, so a second MirroredStrategy meets the first one's leftovers: "Shape mismatch in the collective
    instance", a wrong sum, or the death of the process. Notebooks, tests and searches make many strategies.
    """
    for cls in (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy):
        numbers = itertools.count(1)  # 0 is what a strategy has that was made before this

        @wrap(cls, "__init__")
        def init(stock, self, *args, numbers=numbers, **kwargs):
            self._collective_key_base = KEYS_A_STRATEGY * next(numbers)
            stock(self, *args, **kwargs)


class _TwoLevels(CollectiveAllReduce):
    """Adds up within each process, on its first device, then between those of all processes, and copies the sum back.

    With D devices in each of W processes a flat ring of D W members sends 2 (D W - 1) times one after the other; this
    one 2 (W - 1) times, and only one device of each process takes part in the network.

    Args:
        extended: of a MultiWorkerMirroredStrategy.
    """

    def __init__(self, extended):
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
            mine = [step_context.added(value.values) for value in per_replica_values]
        with self._lock:
            found = self._between._all_reduce(tf.distribute.ReduceOp.SUM, mine, 0, options)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            found = [_divided(value, self._group_size) for value in found]
        copies = [[_copied(value, device) for device in self._devices] for value in found]
        return [distribute_utils.regroup(each, wrap_class=Mirrored) for each in copies]


def add_within_first(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Lets a strategy of several processes, each with several devices, sum in two levels."""
    if step_context.spans_processes(strategy) and len(strategy.extended.worker_devices) > 1:
        strategy.extended._cross_device_ops = _TwoLevels(strategy.extended)


def _copied(value, device: str):
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _divided(value, count: int):
    if not isinstance(value, tf.IndexedSlices):
        return value / count
    return tf.IndexedSlices(value.values / count, value.indices, value.dense_shape)

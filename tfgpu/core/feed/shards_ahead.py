"""Shards of batches that are copied to the GPUs of one process ahead of the steps (`read_ahead` says why).

tf.data slices each batch, and TensorFlow's iterator over several devices deals the shards to the replicas. The numbers
of a shard's rows travel as the shape of an empty tensor: the host knows a shape without waiting for its GPU.
"""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat.device_iterators import Dealer, DeviceIterators, iterators_of
from tfgpu.core import batch_sharding, extensions, replication, step_blocks
from tfgpu.core.batch_sharding import ReplicaBatch
from tfgpu.core.feed import read_ahead
from tfgpu.core.row_mixing.trials import step_trial


def can_read_ahead(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> bool:
    """Whether the shards of the running `fit` or `evaluate` can be: its step sees its replica's rows alone.

    A model over several devices a replica cuts its int32 inputs further, which GPUs do on the host.
    """
    run = step_blocks.current()
    if run is None or run.looks_at_first_batch or replication.spans_processes(strategy):
        return False
    if may_see_whole_batch(run):
        return False
    is_spread = any(prevents(run.model) for prevents in extensions.xla_obstacles)
    if is_spread and read_ahead.has_int32(tf.nest.flatten(dataset.element_spec)):
        return False
    return read_ahead.can_read_ahead(strategy, dataset)


def may_see_whole_batch(run: step_blocks.Run) -> bool:
    """Whether the step of a run sees the whole batch, or was not tried yet and is the user's own."""
    function = getattr(run.model, f"{run.kind}_function", None)
    known = getattr(function, "sees_whole_batch", None)
    return step_trial.has_own_step(run.model, run.kind) if known is None else known


def shards(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset of the shards of one batch after another, each with the empty tensor that tells its rows."""
    ranges = batch_sharding.ranges_of(strategy)

    @tf.autograph.experimental.do_not_convert
    def cut(*batch):
        batch = batch if type(dataset.element_spec) is tuple else batch[0]
        found = [batch_sharding.replica_batch(batch, at, ranges.count) for at in ranges.shards]
        first, *others = (tf.data.Dataset.from_tensors((each.data, _told(each))) for each in found)
        for other in others:
            first = first.concatenate(other)
        return first

    return dataset.flat_map(cut)


def _told(shard: ReplicaBatch) -> tf.Tensor:
    # 0 first: TensorFlow multiplies the dimensions, and those of a few million rows would be too many.
    return tf.zeros([0, shard.local, shard.offset, shard.total], tf.uint8)


def dealer(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> Dealer:
    """Makes iterators that deal the `shards` of a dataset to the devices of the strategy's replicas."""
    return Dealer(shards(strategy, dataset), strategy.extended.worker_devices, read_ahead.BATCHES)


def next_shards(strategy: tf.distribute.Strategy, source: DeviceIterators, rows: int | None = None):
    """The next batch as a distributed value of `ReplicaBatch`.

    Args:
        strategy: of the replicas.
        source: from `dealer`.
        rows: of the whole batch, if known although the shapes do not say it; the replicas share them evenly.
    """
    (device, first), *others = iterators_of(source)
    with tf.device(device):
        found = [first.get_next()]
    # A batch that fails is one error, which the first device gets. The next may get the end of the data instead, and
    # the loop would take that for the reason.
    with tf.control_dependencies([] if tf.executing_eagerly() else [found[0][1]]):
        for device, each in others:
            with tf.device(device):
                found.append(each.get_next())
    return _distributed(strategy, source, found, rows)


def next_shards_if_any(
    strategy: tf.distribute.Strategy, source: DeviceIterators, rows: int | None = None
) -> tuple[tf.Tensor, Callable]:
    """Whether there is another batch (bool scalar), and a function that returns it, to call only if there is."""
    optionals = []
    for device, each in iterators_of(source):
        with tf.device(device):
            optionals.append((device, each.get_next_as_optional()))
    with batch_sharding.on_host():  # all or none: every batch has a shard for each replica
        has_value = tf.reduce_all(tf.stack([each.has_value() for _, each in optionals]))

    def get_value():
        found = []
        for device, each in optionals:
            with tf.device(device):
                found.append(each.get_value())
        return _distributed(strategy, source, found, rows)

    return has_value, get_value


def _distributed(strategy: tf.distribute.Strategy, source: DeviceIterators, found: list, rows: int | None):
    local = None if rows is None else rows // strategy.num_replicas_in_sync
    values, places = [], batch_sharding.ranges_of(strategy).shards
    for (device, _), given, at in zip(iterators_of(source), found, places, strict=True):
        with tf.device(device):
            values.append(_shard(*given, at, local, rows))
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def _shard(data, told: tf.Tensor, at: int, local: int | None, total: int | None) -> ReplicaBatch:
    if told.shape.is_fully_defined():  # eager, or a single replica
        return ReplicaBatch(data, *(tf.constant(number) for number in told.shape[1:]))
    if local is not None:
        ranged = [0, local, at * local, total]
        tf.debugging.assert_equal(tf.shape(told), ranged, "A batch has other rows than a full one.")
    elif None in (told.shape[1], told.shape[3]):
        numbers = tf.shape(told)
        return ReplicaBatch(data, numbers[1], numbers[2], numbers[3])
    else:  # Shards of several shapes have no static one.
        local, total = told.shape[1], told.shape[3]
    for value in tf.nest.flatten(data):
        if value is not None and value.shape.rank:
            value.set_shape([local, *value.shape[1:]])  # `ensure_shape` takes int32 from a GPU to the host and back
    return ReplicaBatch(data, tf.constant(local), tf.constant(at * local), tf.constant(total))

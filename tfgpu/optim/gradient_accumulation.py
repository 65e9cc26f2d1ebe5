"""Gradient accumulation on replicas: each adds up its own gradients, and the sums are reduced once in k batches."""

import functools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfgpu.compat import distribute, optimizers, variables
from tfgpu.compat.keras import LossScaleOptimizer, Variable, name_scope
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, extensions, gradient_weights, gradients, replication, step_context, traffic, travel
from tfgpu.core.state.sharded_variable import set_shard_info, shard_info
from tfgpu.core.workers import ledger
from tfgpu.errors import MachineError

SAVE_TIMEOUT_S = 300.0
"""How long a worker that saves waits for the others to save as well."""
_NAME_CHARACTERS = str.maketrans("/:", "__")


def accumulate_on_each_replica() -> None:
    """Gives each replica its own accumulators; outside replicas, an accumulator reads as the sum over replicas.

    So a checkpoint between two updates holds what one device's holds, and loads on any number of replicas. On several
    workers such a read is a collective, in which every worker must take part, except right after an update.
    """

    @wrap("TFOptimizer.add_variable_from_reference")
    def add_variable_from_reference(stock, self, reference_variable, name=None, initializer="zeros"):
        info = shard_info(reference_variable)
        if (
            name != "gradient_accumulator"
            or not replication.is_replicated(optimizers.strategy_of(self))
            or (info is not None and info.sharding.over_replicas)
            or optimizers.overwrites(self, reference_variable)
        ):
            return stock(self, reference_variable, name=name, initializer=initializer)
        accumulator = _add_accumulator(self, reference_variable, name)
        if info is not None:
            set_shard_info(accumulator, info.slot(name))
        return accumulator


def _add_accumulator(optimizer, variable, name: str) -> Variable:
    beside = getattr(variable, "value", variable)
    with optimizers.strategy_of(optimizer).extended.colocate_vars_with(beside):  # on the devices of its layer
        accumulator = Variable(
            initializer="zeros",
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            aggregation="sum",
            synchronization="on_read",
            name=f"{getattr(variable, 'path', variable.name)}_{name}".translate(_NAME_CHARACTERS),
        )
    variables.set_cross_replica_read(accumulator.value, functools.partial(_total, optimizer, accumulator.value))
    optimizers.track(optimizer, accumulator)
    return accumulator


def _total(optimizer, accumulator) -> tf.Tensor:
    """The sum of an accumulator over replicas, read outside the replicas."""
    strategy = accumulator.distribute_strategy
    if not (replication.spans_processes(strategy) and tf.executing_eagerly()):
        return variables.cross_replica_value(accumulator)
    if int(optimizers.iterations(optimizer).numpy()) % optimizer.gradient_accumulation_steps == 0:
        return tf.zeros(accumulator.shape, accumulator.dtype)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=SAVE_TIMEOUT_S)
    try:
        own = distribute.regroup(tuple(travel.to_sum(tf.convert_to_tensor(copy)) for copy in accumulator.values))
        with ledger.waiting():
            total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, own, "/device:CPU:0", options)
    except tf.errors.DeadlineExceededError:
        raise MachineError(
            "Accumulated gradients are held by all workers, but the other workers did not save within "
            f"{SAVE_TIMEOUT_S} s. Let every worker call `save` (only the chief writes), or save right after an update."
        ) from None
    return travel.from_sum(strategy.experimental_local_results(total)[0], accumulator.dtype)


class GradientAccumulation(gradients.GradientExtension):
    """Sums the gradients over replicas only in the batches that end with an update."""

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        if not update.inner.gradient_accumulation_steps or not parts:
            return None
        return reduce_at_update(update, parts)


extensions.gradient_extensions.register(GradientAccumulation(), order=40)


def reduce_at_update(update: gradients.Update, parts: list) -> list:
    """At an update, the gradients of all replicas and batches; before it, this replica's gradients unchanged.

    With loss scaling one more number is summed in every batch: if one replica overflows, all skip the batch.

    Args:
        update: the call of the optimizer.
        parts: this replica's gradients: tensors, IndexedSlices or None.
    """
    optimizer, inner = update.optimizer, update.inner
    if not inner.built:
        with name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(update.variables))
    places = [at for at, gradient in enumerate(parts) if gradient is not None]
    if not places:
        return list(parts)
    own = [tf.convert_to_tensor(parts[at]) for at in places]
    accumulators = [optimizers.accumulator(inner, update.variables[at]) for at in places]
    is_scaled = isinstance(optimizer, LossScaleOptimizer)
    reduction = _Reduction(inner, accumulators, gradient_weights.loss_scale_of(optimizer), empties=not is_scaled)
    traffic.note(travel.to_reduce_dtype(own), part=1 / inner.gradient_accumulation_steps)
    with step_context.outside_xla():
        reduced = list(replication.replica_context().merge_call(reduction.across_replicas, args=tuple(own)))
        if is_scaled:  # after the packs, which wait for no other gradients than their own
            is_finite = _is_finite_on_all(own)
            reduction.empty_if(is_finite)
            reduced[0] += tf.where(is_finite, tf.zeros([], reduced[0].dtype), float("inf"))  # makes every replica skip
    found = list(parts)
    for at, value in zip(places, reduced, strict=True):
        found[at] = value
    return found


def _is_finite_on_all(values: list[tf.Tensor]) -> tf.Tensor:
    """Whether all numbers are finite on all replicas."""
    bad = tf.reduce_any(tf.stack([tf.reduce_any(~tf.math.is_finite(value)) for value in values]))
    (count,) = collectives.sum_small([tf.cast(bad, tf.float32)])
    return count < 0.5


class _Reduction:
    """Sums the accumulated gradients of an optimizer over replicas, if it is about to update.

    Args:
        inner: the optimizer, without loss scaling.
        accumulators: its accumulators, one for each gradient.
        loss_scale: by which the gradients of this batch are scaled; accumulators are not.
        empties: whether an update empties the accumulators, whatever the gradients are.
    """

    def __init__(self, inner, accumulators: list, loss_scale, *, empties: bool):
        self._inner, self._accumulators, self._loss_scale, self._empties = inner, accumulators, loss_scale, empties

    def across_replicas(self, strategy, *gradients) -> list:
        """In cross-replica context, where a branch of `tf.cond` may contain a collective.

        Each pack has a condition of its own: one for all would wait for all gradients. So has each replica, on the
        device that sums its gradients: TensorFlow puts what a condition for several devices returns on the first GPU.
        """
        columns, found = _by_replica(strategy, gradients), [None] * len(gradients)
        is_update = self._is_update()
        for places in collectives.packs_of(strategy, columns):
            pack = [columns[at] for at in places]
            if parts := collectives.sums_by_replica(strategy, pack):
                sums = self._sums_if(is_update, places, pack, parts)
            else:
                sums = tf.cond(
                    is_update, functools.partial(self._sum, strategy, places, pack), functools.partial(list, pack)
                )
            for at, values in zip(places, sums, strict=True):
                found[at] = distribute.regroup(tuple(values))
        return found

    def empty_if(self, is_finite: tf.Tensor) -> None:
        """In a replica: empties its accumulators at an update with finite gradients."""

        def empty() -> int:
            _empty(self._accumulators)
            return 0

        tf.cond(is_finite & self._is_update(), empty, lambda: 0)

    def _is_update(self) -> tf.Tensor:
        return (optimizers.iterations(self._inner).value + 1) % self._inner.gradient_accumulation_steps == 0

    def _sums_if(self, is_update: tf.Tensor, places: list[int], pack: list, parts: list) -> Iterator[tuple]:
        """The sums of a pack's gradients at an update, before it the gradients, each where the gradient is.

        Args:
            is_update: whether this batch ends with an update.
            places: the pack's, among all gradients.
            pack: for each gradient, its tensor on each replica.
            parts: as from `collectives.sums_by_replica`.
        """
        by_replica = []
        for number, part in enumerate(parts):
            own = [column[number] for column in pack]

            def total(number=number, part=part, own=own) -> list[tf.Tensor]:
                found = part.sum(self._taken(number, places, own))
                return [_in_place(each, value.dtype) for each, value in zip(found, own, strict=True)]

            with distribute.on_device(part.device):
                sums = tf.cond(is_update, total, functools.partial(list, own))
            by_replica.append([distribute.moved(each, value.device) for each, value in zip(sums, own, strict=True)])
        return zip(*by_replica, strict=True)

    def _sum(self, strategy, places: list[int], pack: list) -> list[list[tf.Tensor]]:
        """The sums where one operation sums the values of all replicas; arguments as for `_sums_if`."""
        by_replica = [self._taken(number, places, own) for number, own in enumerate(zip(*pack, strict=True))]
        pairs = zip(collectives.sum_columns(strategy, list(zip(*by_replica, strict=True))), pack, strict=True)
        return [[_in_place(total, column[0].dtype) for total in sums] for sums, column in pairs]

    def _taken(self, number: int, places: list[int], own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """A replica's gradients of all batches, scaled as those of this batch are, in the form in which they travel."""
        totals, taken = _by_replica(tf.distribute.get_strategy(), [self._accumulators[at].value for at in places]), []
        accumulators = [column[number] for column in totals]
        for value, total in zip(own, accumulators, strict=True):
            with tf.device(value.device):
                taken.append(value + total * tf.cast(self._loss_scale, value.dtype))
        if self._empties:
            with tf.control_dependencies(taken):
                _empty(accumulators)
        return [_sent(value) for value in taken]


def _sent(value: tf.Tensor) -> tf.Tensor:
    """A gradient in the form in which replicas sum it, on the device where it is."""
    with tf.device(value.device):
        (narrow,) = travel.to_reduce_dtype([value])
        return collectives.to_sum(narrow)


def _empty(accumulators: list) -> None:
    for total in accumulators:
        total.assign(tf.zeros(total.shape, total.dtype))


def _by_replica(strategy, values) -> list[list[tf.Tensor]]:
    """For each distributed value, its tensor on each replica of this process; TensorFlow keeps one that all share."""
    found, count = [], len(strategy.extended.worker_devices)
    for value in values:
        own = strategy.experimental_local_results(value)
        found.append(list(own) if len(own) == count else [*own] * count)
    return found


def _in_place(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A value in another dtype, on the device where it is."""
    if value.dtype == dtype:
        return value
    with tf.device(value.device):
        return tf.cast(value, dtype)

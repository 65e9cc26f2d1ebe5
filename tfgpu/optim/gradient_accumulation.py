"""Gradient accumulation under replicas: each adds up its own gradients, and they meet once in k batches."""

import functools

import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from tensorflow.python.distribute import distribute_utils

from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, extensions, gradient_weights, gradients, replication, step_context, traffic
from tfgpu.core.sharded_variable import set_shard_info, shard_info
from tfgpu.errors import MachineError

PATIENCE_S = 300.0
"""How long one worker waits for the others to save as well."""
_PLAIN = str.maketrans("/:", "__")


def accumulate_on_each_replica() -> None:
    """Keeps each replica's own sum of gradients; read from outside, an accumulator is the sum over replicas.

    So a checkpoint between two updates holds what one device's holds, and loads on any number of replicas. On several
    workers that read is a collective, in which every worker must take part; right after an update there is nothing to
    ask the others for.
    """

    @wrap(TFOptimizer, "add_variable_from_reference")
    def add_variable_from_reference(stock, self, reference_variable, name=None, initializer="zeros"):
        spread = replication.is_replicated(self._distribution_strategy)
        part = shard_info(reference_variable)
        if part is not None and part.sharding.over_replicas:
            return stock(self, reference_variable, name=name, initializer=initializer)
        if not spread or name != "gradient_accumulator" or self._overwrite_variable_with_gradient(reference_variable):
            return stock(self, reference_variable, name=name, initializer=initializer)
        beside = getattr(reference_variable, "value", reference_variable)
        with self._distribution_strategy.extended.colocate_vars_with(beside):  # where the layer is at home
            variable = backend.Variable(
                initializer="zeros",
                shape=reference_variable.shape,
                dtype=reference_variable.dtype,
                trainable=False,
                aggregation="sum",
                synchronization="on_read",
                name=f"{getattr(reference_variable, 'path', reference_variable.name)}_{name}".translate(_PLAIN),
            )
        variable.value._get_cross_replica = functools.partial(_total, self, variable.value)
        if part is not None:
            set_shard_info(variable, part.slot(name))
        self._track_variable(variable)
        return variable


def _total(optimizer, accumulator) -> tf.Tensor:
    """The sum over replicas of what waits for the next update, read from outside the replicas."""
    strategy = accumulator.distribute_strategy
    if not (replication.spans_processes(strategy) and tf.executing_eagerly()):
        return type(accumulator)._get_cross_replica(accumulator)
    if int(optimizer._iterations.numpy()) % optimizer.gradient_accumulation_steps == 0:
        return tf.zeros(accumulator.shape, accumulator.dtype)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=PATIENCE_S)
    try:
        total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, accumulator, "/device:CPU:0", options)
    except tf.errors.DeadlineExceededError:
        raise MachineError(
            "Gradients that wait for the next update lie on all workers, but the others did not save within "
            f"{PATIENCE_S} s. Let every worker call `save` (only the chief writes), or save right after an update."
        ) from None
    return strategy.experimental_local_results(total)[0]


class _Accumulation(gradients.GradientExtension):
    def sum(self, update: gradients.Update, parts: list) -> list | None:
        if not update.inner.gradient_accumulation_steps or not parts:
            return None
        return meet_at_update(update.optimizer, update.inner, parts, update.variables)


extensions.gradient_extensions.register(_Accumulation(), order=40)


def meet_at_update(optimizer, inner, grads: list, variables: list) -> list:
    """What the optimizer is to apply: the sum over replicas and batches at an update, else this replica's part.

    The condition stands between the replicas, where a collective may stand inside it. Float16 needs one more number to
    meet in every batch: an overflow on any replica must skip the batch on all.
    """
    if not inner.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    places = [at for at, gradient in enumerate(grads) if gradient is not None]
    if not places:
        return list(grads)
    parts = [tf.convert_to_tensor(grads[at]) for at in places]
    sums = [inner._accumulated_gradients[inner._get_variable_index(variables[at])] for at in places]
    scale, is_finite = gradient_weights.loss_scale_of(optimizer), tf.constant(True)
    if isinstance(optimizer, LossScaleOptimizer):
        bad = [tf.reduce_any(~tf.math.is_finite(part)) for part in parts]
        (count,) = collectives.sum_small([tf.cast(tf.reduce_any(tf.stack(bad)), tf.float32)])
        is_finite = count < 0.5

    def take(*parts):
        """This replica's sum of all batches, as scaled as the last gradients are; the sums begin anew."""
        taken = [part + total.value * tf.cast(scale, part.dtype) for part, total in zip(parts, sums, strict=True)]
        with tf.control_dependencies(taken):
            for total in sums:
                total.assign(tf.zeros(total.shape, total.dtype))
        return collectives.to_reduce_dtype(taken)

    def across(strategy, is_finite, *parts):
        is_update = (inner._iterations.value + 1) % inner.gradient_accumulation_steps == 0
        is_finite = strategy.experimental_local_results(is_finite)[0]

        def meet():
            own = strategy.extended.call_for_each_replica(take, args=parts)
            met = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(o, o) for o in own])
            dtypes = [own[0].dtype for own in on_each(parts)]
            return [[_in_place(v, dtype) for v in values] for values, dtype in zip(on_each(met), dtypes, strict=True)]

        def on_each(values):
            return [list(strategy.experimental_local_results(value)) for value in values]

        met = tf.cond(is_finite & is_update, meet, lambda: on_each(parts))
        return [distribute_utils.regroup(value) for value in met]

    traffic.note(collectives.to_reduce_dtype(parts), part=1 / inner.gradient_accumulation_steps)
    with step_context.outside_xla():
        met = replication.replica_context().merge_call(across, args=(is_finite, *parts))
        met[0] += tf.where(is_finite, tf.zeros([], met[0].dtype), float("inf"))  # what one saw, all skip
    out = list(grads)
    for at, value in zip(places, met, strict=True):
        out[at] = value
    return out


def _in_place(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A value in another dtype, on the device where it is."""
    if value.dtype == dtype:
        return value
    with tf.device(value.device):
        return tf.cast(value, dtype)

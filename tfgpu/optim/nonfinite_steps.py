"""Skips steps that produce NaN or Inf: training continues as if without their batches."""

from collections.abc import Callable

import tensorflow as tf

from tfgpu.core import collectives, replication, step_blocks, step_context
from tfgpu.core.state import layer_state, training_state
from tfgpu.errors import InputError


class Guard:
    """Undoes steps in which a weight, a state of the optimizer or a metric becomes NaN or infinite.

    It restores everything that the step changed: weights, moving averages, the optimizer and its iterations,
    accumulated gradients, the loss scale, metrics and random draws. Each step costs a copy of them, a check of each
    number, and one small sum over replicas.

    Args:
        model: the compiled and built model.
    """

    def __init__(self, model):
        self._model = model
        with model.distribute_strategy.scope():  # all replicas count the same
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.NONE)
        self._taken = 0

    def take(self) -> int:
        """The number of steps skipped since the last call."""
        count = int(self._count.numpy())
        found, self._taken = count - self._taken, count
        return found

    def run(self, step: Callable, data):
        """Runs a step on this replica's data, and undoes it on all replicas if it is bad on one; returns its logs."""
        variables = training_state.changed_by_a_step(self._model)
        with step_context.outside_xla():
            before = [tf.identity(layer_state.own(variable)) for variable in variables]
        logs = step(data)
        with step_context.outside_xla():
            is_bad = [_is_new(value, layer_state.own(v)) for v, value in zip(variables, before, strict=True)]
            bad = tf.cast(tf.reduce_any(tf.stack([found for found in is_bad if found is not None])), tf.float32)
            if replication.replica_context() is not None and replication.replica_context().num_replicas_in_sync > 1:
                (bad,) = collectives.sum_small([bad])

            def undo():
                for variable, value in zip(variables, before, strict=True):
                    layer_state.put_own(variable, value)
                self._count.assign_add(1)
                return 0

            tf.cond(bad > 0.5, undo, lambda: 0)
        return logs


def begin(model) -> Guard:
    """Guards the steps of the running `fit`, which is calling `on_train_begin`, until it ends.

    Raises:
        InputError: Keras is not repaired, or the steps of this strategy or model cannot be undone.
    """
    run = step_blocks.current()
    if run is None:
        raise InputError(
            "SkipNaN needs the Keras repairs before `fit` begins. Create `tfgpu.strategy()`, or call "
            "`tfgpu.repair_keras()`, before `fit`."
        )
    strategy = model.distribute_strategy
    is_together = (
        not isinstance(strategy, tf.distribute.ParameterServerStrategy)
        and replication.local_training_of(strategy) is None
    )
    if not is_together or not hasattr(model.train_function, "loops"):
        raise InputError(
            "SkipNaN needs synchronous training: one device, `mirrored` or `multi_worker`. Use StopOnNaN here."
        )
    for name, optimizer in training_state.other_optimizers(model).items():
        if not optimizer.built:
            name = name.removeprefix("optimizer.")
            raise InputError(f"SkipNaN needs the state of `{name}`. Call `model.{name}.build(variables)` before `fit`.")
    loops = model.train_function.loops
    run.step_wrapper = loops.step_wrapper = loops.step_wrapper or Guard(model)
    return run.step_wrapper


def _is_new(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor | None:
    """Whether a number that was finite no longer is; None for integers."""
    if not before.dtype.is_floating:
        return None
    return tf.reduce_any(tf.math.is_finite(before) & ~tf.math.is_finite(tf.convert_to_tensor(after)))

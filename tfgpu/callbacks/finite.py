"""What to do when a loss becomes NaN: end the training before it is saved, or skip such steps."""

import logging
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfgpu.checkpoint import data_position
from tfgpu.core import collectives, replication, step_blocks, step_context
from tfgpu.core.state import layer_state, training_state
from tfgpu.errors import InputError, whole_number


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
            pairs = [(v, value) for v, value in zip(variables, before, strict=True) if value.dtype.is_floating]
            is_bad = [
                tf.reduce_any(tf.math.is_finite(value) & ~tf.math.is_finite(tf.convert_to_tensor(layer_state.own(v))))
                for v, value in pairs
            ]
            bad = tf.cast(tf.reduce_any(tf.stack(is_bad)), tf.float32)
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
    is_apart = replication.local_training_of(strategy) is not None
    is_apart = is_apart or isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if is_apart or not hasattr(model.train_function, "loops"):
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


_log = logging.getLogger(__name__)


class StopOnNaN(keras.callbacks.Callback):
    """Ends `fit` with an error if the loss is NaN or infinite; Keras's `TerminateOnNaN` ends it without one.

    It checks at the end of each block: the loss in the logs is the mean of the epoch, in which a NaN stays. So it does
    not shorten blocks, and at most one block of steps is lost. A `Checkpoint` saves after all callbacks have run, so
    its newest checkpoint is from before. `TerminateOnNaN` checks every batch, which shortens blocks to one step.

    To skip bad steps instead, use `SkipNaN`.

    Raises:
        InputError: by `fit`, when the loss is not finite: starting again would give the same result.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = keras.ops.ones((2, 1))
        >>> model.fit(x, x * float("nan"), verbose=0, callbacks=[StopOnNaN()])
        Traceback (most recent call last):
        ...
        tfgpu.errors.InputError: The loss became nan in epoch 1, step 1. ...
    """

    every_batch = False

    def __init__(self):
        super().__init__()
        self._epoch = self._first = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._first = epoch, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        loss = float((logs or {}).get("loss", 0.0))
        if not math.isfinite(loss):
            raise InputError(
                f"The loss became {loss} in epoch {self._epoch + 1}, {_steps(self._first, batch)}. Lower the learning "
                "rate, set `global_clipnorm=1.0` in the optimizer, or use SkipNaN, which skips such steps."
            )
        self._first = batch + 1


class SkipNaN(keras.callbacks.Callback):
    """Skips steps that produce NaN or Inf, as if their batches were not in the data, and logs a warning.

    If a weight, a state of the optimizer, a moving average or a metric becomes non-finite on one replica, the step is
    undone on all of them. Weights, optimizer, iterations, metrics and random draws are then those of a training without
    that batch. Each step costs a copy of them and a check of each number, and on several workers one more small sum.
    Float16 overflows, which loss scaling handles, do not count: a step that the loss scale skips counts only if it
    damages a metric or a layer's state.

    Not undone: values in the logs that your own train step computes without a metric, a plain `tf.Variable` of a layer,
    and draws of `keras.random` without a seed generator of the layer. On several workers, every worker needs it.

    Args:
        limit: how many steps may be skipped in the whole training; one more ends it. A `Checkpoint` keeps the count
            (Keras's BackupAndRestore does not).

    Attributes:
        skipped: steps skipped so far.

    Raises:
        InputError: by `fit`: more than `limit` steps or all steps of an epoch are bad, or the replicas of the strategy
            train independently.

    Example:
        >>> import tfgpu
        >>> names = tfgpu.repair_keras()  # `tfgpu.strategy()` does so too
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = keras.ops.convert_to_tensor([[1.0], [float("nan")], [2.0]])
        >>> bad = SkipNaN(limit=1)
        >>> history = model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[bad])
        >>> bad.skipped, math.isfinite(history.history["loss"][0])
        (1, True)
    """

    every_batch = False
    on_all_workers = True

    def __init__(self, limit: int = 10):
        super().__init__()
        self.limit: int = whole_number("limit", limit, minimum=0)
        self.skipped: int = 0
        self._epoch = self._first = self._before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        data_position.build(self.model)
        self._guard = begin(self.model)
        self._guard.take()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._first, self._before = epoch, 0, self.skipped

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        found = self._guard.take()
        if found:
            self.skipped += found
            where = f"{_steps(self._first, batch)} of epoch {self._epoch + 1}"
            if self.skipped > self.limit:
                raise InputError(
                    f"{self.skipped} steps produced NaN or Inf, the last of them in {where}; SkipNaN skips "
                    f"at most limit={self.limit}. Check the data, lower the learning rate, set `global_clipnorm=1.0` "
                    "in the optimizer, or raise the limit."
                )
            _log.warning(
                "Skipped %d step(s), in %s: NaN or Inf. %d of at most %d so far.",
                *(found, where, self.skipped, self.limit),
            )
        self._first = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._first and self.skipped - self._before == self._first:
            raise InputError(
                f"All {self._first} steps of epoch {epoch + 1} produced NaN or Inf, so there is no loss to report. "
                "Check the data, lower the learning rate, or set `global_clipnorm=1.0` in the optimizer."
            )


def _steps(first: int, last: int) -> str:
    return f"step {last + 1}" if last <= first else f"steps {first + 1} to {last + 1}"

"""Replicas that train apart: each updates its own copy of the weights, and the copies are averaged now and then.

`StepRunner` runs such steps and calls `Averager` in the compiled loop: after `every` updates one all-reduce brings the
weights together, each replica's weighed by the rows that it has learned from since. Optimizer states stay each
replica's own, as in post-local SGD and DiLoCo, until somebody outside reads: at an epoch's end, before `evaluate`,
`predict`, `get_weights` and a save, `settle` averages weights and states, so that what is read or saved is one model.

With `every=1` the replicas meet after each update anyway, so the forward pass meets too (BatchNormalization's moments,
divisors of masks): with SGD the result is one device's. Else the forward pass sees a replica's own rows; layers that
mix the rows of a batch (MixUp, circle loss), and whole numbers or sums that a layer assigns, still meet in each step.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.saving import saving_lib
from keras.src.trainers.trainer import Trainer

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.core import (
    collectives,
    extensions,
    gradients,
    layer_state,
    nested_functions,
    replication,
    step_context,
    traffic,
    training_state,
)
from tfgpu.errors import InputError, MachineError

_log = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""How long one worker waits for the others where it reads the model between two averagings."""


@dataclass(frozen=True)
class Plan:
    """How replicas train apart.

    Attributes:
        every: updates between two averagings, from 1.
        after: updates of synchronous training first.
        outer: makes the optimizer that applies the change of the average since the last one; None takes the average.
    """

    every: int
    after: int = 0
    outer: Callable[[], keras.optimizers.Optimizer] | None = None

    def averager(self, model: keras.Model) -> "Averager":
        """What averages the replicas of a model."""
        return Averager(model, self)


class _LocalUpdates(gradients.GradientExtension):
    """Each replica applies the gradients of its own rows."""

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        facts = step_context.step()
        if facts is None and replication.local_training_of(replication.replica_context().strategy) is not None:
            raise InputError(
                "`averaging` needs `model.fit`, `Trainer` or `train_on_batch`: a hand-written `strategy.run` loop "
                "would apply what no replica averages. Use one of them, or `multi_worker` or `mirrored`."
            )
        if not step_context.has_local_updates():
            return None
        facts.applied_optimizers[id(update.optimizer)] = update.optimizer
        return list(parts)


extensions.gradient_extensions.register(_LocalUpdates(), order=10)


def average_in(strategy: tf.distribute.Strategy, plan: Plan) -> tf.distribute.Strategy:
    """Lets the replicas of a strategy train apart, and returns the strategy."""
    slots.of(strategy).local_training = plan
    _settle_before_reading()
    return strategy


def averager_of(model) -> "Averager | None":
    """What averages a model's replicas, once it has begun to train."""
    return getattr(getattr(model, "train_function", None), "averager", None)


def settle(model) -> None:
    """Averages weights and optimizer states where replicas have trained apart since the last averaging.

    On several workers it is a collective then, in which every worker must take part.

    Raises:
        MachineError: the other workers did not come within `PATIENCE_S`.
    """
    averager = averager_of(model)
    if averager is not None and averager.since and replication.replica_context() is None:
        averager.settle()


class AveragingState(training_state.StateProvider):
    """Averages the replicas before a checkpoint reads them, and saves the outer optimizer's variables as `outer`."""

    def settle(self, model) -> None:
        settle(model)

    def variables(self, model) -> dict:
        averager = averager_of(model)
        if averager is None or averager.outer is None:
            return {}
        return training_state.name_group("outer", averager.outer.variables)


training_state.register(AveragingState())


class Averager:
    """Averages the replicas of one model.

    Args:
        model: the compiled model.
        plan: how.

    Attributes:
        since: batches since the last averaging.
        rounds: averagings so far.
        sent: by whether optimizer states are in it, what a replica sends in one averaging.
        outer: the outer optimizer, or None.

    Raises:
        InputError: `outer` or `after` with a model that has no optimizer of its own, or is not built.
    """

    def __init__(self, model, plan: Plan):
        self._model, self._plan, self._strategy = model, plan, model.distribute_strategy
        self._inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._batches = getattr(self._inner, "gradient_accumulation_steps", None) or 1  # of an update
        self.since = self.rounds = self.sent_bytes = 0
        self.outer, self.sent = None, {}
        self._anchors = ()
        self._optimizers, self._assigned = {}, {}
        self._settle = nested_functions.own(self._settled)
        if self._inner is None and (plan.after or plan.outer):
            raise InputError("`after` and `outer` need the model's own optimizer. Give `model.compile` one.")
        with tf.init_scope(), self._strategy.scope():
            self._rows = _own_variable([])
            if plan.outer is not None:
                self._make_outer()

    def _make_outer(self) -> None:
        if not self._inner.built:
            raise InputError("`outer` needs a model that is built before it trains. Give it a keras.Input.")
        self.outer = self._plan.outer()
        self.outer.build(self._inner._trainable_variables)
        gradients.count_on_every_replica(self.outer)
        self._anchors = [_own_variable(v.shape, v.dtype) for v in self._inner._trainable_variables]

    @property
    def has_local_forward(self) -> bool:
        """Whether replicas that train apart do not meet in the forward pass either."""
        return self._plan.every > 1

    def left(self) -> float:
        """Batches of synchronous training that are left; infinite where replicas train apart."""
        if not self._plan.after or self.since or self.rounds:
            return float("inf")
        left = self._plan.after * self._batches - int(self._inner._iterations.numpy())
        return left if left > 0 else float("inf")

    def is_local(self) -> bool:
        """Whether the replicas train apart in the next batch."""
        return self.left() == float("inf")

    def note(self, facts: step_context.Step) -> None:
        """Takes in, within a replica, what a step that was traced updates."""
        self._rows.assign_add(tf.cast(facts.rows.local, tf.float32))
        self._optimizers.update(facts.applied_optimizers)
        if facts.local_forward:
            own = {id(v) for metric in self._model.metrics for v in metric.variables}
            self._assigned.update({key: v for key, v in facts.assigned_variables.items() if key not in own})

    def begin(self, since: tf.Tensor) -> None:
        """Before a step, outside the replicas: keeps the weights that the outer optimizer starts from."""
        if not self._anchors:
            return

        def keep():
            for anchor, variable in zip(self._anchors, self._inner._trainable_variables, strict=True):
                anchor.assign(variable.value)
            return tf.constant(0)

        tf.cond(since == 0, lambda: self._on_each(keep), lambda: tf.constant(0))

    def follow(self, since: tf.Tensor) -> tf.Tensor:
        """After a step, outside the replicas: averages where it is time. Returns the batches since the last time."""
        is_time = since + 1 >= self._plan.every * self._batches
        average = functools.partial(self._average, is_whole=False)
        tf.cond(is_time, lambda: self._on_each(average), lambda: tf.constant(0))
        return tf.where(is_time, 0, since + 1)

    @contextlib.contextmanager
    def running(self):
        """Around steps apart: where they fail in the middle, it is not known how many have run."""
        try:
            yield
        except BaseException:
            self.since = max(self.since, 1)
            raise

    def count(self, steps: int) -> None:
        """Takes in that so many steps apart have run."""
        period = self._plan.every * self._batches
        rounds, self.since = divmod(self.since + steps, period)
        self._count_rounds(rounds, is_whole=False)

    def settle(self) -> None:
        """As the function of this name, whatever has been trained."""
        try:
            self._settle()
        except tf.errors.DeadlineExceededError:
            raise MachineError(
                f"The weights lie on all workers since the last averaging, but the others did not come within "
                f"{PATIENCE_S} s. Let every worker read or save the model, or do it at an epoch's end."
            ) from None
        self.since = 0
        self._count_rounds(1, is_whole=True)
        _log.info("Averaged %d times so far; each replica sent %.1f MB for it.", self.rounds, self.sent_bytes / 1e6)

    def _count_rounds(self, rounds: int, *, is_whole: bool) -> None:
        self.rounds += rounds
        if rounds:
            self.sent_bytes += rounds * self.sent[is_whole].bytes

    def _settled(self) -> tf.Tensor:
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=PATIENCE_S)
        return self._on_each(functools.partial(self._average, is_whole=True, options=options))

    def _on_each(self, function: Callable[[], tf.Tensor]) -> tf.Tensor:
        function = tf.autograph.experimental.do_not_convert(function)
        return self._strategy.experimental_local_results(self._strategy.run(function))[0]

    def _average(self, *, is_whole: bool, options=None) -> tf.Tensor:
        """Within a replica: its copies become the average over replicas."""
        trained = _unique(v for o in self._optimizers.values() for v in _inner_of(o)._trainable_variables)
        others = [v for v in self._assigned.values() if tf.as_dtype(v.dtype).is_floating]
        if is_whole:
            others += [v for o in self._optimizers.values() for v in _states_of(o)]
        others = [v for v in _unique(others) if v.synchronization != "on_read" and not _is_in(v, trained)]
        variables = trained + others
        with traffic.metering() as self.sent[is_whole]:
            means = self._means(variables, options)
            agreed = self._agreed(options)
        for variable, mean in zip(others, means[len(trained) :], strict=True):
            layer_state.put_own(variable, mean)
        for variable, value in agreed:
            layer_state.put_own(variable, value)
        self._put_weights(trained, means)
        self._rows.assign(0.0)
        return tf.constant(0)

    def _means(self, variables: list, options) -> list[tf.Tensor]:
        """The average of each variable, weighed by rows; what a replica without rows has does not count."""
        rows = tf.identity(self._rows)
        values = [tf.identity(tf.cast(v.value, _wide(v.dtype))) for v in variables]
        parts = [tf.math.multiply_no_nan(value, tf.cast(rows, value.dtype)) for value in values]
        *sums, total = collectives.all_reduce([*parts, rows], options)
        return [
            tf.where(total > 0, tf.math.divide_no_nan(part, tf.cast(total, part.dtype)), value)
            for part, value in zip(sums, values, strict=True)
        ]

    def _agreed(self, options) -> list[tuple]:
        """What a replica's own overflows let differ: the lowest scale and the most updates stand."""
        scaled = [o for o in self._optimizers.values() if isinstance(o, LossScaleOptimizer)]
        lowest = [v for o in scaled for v in (o.dynamic_scale, o.step_counter)]
        most = [v for o in scaled for v in (o._iterations, o.inner_optimizer._iterations)]
        if not scaled:
            return []
        context = replication.replica_context()
        place = tf.one_hot(tf.cast(context.replica_id_in_sync_group, tf.int32), context.num_replicas_in_sync)
        mine = tf.stack([tf.cast(v.value, tf.float32) for v in lowest + most])
        (table,) = collectives.all_reduce([tf.tensordot(place, mine, axes=0)], options)
        count = len(lowest)
        values = tf.concat([tf.reduce_min(table[:, :count], 0), tf.reduce_max(table[:, count:], 0)], 0)
        return list(zip(lowest + most, tf.unstack(values), strict=True))

    def _put_weights(self, trained: list, means: list[tf.Tensor]) -> None:
        if self.outer is None:
            for variable, mean in zip(trained, means, strict=False):
                layer_state.put_own(variable, mean)
            return
        changes = {}
        for variable, anchor in zip(self._inner._trainable_variables, self._anchors, strict=True):
            at = next(at for at, v in enumerate(trained) if v is variable)
            start = tf.identity(anchor)
            changes[at] = start - tf.cast(means[at], start.dtype)
            layer_state.put_own(variable, start)
        with step_context.scope(gradients_are_summed=True):
            self.outer.apply([changes[at] for at in sorted(changes)], [trained[at] for at in sorted(changes)])
        for at, variable in enumerate(trained):
            if at not in changes:
                layer_state.put_own(variable, means[at])


def _own_variable(shape, dtype="float32") -> tf.Variable:
    """A variable of which each replica has its own value."""
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, aggregation=tf.VariableAggregation.NONE)


def _inner_of(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _states_of(optimizer) -> list:
    """An optimizer's slots and moving averages; what is set from outside, or is a whole number, is alike everywhere."""
    inner = _inner_of(optimizer)
    return [v for v in inner.variables if tf.as_dtype(v.dtype).is_floating and v is not inner._learning_rate]


def _unique(variables) -> list:
    return list({id(v): v for v in variables}.values())


def _is_in(variable, variables: list) -> bool:
    return any(v is variable for v in variables)


def _wide(dtype) -> tf.DType:
    dtype = tf.as_dtype(dtype)
    return dtype if dtype.size > 4 else tf.float32


@functools.cache
def _settle_before_reading() -> None:
    """Averages before anybody reads the weights: at an epoch's end, before evaluation, prediction and saves."""

    @wrap(Trainer, "_get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        settle(self)
        return stock(self, logs)

    for name in ("evaluate", "predict", "test_on_batch", "predict_on_batch"):
        _settle_before(keras_trainer.TensorFlowTrainer, name)
    for name in ("get_weights", "export"):
        _settle_before(keras.Model, name)
    for name in ("save_model", "save_weights_only"):
        _settle_before(saving_lib, name)


def _settle_before(owner: object, name: str) -> None:
    @wrap(owner, name)
    def settled(stock, model, *args, **kwargs):
        if isinstance(model, keras.Model):
            settle(model)
        return stock(model, *args, **kwargs)

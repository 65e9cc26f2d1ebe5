"""Local SGD: each replica updates its own copy of the weights, and the copies are averaged periodically.

`StepRunner` runs such steps and calls `Averager` in the compiled loop: after `every` updates one all-reduce averages
the weights, each replica's weighted by the rows that it was trained on since. Each replica keeps its own optimizer
state, as in post-local SGD and DiLoCo, until the model is read: at the end of an epoch, before `evaluate`, `predict`,
`get_weights` and a save, `settle` averages weights and states, so that all replicas hold one model.

With `every=1` the replicas communicate after each update anyway, so the forward pass communicates too
(BatchNormalization's moments, divisors of masks): with SGD the result is that of one device. Otherwise the forward pass
uses a replica's own rows, also in layers and losses that mix the rows of a batch (MixUp, circle loss). Integers or sums
that a layer assigns are always those of all rows.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import optimizers, slots
from tfgpu.compat.keras import LossScaleOptimizer
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, extensions, gradients, nested_graphs, replication, step_context, traffic, travel
from tfgpu.core.loop_builder import Updates
from tfgpu.core.state import layer_state, training_state
from tfgpu.errors import InputError, MachineError

_log = logging.getLogger(__name__)

READ_TIMEOUT_S = 300.0
"""How long a worker that reads the model between two averagings waits for the others."""


@dataclass(frozen=True)
class LocalSGD:
    """How replicas train on their own copies of the weights.

    Attributes:
        every: updates between two averagings, at least 1.
        after: updates of synchronous training before the first of them.
        outer: makes the optimizer that applies the change of the average since the last averaging as a gradient; None
            keeps the average as it is.
    """

    every: int
    after: int = 0
    outer: Callable[[], keras.optimizers.Optimizer] | None = None

    def averager(self, model: keras.Model) -> "Averager":
        """What averages the replicas of a model."""
        return Averager(model, self)


class LocalUpdates(gradients.GradientExtension):
    """Each replica applies the gradients of its own rows."""

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        facts = step_context.step()
        if facts is None and replication.local_training_of(replication.replica_context().strategy) is not None:
            raise InputError(
                "`averaging` needs `model.fit`, `Trainer` or `train_on_batch`: nothing would average the replicas in a "
                "hand-written `strategy.run` loop. Use one of them, or `multi_worker` or `mirrored`."
            )
        if not step_context.has_local_updates():
            return None
        facts.applied_optimizers[id(update.optimizer)] = update.optimizer
        return list(parts)


extensions.gradient_extensions.register(LocalUpdates(), order=10)


def average_in(strategy: tf.distribute.Strategy, settings: LocalSGD) -> tf.distribute.Strategy:
    """Makes the replicas of a strategy train independently, and returns the strategy."""
    slots.of(strategy).local_training = settings
    _settle_before_reading()
    return strategy


def averager_of(model) -> "Averager | None":
    """What averages the replicas of a model; None before it trains."""
    return getattr(getattr(model, "train_function", None), "averager", None)


def settle(model) -> None:
    """Averages weights and optimizer states if replicas have trained independently since the last averaging.

    On several workers it is then a collective, in which every worker must take part.

    Raises:
        MachineError: the other workers did not take part within `READ_TIMEOUT_S`.
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


extensions.state_providers.register(AveragingState())


class Averager(Updates):
    """Averages the replicas of one model.

    Args:
        model: the compiled model.
        settings: when and how.

    Attributes:
        since: batches since the last averaging.
        rounds: averagings so far.
        sent: what a replica sends in one averaging, by whether it includes optimizer states.
        outer: the outer optimizer, or None.

    Raises:
        InputError: `outer` or `after` with a model that has no optimizer, or is not built.
    """

    are_local = True

    def __init__(self, model, settings: LocalSGD):
        self._model, self._settings, self._strategy = model, settings, model.distribute_strategy
        self._inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._batches = getattr(self._inner, "gradient_accumulation_steps", None) or 1  # per update
        self.since = self.rounds = self.sent_bytes = 0
        self.outer, self.sent = None, {}
        self._anchors = ()
        self._optimizers, self._assigned = {}, {}
        self._settle = nested_graphs.own(self._settled)
        if self._inner is None and (settings.after or settings.outer):
            raise InputError("`after` and `outer` need an optimizer of the model. Give `model.compile` one.")
        with tf.init_scope(), self._strategy.scope():
            self._rows = _own_variable([])
            if settings.outer is not None:
                if not self._inner.built:
                    raise InputError("`outer` needs a model that is built before it trains. Give it a keras.Input.")
                self.outer = settings.outer()
                self.outer.build(optimizers.trained(self._inner))
                gradients.count_on_every_replica(self.outer)
                self._anchors = [_own_variable(v.shape, v.dtype) for v in optimizers.trained(self._inner)]

    @property
    def has_local_forward(self) -> bool:
        """Whether the forward pass uses a replica's own rows, too."""
        return self._settings.every > 1

    def left(self) -> float:
        """The remaining batches of synchronous training; infinite once replicas train independently."""
        if not self._settings.after or self.since or self.rounds:
            return float("inf")
        left = self._settings.after * self._batches - int(optimizers.iterations(self._inner).numpy())
        return left if left > 0 else float("inf")

    def note(self, facts: step_context.Step) -> None:
        """Within a replica: records what a traced step updates."""
        self._rows.assign_add(tf.cast(facts.rows.local, tf.float32))
        self._optimizers.update(facts.applied_optimizers)
        if facts.local_forward:
            own = {id(v) for metric in self._model.metrics for v in metric.variables}
            self._assigned.update({key: v for key, v in facts.assigned_variables.items() if key not in own})

    def begin(self, since: tf.Tensor) -> None:
        """Before a step, in cross-replica context: keeps the weights that the outer optimizer starts from."""
        if not self._anchors:
            return

        def keep():
            for anchor, variable in zip(self._anchors, optimizers.trained(self._inner), strict=True):
                anchor.assign(variable.value)
            return tf.constant(0)

        tf.cond(since == 0, lambda: self._on_each(keep), lambda: tf.constant(0))

    def follow(self, since: tf.Tensor) -> tf.Tensor:
        """After a step, in cross-replica context: averages if it is time. Returns the batches since then."""
        is_time = since + 1 >= self._settings.every * self._batches
        average = functools.partial(self._average, is_whole=False)
        tf.cond(is_time, lambda: self._on_each(average), lambda: tf.constant(0))
        return tf.where(is_time, 0, since + 1)

    @contextlib.contextmanager
    def running(self):
        """Around such steps: if they fail in the middle, the number of steps that ran is unknown."""
        try:
            yield
        except BaseException:
            self.since = max(self.since, 1)
            raise

    def count(self, steps: int) -> None:
        """Counts steps that have run."""
        period = self._settings.every * self._batches
        rounds, self.since = divmod(self.since + steps, period)
        if rounds:
            self._count_rounds(rounds, is_whole=False)

    def settle(self) -> None:
        """As the function of this name, unconditionally."""
        try:
            self._settle()
        except tf.errors.DeadlineExceededError:
            raise MachineError(
                f"The workers have trained independently since the last averaging, but the others did not join within "
                f"{READ_TIMEOUT_S} s. Let every worker read or save the model, or do it at the end of an epoch."
            ) from None
        self.since = 0
        self._count_rounds(1, is_whole=True)
        _log.info("Averaged %d times so far; each replica sent %.1f MB for it.", self.rounds, self.sent_bytes / 1e6)

    def _count_rounds(self, rounds: int, *, is_whole: bool) -> None:
        self.rounds += rounds
        self.sent_bytes += rounds * self.sent[is_whole].bytes

    def _settled(self) -> tf.Tensor:
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=READ_TIMEOUT_S)
        return self._on_each(functools.partial(self._average, is_whole=True, options=options))

    def _on_each(self, function: Callable[[], tf.Tensor]) -> tf.Tensor:
        function = tf.autograph.experimental.do_not_convert(function)
        return self._strategy.experimental_local_results(self._strategy.run(function))[0]

    def _average(self, *, is_whole: bool, options=None) -> tf.Tensor:
        """Within a replica: replaces its copies with the average over replicas."""
        inner = [getattr(o, "inner_optimizer", o) for o in self._optimizers.values()]
        trained = _unique(v for o in inner for v in optimizers.trained(o))
        others = [v for v in self._assigned.values() if tf.as_dtype(v.dtype).is_floating]
        if is_whole:  # slots and moving averages; the learning rate and integers are equal on all replicas
            rates = {id(optimizers.learning_rate(o)) for o in inner}
            others += [v for o in inner for v in o.variables if tf.as_dtype(v.dtype).is_floating and id(v) not in rates]
        known = {id(v) for v in trained}
        others = [v for v in _unique(others) if v.synchronization != "on_read" and id(v) not in known]
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
        """The average of each variable, weighted by rows; a replica without rows does not count."""
        rows = tf.identity(self._rows)
        wide = [dtype if dtype.size > 4 else tf.float32 for dtype in (tf.as_dtype(v.dtype) for v in variables)]
        values = [tf.identity(tf.cast(v.value, dtype)) for v, dtype in zip(variables, wide, strict=True)]
        parts = [tf.math.multiply_no_nan(value, tf.cast(rows, value.dtype)) for value in values]
        *sums, total = collectives.all_reduce([*parts, rows], options)
        return [
            tf.where(total > 0, tf.math.divide_no_nan(part, tf.cast(total, part.dtype)), value)
            for part, value in zip(sums, values, strict=True)
        ]

    def _agreed(self, options) -> list[tuple]:
        """The variables in which overflows make replicas differ: the lowest loss scale and the most updates win."""
        scaled = [o for o in self._optimizers.values() if isinstance(o, LossScaleOptimizer)]
        lowest = [v for o in scaled for v in (o.dynamic_scale, o.step_counter)]
        most = [v for o in scaled for v in map(optimizers.iterations, (o, o.inner_optimizer))]
        if not scaled:
            return []
        mine = tf.stack([tf.cast(v.value, tf.float32) for v in lowest + most])
        (table,) = collectives.all_reduce([travel.at_own_place(mine)], options)
        count = len(lowest)
        values = tf.concat([tf.reduce_min(table[:, :count], 0), tf.reduce_max(table[:, count:], 0)], 0)
        return list(zip(lowest + most, tf.unstack(values), strict=True))

    def _put_weights(self, trained: list, means: list[tf.Tensor]) -> None:
        changes, places = {}, {id(v): at for at, v in enumerate(trained)}
        outer = optimizers.trained(self._inner) if self.outer is not None else []
        for variable, anchor in zip(outer, self._anchors, strict=True):
            at = places[id(variable)]
            start = tf.identity(anchor)
            changes[at] = start - tf.cast(means[at], start.dtype)
            layer_state.put_own(variable, start)
        if changes:
            with step_context.scope(gradients_are_summed=True):
                self.outer.apply([changes[at] for at in sorted(changes)], [trained[at] for at in sorted(changes)])
        for at, variable in enumerate(trained):
            if at not in changes:
                layer_state.put_own(variable, means[at])


def _own_variable(shape, dtype="float32") -> tf.Variable:
    """A variable with a value of its own on each replica."""
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, aggregation=tf.VariableAggregation.NONE)


def _unique(variables) -> list:
    return list({id(v): v for v in variables}.values())


@functools.cache
def _settle_before_reading() -> None:
    """Averages before the weights are read: at the end of an epoch, before evaluation, prediction and saves."""

    @wrap("Trainer.get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        settle(self)
        return stock(self, logs)

    for name in ("evaluate", "predict", "test_on_batch", "predict_on_batch"):
        _settle_before("TensorFlowTrainer", name)
    for name in ("get_weights", "export"):
        _settle_before("keras.Model", name)
    for name in ("save_model", "save_weights_only"):
        _settle_before("saving_lib", name)


def _settle_before(owner: str, name: str) -> None:
    @wrap(f"{owner}.{name}")
    def settled(stock, model, *args, **kwargs):
        if isinstance(model, keras.Model):
            settle(model)
        return stock(model, *args, **kwargs)

"""Optimizers under replicas: gradients are summed first, in one all-reduce; everything after is local.

Unscaling, the check for infinities, clipping, weight decay, the update and the moving average then see the same numbers
on every replica, as on one device, and no collective is inside a condition. Features that sum gradients in another
way, or surround the update, register a `GradientExtension`.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import collective_order, optimizers, slots, training, variables
from tfgpu.compat import keras as private
from tfgpu.compat.keras import BaseOptimizer, LossScaleOptimizer
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, extensions, gradient_weights, replication, step_context
from tfgpu.core.row_mixing import row_sums, whole_batch
from tfgpu.errors import InputError


@dataclass(frozen=True)
class Update:
    """One call of an optimizer's `apply` on a replica.

    Attributes:
        optimizer: the optimizer that was called.
        inner: the optimizer inside loss scaling; without loss scaling, the same.
        gradients: this replica's gradients: tensors, IndexedSlices or None.
        variables: the model's variables, one per gradient.
    """

    optimizer: keras.optimizers.Optimizer
    inner: keras.optimizers.Optimizer
    gradients: list
    variables: list


class GradientExtension:
    """What a feature adds to an update on replicas; the methods here add nothing."""

    def variable_of(self, variable):
        """The model's variable that an optimizer's variable stands for."""
        return variable

    def arrive_summed(self, update: Update) -> bool:
        """Whether the gradients are already summed over replicas, so they must not be weighted by rows."""
        return False

    def sum(self, update: Update, parts: list) -> list | None:
        """Returns the gradients to apply, from this replica's parts of the sums.

        None leaves them to the next extension, and finally to one all-reduce.
        """
        return None

    @contextlib.contextmanager
    def around_sum(self, update: Update) -> Iterator[Update]:
        """Surrounds the sum over replicas; yields the update whose gradients are summed."""
        yield update

    @contextlib.contextmanager
    def around_update(self, update: Update, sums: list, named: list | None) -> Iterator[tuple[list, list | None]]:
        """Surrounds the optimizer's own update; yields the gradients and variables to pass to it.

        `named` are the variables that the caller passed, or None for all of the optimizer's.
        """
        yield sums, named


def sum_before_applying() -> None:
    """Sums the gradients over replicas before anything reads them.

    Stock Keras clips, checks and accumulates each replica's part separately, and sums afterward. Reported as crashes:
    https://github.com/keras-team/keras/issues/20582 (accumulation),
    https://github.com/keras-team/keras/issues/18666 (float16).
    """
    collective_order.order_each_function()
    _weigh_losses()

    @wrap("BaseOptimizer.__init__")
    def init(stock, self, *args, **kwargs):
        for cls in type(self).__mro__:  # a subclass that changes the gradients first must see the sum
            if not cls.__module__.startswith("keras.") and issubclass(cls, BaseOptimizer):
                _sum_before(cls)
        stock(self, *args, **kwargs)

    for owner in (BaseOptimizer, LossScaleOptimizer):
        _sum_before(owner)


def _weigh_losses() -> None:
    """Multiplies the loss, a scalar, by the replica's share: the gradients would need one pass each."""

    @wrap("TensorFlowTrainer.train_step")
    def train_step(stock, self, data):
        facts = step_context.step()
        if facts is None:
            if training.strategy_of(self) is None:
                replication.check_is_not_replicated(self.trainable_variables)
            return stock(self, data)
        facts.loss_is_weighed = not facts.local_updates
        try:
            return stock(self, data)
        finally:
            facts.loss_is_weighed = False

    @wrap("BaseOptimizer.scale_loss")
    def scale_loss(stock, self, loss):
        facts = step_context.step()
        if facts is not None and facts.whole is None and _is_sum(facts, loss):
            facts.loss_is_sum = True
        elif facts is not None and facts.loss_is_weighed:
            loss = step_context.times_share(loss)
        return stock(self, loss)

    @wrap("LossScaleOptimizer.scale_loss")
    def scale_loss_in_float16(stock, self, loss):
        facts = step_context.step()
        if facts is None or facts.whole is not None:
            return stock(self, loss)
        if _is_sum(facts, loss):
            facts.loss_is_sum = True
            return stock(self, loss)
        if facts.local_updates:
            return stock(self, loss)
        # Float16 gradients inside the network are as large as one device's, so they overflow when one device's would.
        facts.loss_is_divided = not facts.loss_is_weighed
        loss = step_context.times_share(loss) if facts.loss_is_weighed else loss / step_context.num_replicas(loss.dtype)
        return stock(self, loss)

    @wrap("tf.GradientTape.gradient")
    def gradient(stock, self, target, sources, *args, **kwargs):
        if (recorder := step_context.current().recorder) is not None:
            return recorder.gradient(functools.partial(stock, self), target, sources, *args, **kwargs)
        facts = step_context.step()
        is_vector = facts is not None and tf.is_tensor(target) and _is_sum(facts, target)
        if is_vector and any(isinstance(source, private.Variable) for source in tf.nest.flatten(sources)):
            facts.loss_is_sum = True  # until it is applied
        with _named_where_no_replica_runs():
            return stock(self, target, sources, *args, **kwargs)


@contextlib.contextmanager
def _named_where_no_replica_runs() -> Iterator[None]:
    """Names the fix where a step by hand takes gradients in the scope, and not on the replicas."""
    try:
        yield
    except ValueError as error:
        if tf.distribute.in_cross_replica_context() and "outside the replica context" in str(error):
            raise InputError(
                "Gradients were taken in a strategy's scope, but on none of its replicas. Put the step into a "
                "function, and run it on each replica: `strategy.run(step, args=(batch,))`."
            ) from error
        raise


def _is_sum(facts: step_context.Step, loss: tf.Tensor) -> bool:
    """Whether the gradient of a loss is a sum over rows, as a vector's is; a shape of [1] counts as a scalar."""
    is_one = loss.shape.num_elements() == 1 and tf.get_static_value(facts.rows.local) != 1
    return loss.shape.rank != 0 and not is_one


def _sum_before(owner: type) -> None:
    """Makes the class's own `apply` and `apply_gradients` see summed gradients."""
    if slots.get(owner, "sums_before"):
        return
    slots.of(owner).sums_before = True
    if "apply" in vars(owner):

        @wrap(owner, "apply")
        def apply(stock, self, grads, trainable_variables=None):
            recorder = step_context.current().recorder  # autograph, which converts an override, knows no `:=`
            if recorder is not None:
                return recorder.note_update(list(grads), self)
            if replication.replica_context() is None or step_context.gradients_are_summed():
                return stock(self, grads, trainable_variables)
            with _summed(self, list(grads), trainable_variables) as (sums, variables):
                return stock(self, sums, variables)

    if "apply_gradients" in vars(owner) and owner is not BaseOptimizer:

        @wrap(owner, "apply_gradients")
        def apply_gradients(stock, self, grads_and_vars, *args, **kwargs):
            recorder = step_context.current().recorder
            if recorder is not None:
                return recorder.note_update([gradient for gradient, _ in grads_and_vars], self)
            if replication.replica_context() is None or step_context.gradients_are_summed():
                return stock(self, grads_and_vars, *args, **kwargs)
            grads, variables = map(list, zip(*grads_and_vars, strict=True))
            with _summed(self, grads, variables) as (sums, variables):
                return stock(self, list(zip(sums, variables, strict=True)), *args, **kwargs)


@contextlib.contextmanager
def _summed(optimizer, gradients: list, named: list | None) -> Iterator[tuple[list, list | None]]:
    """Surrounds an optimizer's own update; yields the gradients and variables to pass to it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    trained = list(optimizers.trained(inner) if named is None else named)
    for extension in extensions.gradient_extensions:
        trained = [extension.variable_of(variable) for variable in trained]
    update = Update(optimizer, inner, gradients, trained)
    with contextlib.ExitStack() as stack:
        stack.enter_context(collectives.as_packs())
        for extension in extensions.gradient_extensions:
            update = stack.enter_context(extension.around_sum(update))
        sums = _sum(update)
    with contextlib.ExitStack() as stack:
        stack.enter_context(step_context.scope(gradients_are_summed=True))
        for extension in extensions.gradient_extensions:
            sums, named = stack.enter_context(extension.around_update(update, sums, named))
        yield sums, named


def _sum(update: Update) -> list:
    """The gradients as on one device; in a step with local updates, those of this replica's rows.

    Raises:
        InputError: a variable was made outside the strategy's scope.
    """
    for variable in update.variables:
        replication.check_is_replicated(variable)
    for optimizer in (update.optimizer, update.inner, *optimizers.within(update.inner)):
        count_on_every_replica(optimizer)
    if whole_batch.sees_whole_batch():  # gradients are sums already; a feature's own way makes them of equal parts
        sums = _sum_of_extensions(update, whole_batch.part_of(update.gradients))
        return list(update.gradients) if sums is None else sums
    overwriting = _overwriting(update)
    parts = _parts([None if at in overwriting else gradient for at, gradient in enumerate(update.gradients)], update)
    sums = _sum_of_extensions(update, parts)
    if sums is None:
        sums = collectives.sum_gradients(parts)
    for at, largest in zip(overwriting, row_sums.most([update.gradients[at] for at in overwriting]), strict=True):
        sums[at] = largest
    return sums


def _sum_of_extensions(update: Update, parts: list) -> list | None:
    """What the first feature that sums these gradients makes of them."""
    found = (extension.sum(update, parts) for extension in extensions.gradient_extensions)
    return next((sums for sums in found if sums is not None), None)


def _parts(gradients: list, update: Update) -> list:
    """This replica's parts of the sums over all replicas."""
    if not any(extension.arrive_summed(update) for extension in extensions.gradient_extensions):
        gradients = gradient_weights.weigh(gradients, isinstance(update.optimizer, LossScaleOptimizer))
    facts = step_context.step()
    if facts is not None:
        facts.loss_is_sum = facts.loss_is_divided = False
    return gradients


def _overwriting(update: Update) -> list[int]:
    """Positions of gradients that replace their variable: float8 keeps a batch's largest magnitudes there."""
    return [
        at
        for at, (gradient, variable) in enumerate(zip(update.gradients, update.variables, strict=False))
        if gradient is not None and optimizers.overwrites(update.inner, variable)
    ]


def count_on_every_replica(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes every replica count `iterations`: Keras makes it ONLY_FIRST_REPLICA, whose `assign` hides a merge_call."""
    iterations = optimizers.iterations(optimizer)
    replication.check_is_replicated(iterations)
    variables.set_aggregation(iterations, tf.VariableAggregation.NONE)


def apply_on_every_replica() -> None:
    """Makes every replica update its own copy of the variables with the summed gradients, without a merge_call."""
    for name in (
        "apply_weight_decay",
        "overwrite_model_variables_with_average_value",
        "backend_increment_gradient_accumulators",
    ):
        _make_local(name)

    @wrap("TFOptimizer.backend_update_step")
    def backend_update_step(stock, self, grads, trainable_variables, learning_rate):
        if not step_context.gradients_are_summed():
            return stock(self, grads, trainable_variables, learning_rate)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable = variable.value if isinstance(variable, private.Variable) else variable
            self.update_step(gradient, variable, learning_rate)

    @wrap("LossScaleOptimizer.tf_apply")
    def tf_apply(stock, self, grads, trainable_variables=None):
        if step_context.gradients_are_summed():
            return optimizers.apply_without_overflow_check(self, grads, trainable_variables)
        return stock(self, grads, trainable_variables)


def _make_local(name: str) -> None:
    plain = optimizers.plain_method(name)

    @wrap(f"TFOptimizer.{name}")
    def local(stock, self, *args):
        return plain(self, *args) if step_context.gradients_are_summed() else stock(self, *args)

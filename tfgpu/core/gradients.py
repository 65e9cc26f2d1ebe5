"""Optimizers under replicas: the gradients meet first, in one all-reduce; all that follows is plain local work.

Unscaling, the check for infinities, clipping, weight decay, the update and the moving average then see the same numbers
on every replica, as on one device, and no collective stands inside a condition.

`accumulation.py` has what differs with `gradient_accumulation_steps`; `averaging.py` what follows where the gradients
of a step stay apart.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, gradient_weights, replication, row_sums, step_context
from tfgpu.errors import InputError
from tfgpu.optim import gradient_accumulation, gradient_compression
from tfgpu.parallel import device_placement
from tfgpu.parallel.zero import reduction, sharding, update


def meet_before_applying() -> None:
    """Sums the gradients over replicas before anything reads them.

    Stock Keras clips, checks and accumulates each replica's part by itself, and sums afterwards. Seen as crashes:
    https://github.com/keras-team/keras/issues/20582 (accumulation),
    https://github.com/keras-team/keras/issues/18666 (float16).
    """

    @wrap(TensorFlowTrainer, "train_step")
    def train_step(stock, self, data):
        facts = step_context.step()
        if facts is None:
            if self._distribute_strategy is None:
                replication.check_is_not_replicated(self.trainable_variables)
            return stock(self, data)
        # One multiplication of a scalar, where the gradients would need a pass each.
        facts.loss_is_weighed = not facts.local_updates
        try:
            return stock(self, data)
        finally:
            facts.loss_is_weighed = False

    @wrap(BaseOptimizer, "scale_loss")
    def scale_loss(stock, self, loss):
        facts = step_context.step()
        if facts is not None and _is_sum(facts, loss):
            facts.loss_is_sum = True
        elif facts is not None and facts.loss_is_weighed:
            loss = step_context.times_share(loss)
        return stock(self, loss)

    @wrap(LossScaleOptimizer, "scale_loss")
    def scale_loss_in_float16(stock, self, loss):
        facts = step_context.step()
        if facts is None:
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

    @wrap(tf.GradientTape, "gradient")
    def gradient(stock, self, target, sources, *args, **kwargs):
        facts = step_context.step()
        is_vector = facts is not None and tf.is_tensor(target) and _is_sum(facts, target)
        if is_vector and any(isinstance(source, backend.Variable) for source in tf.nest.flatten(sources)):
            facts.loss_is_sum = True  # until it is applied
        return stock(self, target, sources, *args, **kwargs)

    @wrap(BaseOptimizer, "__init__")
    def init(stock, self, *args, **kwargs):
        for cls in type(self).__mro__:  # one that changes the gradients first must see the sum
            if not cls.__module__.startswith("keras.") and issubclass(cls, BaseOptimizer):
                _meet_before(cls)
        stock(self, *args, **kwargs)

    for owner in (BaseOptimizer, LossScaleOptimizer):
        _meet_before(owner)


def _meet_before(owner: type) -> None:
    """Lets the class's own `apply` and `apply_gradients` see gradients that have met."""
    if "_meets_before" in vars(owner):
        return
    owner._meets_before = True
    if "apply" in vars(owner):

        @wrap(owner, "apply")
        def apply(stock, self, grads, trainable_variables=None):
            if replication.replica_context() is None or step_context.gradients_are_summed():
                return stock(self, grads, trainable_variables)
            with _met(self, list(grads), trainable_variables) as (met, variables):
                return stock(self, met, variables)

    if "apply_gradients" in vars(owner) and owner is not BaseOptimizer:

        @wrap(owner, "apply_gradients")
        def apply_gradients(stock, self, grads_and_vars, *args, **kwargs):
            if replication.replica_context() is None or step_context.gradients_are_summed():
                return stock(self, grads_and_vars, *args, **kwargs)
            grads, variables = map(list, zip(*grads_and_vars, strict=True))
            with _met(self, grads, variables) as (met, variables):
                return stock(self, list(zip(met, variables, strict=True)), *args, **kwargs)


@contextlib.contextmanager
def _met(optimizer, grads: list, variables) -> Iterator[tuple]:
    """Around an optimizer's own update: what it is to apply, and to which variables."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    trained = [sharding.full_variable(v) for v in (inner._trainable_variables if variables is None else variables)]
    met = _meet(optimizer, grads, None if variables is None else trained)
    with step_context.scope(gradients_are_summed=True), device_placement.colocate_with_inputs():
        if not any(map(sharding.is_sharded, trained)):
            yield met, variables
            return
        with update.sharded_update(optimizer, inner, met, trained) as pieces:
            yield pieces, None if variables is None else [sharding.shard_of(v) for v in trained]


def _meet(optimizer, grads: list, variables) -> list:
    """The gradients as one device has them; in a step apart, as this replica's own rows make them.

    Raises:
        InputError: a variable is no replica's: it was made outside the strategy's scope; or replicas that train apart
            are in a loop that does not average them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if (
        step_context.step() is None
        and replication.local_training_of(replication.replica_context().strategy) is not None
    ):
        raise InputError(
            "`averaging` needs `model.fit`, `Trainer` or `train_on_batch`: a hand-written `strategy.run` loop would "
            "apply what no replica averages. Use one of them, or `multi_worker` or `mirrored`."
        )
    for variable in _variables(inner, variables):
        replication.check_is_replicated(variable)
    count_on_every_replica(optimizer)
    count_on_every_replica(inner)
    found = _found(inner, grads, variables)
    summed = [None if at in found else gradient for at, gradient in enumerate(grads)]
    has_met = [sharding.is_fully_sharded(variable) for variable in _variables(inner, variables)]
    parts = summed if any(has_met) else gradient_weights.weigh(summed, isinstance(optimizer, LossScaleOptimizer))
    if step_context.step() is not None:
        step_context.step().loss_is_sum = step_context.step().loss_is_divided = False
    if step_context.has_local_updates():
        step_context.step().applied_optimizers[id(optimizer)] = optimizer
        met = parts
    elif gradient_compression.top_k_of(replication.replica_context().strategy) is not None:
        met = gradient_compression.meet(optimizer, inner, parts, variables)
    elif parts and any(map(sharding.is_sharded, _variables(inner, variables))):
        met = reduction.reduce_gradients(inner, parts, _variables(inner, variables))
    elif inner.gradient_accumulation_steps and len(parts) > 0:
        met = gradient_accumulation.meet_at_update(optimizer, inner, parts, variables)
    else:
        met = collectives.from_reduce_dtype(collectives.all_reduce(collectives.to_reduce_dtype(parts)), parts)
    for at, most in zip(found, row_sums.most([grads[at] for at in found]), strict=True):
        met[at] = most
    return met


def apply_on_every_replica() -> None:
    """Once the gradients have met, every replica updates its own copy of the variables, with no merge_call."""
    for name in (
        "_apply_weight_decay",
        "_overwrite_model_variables_with_average_value",
        "_backend_increment_gradient_accumulators",
    ):
        _make_local(name)

    @wrap(TFOptimizer, "_backend_update_step")
    def backend_update_step(stock, self, grads, trainable_variables, learning_rate):
        if not step_context.gradients_are_summed():
            return stock(self, grads, trainable_variables, learning_rate)
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable = variable.value if isinstance(variable, backend.Variable) else variable
            self.update_step(gradient, variable, learning_rate)

    @wrap(LossScaleOptimizer, "_tf_apply")
    def tf_apply(stock, self, grads, trainable_variables=None):
        if step_context.gradients_are_summed():
            return self._common_apply(grads, trainable_variables)
        return stock(self, grads, trainable_variables)


def _is_sum(facts: step_context.Step, loss: tf.Tensor) -> bool:
    """Whether the gradient of a loss is a sum over rows, as a vector's is; a shape of [1] is one number too."""
    is_one = loss.shape.num_elements() == 1 and tf.get_static_value(facts.rows.local) != 1
    return loss.shape.rank != 0 and not is_one


def _variables(optimizer, variables) -> list:
    return list(optimizer._trainable_variables if variables is None else variables)


def _found(optimizer, grads: list, variables) -> list[int]:
    """Places of the variables that their gradient overwrites: float8 keeps the largest numbers of a batch there."""
    return [
        at
        for at, (gradient, v) in enumerate(zip(grads, _variables(optimizer, variables), strict=False))
        if gradient is not None and optimizer._overwrite_variable_with_gradient(v)
    ]


def _make_local(name: str) -> None:
    plain = getattr(BaseOptimizer, name)

    @wrap(TFOptimizer, name)
    def local(stock, self, *args):
        return plain(self, *args) if step_context.gradients_are_summed() else stock(self, *args)


def count_on_every_replica(optimizer) -> None:
    """`iterations` is made with ONLY_FIRST_REPLICA, whose assignment hides a merge_call; every replica counts alike."""
    replication.check_is_replicated(optimizer._iterations)
    optimizer._iterations.value._aggregation = tf.VariableAggregation.NONE

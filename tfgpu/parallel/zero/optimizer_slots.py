"""Optimizers that are built on shards: their slots are pieces, and begin, are averaged and swapped as one device's."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks import swap_ema_weights
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfgpu.compat.patch import wrap
from tfgpu.core import replication, step_context
from tfgpu.errors import InputError
from tfgpu.parallel import sharded_variable
from tfgpu.parallel.zero import elementwise
from tfgpu.parallel.zero.sharding import full_variable, is_fully_sharded, is_sharded, shard_of


@functools.cache
def install() -> None:
    """Lets optimizers that are built on sharded variables take their shards, in this process from now on."""

    @wrap(BaseOptimizer, "__init__")
    def init(stock, self, *args, **kwargs):
        for cls in type(self).__mro__:
            if issubclass(cls, BaseOptimizer):
                _build_on_shards(cls)
        stock(self, *args, **kwargs)

    left = [BaseOptimizer]
    while left:
        cls = left.pop()
        _build_on_shards(cls)
        left += cls.__subclasses__()

    @wrap(BaseOptimizer, "_use_weight_decay")
    def use_weight_decay(stock, self, variable):
        return stock(self, full_variable(variable))

    @wrap(TFOptimizer, "_overwrite_model_variables_with_average_value")
    def overwrite(stock, self, trainable_variables):
        if step_context.gradients_are_summed() or not any(map(is_sharded, trainable_variables)):
            return stock(self, trainable_variables)
        for variable, average in _averages(self):
            variable.assign(average.numpy())

    @wrap(swap_ema_weights.SwapEMAWeights, "_tf_swap_variables")
    def swap(stock, self, optimizer):
        if not any(map(is_sharded, optimizer._trainable_variables)):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            value = np.array(variable.numpy())
            variable.assign(average.numpy())
            average.assign(value)

    @wrap(swap_ema_weights.SwapEMAWeights, "_tf_finalize_ema_values")
    def finalize(stock, self, optimizer):
        if not any(map(is_sharded, optimizer._trainable_variables)):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            average.assign(variable.numpy())


def _averages(optimizer) -> Iterator[tuple]:
    """Each variable, whole, with the whole of its average."""
    for shard, average in zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True):
        yield (
            sharded_variable.ShardedVariable([shard]) if is_fully_sharded(shard) else full_variable(shard),
            sharded_variable.ShardedVariable([average]),
        )


def _build_on_shards(cls: type) -> None:
    if "_tfgpu_builds_on_shards" in vars(cls):
        return
    cls._tfgpu_builds_on_shards = True
    if "build" not in vars(cls):
        return

    @wrap(cls, "build")
    def build(stock, self, variables):
        variables = [shard_of(variable) for variable in variables]
        if not any(map(is_sharded, variables)):
            return stock(self, variables)
        is_outermost = not hasattr(self, "_tfgpu_is_elementwise")
        if is_outermost:
            check_optimizer(self, variables)
            _outside(variables, lambda: _fill(variables))
        stock(self, variables)
        _track_wholes(self, variables)
        if is_outermost:
            _outside(variables, lambda: _fill_slots(self, variables))


def _track_wholes(optimizer, shards: Sequence) -> None:
    """Lets `tf.train.Checkpoint` find the model's variables where it would find the shards."""
    wholes = [getattr(shard, "_tfgpu_whole", full_variable(shard)) for shard in shards]
    optimizer._track_trackable(tf.__internal__.tracking.wrap(wholes), "_trainable_variables", overwrite=True)


def _fill(shards: Sequence) -> None:
    """Gives the shards what the variables hold."""
    for shard in shards:
        if not is_fully_sharded(shard):
            sharded_variable.ShardedVariable([shard]).assign(full_variable(shard)._value.numpy())


def _outside(shards: Sequence, run: Callable) -> None:
    """Runs something as if outside of any step."""
    run() if replication.replica_context() is None else replication.run_cross_replica(
        shards[0]._value.distribute_strategy, run
    )


def _fill_slots(optimizer, shards: Sequence) -> None:
    """Where a slot begins with the variable's values, gives each replica's copy its own piece: all have the first's."""
    shard_by_key = {sharded_variable.shard_info(shard).of: shard for shard in shards}
    for slot in optimizer.variables:
        part = sharded_variable.shard_info(slot)
        shard = shard_by_key.get(part.of[:-1]) if part is not None else None
        if shard is None:
            continue
        values = slot._value.values[0].numpy()
        if values.dtype.kind == "V" or not values.any():
            continue
        if not np.array_equal(values, shard._value.values[0].numpy()):
            if (values == values[0]).all():
                continue
            raise InputError(
                f"{type(optimizer).__name__} begins with numbers of its own in {slot.path!r}, which pieces would mix "
                "up. Use one whose slots begin with a constant or with the weights."
            )
        for copy, piece in zip(slot._value.values, shard._value.values, strict=True):
            copy.assign(piece)


def check_optimizer(optimizer, variables: Sequence) -> None:
    """Refuses what cannot work on pieces.

    Raises:
        InputError: variables without a shard among others; an optimizer that does not work element by element.
    """
    left = [variable.path for variable in variables if not is_sharded(variable)]
    if left:
        raise InputError(
            f"The variable {left[0]!r} was made after `parallel.shard`, so the optimizer would have sharded variables "
            "and others. Make all variables first, then call `parallel.shard`, then `compile`."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reason = elementwise.why_not_elementwise(inner)
    if reason:
        raise InputError(
            f"{type(inner).__name__} cannot be sharded: {reason} Use an optimizer that works element by element "
            "(Adam, AdamW, Lion, SGD, RMSprop, Adagrad, ...)."
        )
    for each in (optimizer, inner):
        object.__setattr__(each, "_tfgpu_is_elementwise", True)

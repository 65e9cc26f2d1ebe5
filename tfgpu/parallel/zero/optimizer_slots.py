"""Optimizers that are built on shards: their slots start, are averaged and are swapped as those of one device."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfgpu.compat import optimizers, slots, variables
from tfgpu.compat.keras import BaseOptimizer
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, replication, step_context
from tfgpu.core.state import sharded_variable
from tfgpu.core.state.sharded_variable import full_variable, shard_of
from tfgpu.errors import InputError
from tfgpu.parallel.zero import elementwise, update
from tfgpu.parallel.zero.sharding import is_fully_sharded, is_sharded, state_of


@functools.cache
def install() -> None:
    """Makes optimizers that are built on sharded variables take the shards, in this process from now on."""
    extensions.gradient_extensions.register(update.ShardedUpdates(), order=30)
    extensions.xla_obstacles.register(lambda model: any(map(is_fully_sharded, model.trainable_variables)))
    _build_on_shards_everywhere()
    _average_full_variables()

    @wrap("BaseOptimizer.use_weight_decay")
    def use_weight_decay(stock, self, variable):
        return stock(self, full_variable(variable))


def _build_on_shards_everywhere() -> None:
    @wrap("BaseOptimizer.__init__")
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


@functools.cache
def _build_on_shards(cls: type) -> None:
    if "build" not in vars(cls):
        return

    @wrap(cls, "build")
    def build(stock, self, variables):
        shards = [shard_of(variable) for variable in variables]
        if not any(map(is_sharded, shards)):
            return stock(self, shards)
        is_outermost = not slots.get(self, "is_elementwise", False)
        if is_outermost:
            check_optimizer(self, shards)
            _outside_replicas(shards, lambda: _fill(shards))
        stock(self, shards)
        optimizers.show_to_checkpoints(self, [state_of(shard).variable for shard in shards])
        if is_outermost:
            _outside_replicas(shards, lambda: _fill_slots(self, shards))


def _outside_replicas(shards: Sequence, run: Callable) -> None:
    """Runs something as if outside any step."""
    if replication.replica_context() is None:
        run()
    else:
        replication.run_cross_replica(variables.held(shards[0]).distribute_strategy, run)


def _fill(shards: Sequence) -> None:
    """Gives the shards the values of the variables."""
    for shard in shards:
        if not is_fully_sharded(shard):
            value = variables.held(full_variable(shard)).numpy()
            sharded_variable.ShardedVariable([shard]).assign(value)


def _fill_slots(optimizer, shards: Sequence) -> None:
    """Gives slots that start with the variable's values each replica's own piece: all copies have the first one's."""
    shard_by_key = {sharded_variable.shard_info(shard).of: shard for shard in shards}
    for slot in optimizer.variables:
        info = sharded_variable.shard_info(slot)
        shard = shard_by_key.get(info.of[:-1]) if info is not None else None
        if shard is None:
            continue
        copies, pieces = variables.held(slot).values, variables.held(shard).values
        values = copies[0].numpy()
        if values.dtype.kind == "V" or not values.any():
            continue
        if not np.array_equal(values, pieces[0].numpy()):
            if (values == values[0]).all():
                continue
            raise InputError(
                f"{type(optimizer).__name__} starts {slot.path!r} with numbers that differ within the variable, which "
                "pieces would mix up. Use an optimizer whose slots start with a constant or with the weights."
            )
        for copy, piece in zip(copies, pieces, strict=True):
            copy.assign(piece)


def check_optimizer(optimizer, shards: Sequence) -> None:
    """Refuses an optimizer that cannot work on pieces.

    Raises:
        InputError: some of the variables have no shard, or the optimizer does not work element by element.
    """
    left = [variable.path for variable in shards if not is_sharded(variable)]
    if left:
        raise InputError(
            f"The variable {left[0]!r} was made after `parallel.shard`, so the optimizer would have sharded variables "
            "and others. Build all variables first, then call `parallel.shard`, then `compile`."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reason = elementwise.why_not_elementwise(inner)
    if reason:
        raise InputError(
            f"{type(inner).__name__} cannot be sharded: {reason} Use an optimizer that works element by element "
            "(Adam, AdamW, Lion, SGD, RMSprop, Adagrad, ...)."
        )
    for each in (optimizer, inner):
        slots.of(each).is_elementwise = True


def _average_full_variables() -> None:
    """Makes Keras overwrite and swap full variables with their moving averages, not pieces."""

    @wrap("TFOptimizer.overwrite_model_variables_with_average_value")
    def overwrite(stock, self, trainable_variables):
        if step_context.gradients_are_summed() or not any(map(is_sharded, trainable_variables)):
            return stock(self, trainable_variables)
        for variable, average in _averages(self):
            variable.assign(average.numpy())

    @wrap("SwapEMAWeights.tf_swap_variables")
    def swap(stock, self, optimizer):
        if not any(map(is_sharded, optimizers.trained(optimizer))):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            value = np.array(variable.numpy())
            variable.assign(average.numpy())
            average.assign(value)

    @wrap("SwapEMAWeights.tf_finalize_ema_values")
    def finalize(stock, self, optimizer):
        if not any(map(is_sharded, optimizers.trained(optimizer))):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            average.assign(variable.numpy())


def _averages(optimizer) -> Iterator[tuple]:
    """Each full variable with its full average."""
    for shard, average in zip(optimizers.trained(optimizer), optimizers.averages(optimizer), strict=True):
        full = sharded_variable.ShardedVariable([shard]) if is_fully_sharded(shard) else full_variable(shard)
        yield full, sharded_variable.ShardedVariable([average])

"""Optimizers that are built on shards: their slots start, are averaged and are swapped as those of one device."""

import functools
from collections.abc import Iterator

import keras
import numpy as np

from tfgpu.compat import optimizers, variables
from tfgpu.compat.keras import BaseOptimizer, MultiOptimizer
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, step_context
from tfgpu.core.state import sharded_variable
from tfgpu.core.state.sharded_variable import full_variable
from tfgpu.parallel.zero import dealing, optimizer_build, update
from tfgpu.parallel.zero.dealing import target_of
from tfgpu.parallel.zero.sharding import is_fully_sharded, is_sharded, state_of

_building = step_context.Slot("zero.building")
"""Whether an optimizer is being built on shards."""


@functools.cache
def install() -> None:
    """Makes optimizers that are built on sharded variables take the shards, in this process from now on."""
    extensions.gradient_extensions.register(update.ShardedUpdates(), order=30)
    extensions.xla_obstacles.register(lambda model: any(map(is_fully_sharded, model.trainable_variables)))
    _build_on_shards_everywhere()
    _average_full_variables()

    _make_slots_of_dealt_variables()
    if MultiOptimizer.__module__.startswith("keras."):
        _name_shards_to_multi_optimizers()

    @wrap("BaseOptimizer.use_weight_decay")
    def use_weight_decay(stock, self, variable):
        return stock(self, full_variable(variable))


def _make_slots_of_dealt_variables() -> None:
    @wrap("BaseOptimizer.add_variable_from_reference")
    def add_variable(stock, self, reference_variable, name=None, initializer="zeros"):
        if not dealing.is_dealt(reference_variable):
            return stock(self, reference_variable, name=name, initializer=initializer)
        with variables.shaped_as(reference_variable, (1,)):  # so that no replica but the owner takes memory for it
            made = stock(self, reference_variable, name=name, initializer="zeros")
        value = keras.initializers.get(initializer)(reference_variable.shape, reference_variable.dtype)
        dealing.make_slot(made, reference_variable, name or "var", np.asarray(value))
        return made


def _name_shards_to_multi_optimizers() -> None:
    """A `MultiOptimizer` looks up whose each variable is before its optimizers see it."""

    @wrap(MultiOptimizer, "apply")
    def apply(stock, self, grads, trainable_variables=None):
        if trainable_variables is not None and any(map(is_sharded, trainable_variables)):
            if not self.built:
                self.build(list(trainable_variables))
            trainable_variables = [target_of(variable) for variable in trainable_variables]
        return stock(self, grads, trainable_variables)

    @wrap(MultiOptimizer, "finalize_variable_values")
    def finalize(stock, self, var_list):
        return stock(self, [target_of(variable) for variable in var_list])


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
        targets = [target_of(variable) for variable in variables]
        if not any(map(is_sharded, targets)):
            return stock(self, targets)
        if _building.get():  # an optimizer within another, or the class's own base
            stock(self, targets)
            optimizers.show_to_checkpoints(self, [state_of(target).variable for target in targets])
            return None
        with _building.set_to(True):
            return optimizer_build.build(self, targets, functools.partial(stock, self))


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
        full = full_variable(shard)
        if is_fully_sharded(full):
            full = sharded_variable.ShardedVariable([full])
        yield full, sharded_variable.ShardedVariable([average])

"""Optimizers that are built on shards: their slots start, are averaged and are swapped as those of one device."""

import functools

import keras
import numpy as np

from tfgpu.compat import optimizers, variables
from tfgpu.compat.keras import BaseOptimizer, MultiOptimizer
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, step_context
from tfgpu.core.state.sharded_variable import full_variable
from tfgpu.parallel import shard_patches
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
    shard_patches.install_averages()

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

"""Variables of experts: each device of a group holds, and updates, those of its experts.

The variable of a device is an ordinary Keras variable, of which each replica's copy has other experts. Files,
checkpoints and `get_weights` see the variable of all experts.

A layer that holds experts has weights of its own whose first axis counts experts, and the plan of its class says so:
`{"kernel": 0, "call": 0}`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as keras_private
from tfgpu.compat import variables
from tfgpu.core import replication, step_context
from tfgpu.core.state import replica_values, sharded_variable
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, model_graph, shard_patches
from tfgpu.parallel.expert.groups import Groups
from tfgpu.parallel.tensor import block_plans
from tfgpu.parallel.tensor.block_plans import TensorPlan


@dataclass(frozen=True)
class ExpertSharding:
    """A variable whose first axis counts experts, of which each device of a group has a part.

    Attributes:
        sizes: the shape of the variable of all experts.
        groups: the replicas.
    """

    sizes: tuple[int, ...]
    groups: Groups
    over_replicas = True
    holder = None
    is_in_shape = True  # an optimizer sees a part of the variable, with the same axes

    def shape(self, shards: Sequence) -> tuple[int, ...]:
        return self.sizes

    def read(self, shards: Sequence) -> np.ndarray:
        held = variables.held(shards[0])
        return np.concatenate([np.asarray(copy) for copy in held.values[: self.groups.size]])

    def write(self, shards: Sequence, value: np.ndarray | ArraySlices) -> None:
        variable = variables.held(shards[0])
        count = int(variable.shape[0])

        def part(replica: int) -> np.ndarray:
            first = replica % self.groups.size * count
            return np.asarray(value[first : first + count])

        replica_values.assign_each(variable.distribute_strategy, variable, part)


class ExpertVariable(sharded_variable.ShardedVariable):
    """What a layer reads in the place of its variable: in a replica that of its experts, elsewhere that of all."""

    def __tf_tensor__(self, dtype=None, name=None):
        if keras_private.in_symbolic_scope():
            value = tf.zeros(self.shape, self.dtype)
        elif replication.replica_context() is not None or step_context.current().is_trying:
            value = tf.convert_to_tensor(self.shards[0])
        else:
            copies = variables.held(self.shards[0]).values[: self.sharding.groups.size]
            value = tf.concat([tf.convert_to_tensor(copy) for copy in copies], 0)
        return tf.cast(value, dtype or value.dtype)


def is_of_experts(variable) -> bool:
    """Whether a variable holds other experts on other replicas."""
    info = sharded_variable.shard_info(variable)
    return info is not None and isinstance(info.sharding, ExpertSharding)


def groups_of(variable) -> Groups:
    """The groups of a variable that holds other experts on other replicas."""
    return sharded_variable.shard_info(variable).sharding.groups


def why_not(layer: keras.layers.Layer, name: str, groups: Groups) -> str | None:
    """Why a variable of a layer cannot be spread; None if it can."""
    variable = getattr(layer, name)
    if variable.shape[0] % groups.size:
        near = variable.shape[0] // groups.size * groups.size
        fit = f"{near} or {near + groups.size}" if near else f"{groups.size}"
        return f"{name} has {variable.shape[0]} experts, which {groups.size} devices do not divide ({fit} would fit)"
    if variable.regularizer is not None:
        return f"{name} has a regularizer, which would see a part of the experts; use weight decay"
    if variable.constraint is not None and not isinstance(variable.constraint, keras.constraints.NonNeg):
        return f"{name} has the constraint {type(variable.constraint).__name__}, which may see all experts"
    return None


def spread(layer: keras.layers.Layer, names: Sequence[str], placement, strategy, groups: Groups) -> None:
    """Replaces variables of a layer, in place, by those of each device's experts.

    Args:
        layer: built.
        names: its attributes.
        placement: of the replicas.
        strategy: the replicas.
        groups: of the replicas.
    """
    shards = {}
    for name in names:
        variable = getattr(layer, name)
        shard = _created(variable, placement, strategy, groups)
        shards[id(variable)] = [shard]
        object.__setattr__(layer, name, ExpertVariable([shard]))
    shard_patches.replace_variables(layer, shards)
    shard_patches.save_merged(layer)
    changed = f"the variables of {layer.name!r}, whose experts are on several devices"
    shard_patches.refuse_methods(layer, ("enable_lora", "quantize"), changed)


def _created(variable: keras.Variable, placement, strategy, groups: Groups) -> keras.Variable:
    sizes, value = tuple(variable.shape), variables.take_value(variable)  # frees its memory
    count = sizes[0] // groups.size
    with strategy.scope(), device_placement.variable_scope(placement):
        shard = keras_private.Variable(
            value[:count], dtype=variable.dtype, autocast=variables.autocasts(variable), name=variable.name
        )
    variables.rename(shard, variable.path)
    shard.constraint = variable.constraint
    shard_patches.mark_shards([shard], ExpertSharding(sizes, groups), variable.path)
    sharded_variable.ShardedVariable([shard]).assign(value)
    return shard


@dataclass(frozen=True)
class Bank:
    """A layer that holds experts.

    Attributes:
        path: the layer's, within the model.
        layer: the layer.
        plan: of its class.
        names: the attributes that hold variables of experts.
    """

    path: str
    layer: keras.layers.Layer
    plan: TensorPlan
    names: tuple[str, ...]


def find(model: keras.Model, groups: Groups) -> list[Bank]:
    """The layers that hold experts.

    Raises:
        InputError: the model has no experts, or a layer's experts cannot be spread over the devices of a group.
    """
    found = []
    for path, layer in {"": model, **model_graph.layers_within(model)}.items():
        plan = block_plans.plan_for(type(layer))
        names = () if plan is None else variables_of(layer, plan)
        if names and all(layer is not bank.layer for bank in found):
            found.append(Bank(path, layer, plan, names))
    if not found:
        raise InputError(
            f"No layer of {model.name!r} has a plan that says which of its weights belong to experts. Use "
            "`tfgpu.layers.MixtureOfExperts`, or write a plan for the class that holds them: "
            'tfgpu.parallel.register_plan(Experts, {"kernel": 0, "call": 0}).'
        )
    for bank in found:
        for name in bank.names:
            reason = why_not(bank.layer, name, groups)
            if reason is not None:
                raise InputError(f"The experts of {bank.path!r} cannot be on {groups.size} devices: {reason}.")
    return found


def variables_of(layer: keras.layers.Layer, plan: TensorPlan) -> tuple[str, ...]:
    """The names of a layer's attributes that hold weights of experts; none if the plan is another kind's.

    Raises:
        InputError: the plan names an attribute that is no weight of the layer.
    """
    weights = {name: style for name, style in plan.styles.items() if name != "call"}
    if "call" not in plan.styles or any(style != 0 for style in weights.values()):
        return ()
    found = []
    for name in weights:
        value = getattr(layer, name, None)
        if isinstance(value, keras.Variable):
            found.append(name)
        elif value is not None or not (plan.is_built_in or hasattr(layer, name)):
            raise InputError(
                f"The plan of {type(layer).__name__} names {name!r}, which is not a weight of {layer.name!r}. Name the "
                "attributes that hold its weights, and build the model first."
            )
    return tuple(found)

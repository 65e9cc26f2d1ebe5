"""Finds the layers of a model that hold experts, by the plans of their classes.

Such a layer has weights of its own whose first axis counts experts, and a plan that says so:
`{"kernel": 0, "call": 0}`.
"""

import logging
from dataclasses import dataclass

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import model_graph
from tfgpu.parallel.expert import shards
from tfgpu.parallel.expert.groups import Groups
from tfgpu.parallel.tensor import block_plans
from tfgpu.parallel.tensor.block_plans import TensorPlan

_log = logging.getLogger(__name__)


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
            f"No layer of {model.name!r} has a plan that says which of its weights are of experts. Use "
            "`tfgpu.layers.MixtureOfExperts`, or write a plan for the class that holds them: "
            'tfgpu.parallel.register_plan(Experts, {"kernel": 0, "call": 0}).'
        )
    for bank in found:
        for name in bank.names:
            reason = shards.why_not(bank.layer, name, groups)
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

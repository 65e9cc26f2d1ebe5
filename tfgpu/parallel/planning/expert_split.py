"""What the expert axis spreads of a Keras model: the weights that `parallel.apply` would; the model stays as it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import layers
from tfgpu.parallel import model_graph
from tfgpu.parallel.expert import banks
from tfgpu.parallel.tensor import block_plans


@dataclass
class ExpertSplit:
    """What is spread.

    Attributes:
        count: the number that the size of the axis must divide; 1 without experts.
        variables: the `id` of each variable of experts.
        casts: by the number of a call, bytes of its copies of experts' weights in the compute dtype.
        spreads: by the number of a call, bytes of each example that every other device gets in a pass.
        exchanges: the same, that are dealt to all devices.
    """

    count: int = 1
    variables: set[int] = field(default_factory=set)
    casts: dict[int, float] = field(default_factory=dict)
    spreads: dict[int, float] = field(default_factory=dict)
    exchanges: dict[int, float] = field(default_factory=dict)


def split(calls: Sequence[model_graph.Call]) -> ExpertSplit:
    """The experts of a model.

    Experts whose plan deals their inputs get each token for as often as it is routed; all others get every token.

    Args:
        calls: the model's own.
    """
    found, counts = ExpertSplit(), []
    for at, call in enumerate(calls):
        for layer in call.layers:
            for around in layers.layers_within(layer):
                plan = block_plans.plan_for(type(around))
                names = () if plan is None else banks.variables_of(around, plan)
                if names and id(getattr(around, names[0])) not in found.variables:
                    counts.append(_add(found, at, call, around, [getattr(around, name) for name in names], plan))
    found.count = math.gcd(*counts) or 1
    return found


def _add(found: ExpertSplit, at: int, call: model_graph.Call, layer, weights: list, plan) -> int:
    """Adds a layer of experts to what is found; returns their number."""
    count, width = weights[0].shape[:2]
    size = tf.as_dtype(layer.compute_dtype).size
    tokens = math.prod(each or 1 for each in call.inputs[0].shape[1:-1]) * width * size
    is_cast = layer.compute_dtype != weights[0].dtype
    found.variables |= set(map(id, weights))
    casts = size * sum(math.prod(each.shape) for each in weights) if is_cast else 0
    routed = max((getattr(each, "top_k", 0) for each in _around(call, layer)), default=0) or count
    spread, dealt = (0, 2 * routed * tokens) if plan.arguments else (tokens, count * tokens)
    for kept, value in ((found.casts, casts), (found.spreads, spread), (found.exchanges, dealt)):
        kept[at] = kept.get(at, 0) + value
    return count


def _around(call: model_graph.Call, layer: keras.layers.Layer) -> list:
    """The layers of a call that hold a layer."""
    within = [each for owner in call.layers for each in layers.layers_within(owner)]
    return [each for each in within if any(layer is one for one in layers.layers_within(each, include_self=False))]

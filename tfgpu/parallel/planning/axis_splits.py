"""What an axis splits of a Keras model, planned as `parallel.apply` plans it, without changing the model.

The first device of a group along `tensor` holds everything that stays whole, so it needs the most memory. It also sends
the most: in the forward pass the inputs of a segment to each other device, in the backward pass the gradient of its
outputs; the others send as much back to it. Along `expert`, experts' weights are spread.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import layers
from tfgpu.parallel import model_graph
from tfgpu.parallel.expert import shards
from tfgpu.parallel.tensor import block_plans, embeddings, partitioning


@dataclass
class TensorSplit:
    """What is split.

    Attributes:
        variables: the `id` of each variable that is split.
        kept: numbers of the calls whose results each device computes and keeps in part.
        flops: numbers of the calls whose operations the devices share.
        sent: by the number of a call, bytes that go to each other device in a forward and in a backward pass, for each
            example.
        spans: first and last call of what must be in one stage.
        loss_splits: whether the model's outputs stay split.
    """

    variables: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    flops: set[int] = field(default_factory=set)
    sent: dict[int, float] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    loss_splits: bool = False

    def add_sent(self, at: int, size: float) -> None:
        self.sent[at] = self.sent.get(at, 0.0) + size


def along_tensor(model: keras.Model, calls: Sequence[model_graph.Call], ways: int) -> TensorSplit | None:
    """Plans a model that is split into so many shards; None where nothing of it can be split.

    Args:
        model: functional or Sequential, built.
        calls: the model's own.
        ways: how many shards.
    """
    planned = partitioning.partition(model, ways)
    if planned.is_empty:
        return None
    found = TensorSplit()
    by_name = {call.name: at for at, call in enumerate(calls)}
    outputs = {id(tensor) for tensor in model_graph.functional(model).outputs}
    for path, segment in planned.segments:
        found.variables |= {id(getattr(one.layer, one.attribute)) for one in segment.splits if one.axis is not None}
        found.add_sent(_first(by_name, path), _sent(segment))
        found.loss_splits |= segment.kind == "column" and not outputs.isdisjoint(map(id, segment.outputs))
        _add_calls(found, segment, calls)
    for path, layer in planned.embeddings:
        found.variables |= {id(getattr(layer, one.attribute)) for one in embeddings.splits(layer)}
        at = _first(by_name, path)
        found.add_sent(at, bytes_of(calls[at].inputs) + bytes_of(calls[at].outputs))
    for block in planned.blocks:
        found.variables |= {id(getattr(one.layer, one.attribute)) for one in block.splits}
        at = _first(by_name, block.path)
        found.add_sent(at, bytes_of(calls[at].inputs[:1]) + bytes_of(calls[at].outputs[:1]))  # one pair
        if calls[at].layers and not model_graph.is_functional(calls[at].layers[0]):
            found.flops.add(at)
    return found


def _add_calls(found: TensorSplit, segment, calls: Sequence[model_graph.Call]) -> None:
    """Adds a segment's calls; one within a model that the model calls has none, since that is one call."""
    number = {id(call.node): at for at, call in enumerate(calls)}
    places = [number[id(call.node)] for call in segment.inner if id(call.node) in number]
    if places:
        found.flops.update(places)
        found.kept.update(places[:-1] if segment.ends_row_parallel else places)
        found.spans.append((places[0], places[-1]))


def _first(by_name: Mapping[str, int], path: str) -> int:
    """The number of the call of a layer's outermost model."""
    return by_name[path.partition("/")[0]]


def _sent(segment) -> float:
    """Bytes sent for a segment: split logits are not gathered, so their gradient is not sent either."""
    back = 0 if segment.kind == "column" else bytes_of(segment.outputs)
    return bytes_of(segment.inputs) + back


def bytes_of(tensors) -> float:
    """The bytes of symbolic tensors for each example."""
    sizes = (math.prod(size for size in each.shape[1:] if size) * tf.as_dtype(each.dtype).size for each in tensors)
    return float(sum(sizes))


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


def along_expert(calls: Sequence[model_graph.Call]) -> ExpertSplit:
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
                names = () if plan is None else shards.variables_of(around, plan)
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

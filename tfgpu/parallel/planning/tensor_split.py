"""What the tensor axis splits of a Keras model: planned as `parallel.tensor` plans it, without changing the model.

The first device of a group holds everything that stays whole, so it needs the most memory. It also sends the most: in
the forward pass the inputs of a segment to each other device, in the backward pass the gradient of its outputs; the
others send as much back to it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor import embeddings, partitioning


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


def split(model: keras.Model, calls: Sequence[model_graph.Call], ways: int) -> TensorSplit | None:
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
        found.add_sent(at, _bytes(calls[at].inputs) + _bytes(calls[at].outputs))
    for block in planned.blocks:
        found.variables |= {id(getattr(one.layer, one.attribute)) for one in block.splits}
        at = _first(by_name, block.path)
        found.add_sent(at, _bytes(calls[at].inputs[:1]) + _bytes(calls[at].outputs[:1]))  # one pair
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
    back = 0 if segment.kind == "column" else _bytes(segment.outputs)
    return _bytes(segment.inputs) + back


def _bytes(tensors) -> float:
    sizes = (math.prod(size for size in each.shape[1:] if size) * tf.as_dtype(each.dtype).size for each in tensors)
    return float(sum(sizes))

"""What the tensor axis cuts of a Keras model: planned as `parallel.tensor` plans it, and nothing is changed.

The first device of a group holds all that stays whole, so it is the one that needs most. It also sends most: forwards
what goes into a segment to each other device, backwards the gradient of what comes out, and the others send as much
back to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor import partitioning


@dataclass
class TensorSplit:
    """What lies in parts.

    Attributes:
        variables: the `id` of each that is cut.
        kept: numbers of the calls of which each device makes its part, and keeps no more for the gradient.
        flops: numbers of the calls whose operations the devices share.
        sent: by the number of a call, bytes that go to each other device in a forward pass and in a backward pass, for
            each example.
        spans: first and last call of what cannot be in two stages.
        loss_splits: whether the model's outputs are left in parts.
    """

    variables: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    flops: set[int] = field(default_factory=set)
    sent: dict[int, float] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    loss_splits: bool = False

    def send(self, at: int, size: float) -> None:
        self.sent[at] = self.sent.get(at, 0.0) + size


def split(model: keras.Model, calls: Sequence[model_graph.Call], ways: int) -> TensorSplit | None:
    """Plans a model in so many parts; None where nothing of it can be cut.

    Args:
        model: functional or Sequential, built.
        calls: the model's own.
        ways: how many parts.
    """
    plan = partitioning.partition(model, ways)
    if not plan.segments and not plan.embeddings:
        return None
    found, number = TensorSplit(), {id(call.node): at for at, call in enumerate(calls)}
    by_name = {call.name: at for at, call in enumerate(calls)}
    outputs = {id(tensor) for tensor in model_graph.functional(model).outputs}
    for path, segment in plan.segments:
        cut = [one for one in segment.cuttings if one.axis is not None]
        found.variables |= {id(getattr(one.layer, one.attribute)) for one in cut}
        places = [number[id(call.node)] for call in segment.inner if id(call.node) in number]
        found.send(by_name[path.partition("/")[0]], _sent(segment))
        if places:  # else within a model that the model calls, which is one call
            found.flops.update(places)
            found.kept.update(places[:-1] if segment.kind in ("pair", "row") else places)
            found.spans.append((places[0], places[-1]))
        found.loss_splits |= segment.kind == "column" and any(id(tensor) in outputs for tensor in segment.makes)
    for path, layer in plan.embeddings:
        found.variables.add(id(layer.embeddings))
        at = by_name[path.partition("/")[0]]
        found.send(at, _bytes(calls[at].needs) + _bytes(calls[at].makes))
    return found


def _sent(segment) -> float:
    """Logits in parts go nowhere; neither does the gradient of what is handed out in parts go to all."""
    back = 0 if segment.kind == "column" else _bytes(segment.makes)
    return _bytes(segment.needs) + back


def _bytes(tensors) -> float:
    sizes = (math.prod(size for size in each.shape[1:] if size) * tf.as_dtype(each.dtype).size for each in tensors)
    return float(sum(sizes))

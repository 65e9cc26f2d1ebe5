"""What a training step keeps between forward and backward: the tensors that the gradient of each call asks for.

Each call and its gradient are traced, not run: so a batch that would not fit can be asked about. Views (a reshape, an
identity) count as the tensor that they show; variables count nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError
from tfgpu.parallel import model_graph

_VIEWS = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "EnsureShape"}
_FREE = {"ReadVariableOp", "VarHandleOp", "Const", "Placeholder", "Shape"}

Tensors = dict[str, int]
"""Bytes by a tensor's name."""


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that a model's calls keep, in the order of the calls.

    Args:
        calls: of the model.
        own: for each call, what its gradient needs, its inputs and results among it.
        inputs: for each call, what goes into it: all that a block which begins there would have to keep.
        makes: for each call, the names of what comes out.
        outputs: of the model, which the loss keeps.
    """

    calls: tuple[model_graph.Call, ...]
    own: tuple[Tensors, ...]
    inputs: tuple[Tensors, ...]
    makes: tuple[frozenset[str], ...]
    outputs: Tensors

    def taken(self, begin: int, end: int) -> Tensors:
        """What the calls from one to before another take from before them."""
        own = set().union(*self.makes[begin:end])
        return {name: size for each in self.inputs[begin:end] for name, size in each.items() if name not in own}

    def peak(self, parts: Sequence[tuple[int, int, bool]]) -> int:
        """The most bytes that are there at once in a backward pass.

        Args:
            parts: all calls as (begin, end, whether they are computed anew).
        """
        kept: Tensors = {}
        most = 0
        for begin, end, anew in parts:
            within = _union(self.own[begin:end])
            inputs = self.taken(begin, end) if anew else {}
            most = max(most, _sum(kept | inputs | within))
            kept |= inputs if anew else within
        return max(most, _sum(kept | self.outputs))

    def between(self, parts: Sequence[tuple[int, int, bool]]) -> int:
        """The bytes that are kept from the forward to the backward pass."""
        return _sum(_union(self.taken(b, e) if anew else _union(self.own[b:e]) for b, e, anew in parts))


def measure(model: keras.Model, batch=None, *, rows: int = 8) -> SavedTensors:
    """Traces each call of a functional model with its gradient. Nothing is computed, and nothing changes.

    Args:
        model: functional or Sequential, built.
        batch: inputs as the model takes them; only their shapes count.
        rows: of the batch, where none is given.

    Raises:
        InputError: the model has no graph, or an input has a size that is not known, and no batch was given.
    """
    graph, calls = model_graph.functional(model), model_graph.calls(model)
    specs = [_spec(tensor, rows) for tensor in graph.inputs]
    if batch is not None:
        specs = [tf.TensorSpec(np.shape(x), t.dtype) for x, t in zip(tf.nest.flatten(batch), graph.inputs, strict=True)]
    found: list[tuple] = []

    @tf.function(autograph=False)
    def trace(*given):
        values = {id(tensor): value for tensor, value in zip(graph.inputs, given, strict=True)}
        with keras.StatelessScope():
            for call in calls:
                inputs = _named(values[id(tensor)] for tensor in call.needs)
                own = _own(call, values)
                found.append((own, inputs, frozenset(_named(values[id(tensor)] for tensor in call.makes))))
            found.append(_named(values[id(tensor)] for tensor in graph.outputs))
        return tf.zeros([])

    trace.get_concrete_function(*specs)
    outputs = found.pop()
    own, inputs, makes = zip(*found, strict=True)
    return SavedTensors(tuple(calls), own, inputs, makes, outputs)


def _own(call: model_graph.Call, values: dict) -> Tensors:
    """What the gradient of a call needs; leaves the call's results among the values."""
    needs = [values[id(tensor)] for tensor in call.needs]
    if not needs:
        return {}
    graph = needs[0].graph
    before = len(graph.get_operations())
    with tf.GradientTape() as tape:
        floats = [value for value in needs if value.dtype.is_floating]
        tape.watch(floats)
        model_graph.run([call], values, model_graph.in_training)
    made = [value for value in (values[id(tensor)] for tensor in call.makes) if value.dtype.is_floating]
    forward = len(graph.get_operations())
    weights = [v.value for v in getattr(call.operation, "trainable_variables", ())]
    if made:
        tape.gradient(made, [*floats, *weights])
    operations = graph.get_operations()
    mine = {op.name for op in operations[before:forward]}
    ins = _named(needs)
    found: Tensors = {}
    for op in operations[forward:]:
        for tensor in map(_shown, op.inputs):
            if tensor.name in ins or (tensor.op.name in mine and tensor.op.type not in _FREE):
                found[tensor.name] = _bytes(tensor, [*needs, *made])
    return found


def _shown(tensor) -> tf.Tensor:
    """The tensor that a view shows."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _named(tensors: Iterable) -> Tensors:
    return {shown.name: _bytes(shown) for shown in map(_shown, tensors)}


def _bytes(tensor, like: Sequence = ()) -> int:
    """A tensor's bytes; what a loop keeps has no size yet, and counts as the largest tensor that it is like."""
    if tensor.shape.is_fully_defined() and tensor.dtype not in (tf.variant, tf.resource):
        return int(np.prod(tensor.shape)) * tensor.dtype.size
    return max((_bytes(one) for one in like), default=0) if tensor.dtype != tf.resource else 0


def _spec(tensor, rows: int) -> tf.TensorSpec:
    shape = (tensor.shape[0] or rows, *tensor.shape[1:])
    if None in shape:
        raise InputError(f"The input {tensor.name!r} has a size that is not known: {tensor.shape}. Give a batch of it.")
    return tf.TensorSpec(shape, tensor.dtype)


def _union(all_of: Iterable[Tensors]) -> Tensors:
    found: Tensors = {}
    for tensors in all_of:
        found |= tensors
    return found


def _sum(tensors: Tensors) -> int:
    return sum(tensors.values())

"""What a training step keeps from the forward to the backward pass: the tensors that the gradient of each call reads.

Each call and its gradient are traced, not run, so a batch that does not fit can be measured. A view (a reshape, an
identity) counts as the tensor behind it; variables are not counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
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
        own: for each call, what its gradient reads, including the call's inputs and results.
        inputs: for each call, its inputs: what a recomputed block that begins there must keep.
        produced: for each call, the names of its results.
        outputs: of the model, which the loss keeps.
    """

    calls: tuple[model_graph.Call, ...]
    own: tuple[Tensors, ...]
    inputs: tuple[Tensors, ...]
    produced: tuple[frozenset[str], ...]
    outputs: Tensors

    def inputs_of(self, begin: int, end: int) -> Tensors:
        """What the calls from `begin` to before `end` take from earlier calls."""
        own = set().union(*self.produced[begin:end])
        return {name: size for each in self.inputs[begin:end] for name, size in each.items() if name not in own}

    def peak(self, segments: Sequence[tuple[int, int, bool]]) -> int:
        """The largest number of bytes kept at once in a backward pass.

        Args:
            segments: all calls as (begin, end, whether they are recomputed).
        """
        kept: Tensors = {}
        most = 0
        for begin, end, is_recomputed in segments:
            within = _union(self.own[begin:end])
            inputs = self.inputs_of(begin, end) if is_recomputed else {}
            most = max(most, _sum(kept | inputs | within))
            kept |= inputs if is_recomputed else within
        return max(most, _sum(kept | self.outputs))

    def kept(self, segments: Sequence[tuple[int, int, bool]]) -> int:
        """The bytes kept from the forward to the backward pass."""
        return _sum(_union(self.inputs_of(b, e) if again else _union(self.own[b:e]) for b, e, again in segments))


def measure(model: keras.Model, batch=None, *, rows: int = 8) -> SavedTensors:
    """Traces each call of a functional model with its gradient. Nothing is computed, and nothing changes.

    Args:
        model: functional or Sequential, built.
        batch: inputs as the model takes them; only their shapes matter.
        rows: of the batch, where none is given.

    Raises:
        InputError: the model has no graph, or an input has an unknown size and no batch was given.
    """
    graph, calls = model_graph.functional(model), model_graph.calls(model)
    if batch is None:
        specs = [_spec(tensor, rows) for tensor in graph.inputs]
    else:
        specs = [tf.TensorSpec(np.shape(x), t.dtype) for x, t in zip(tf.nest.flatten(batch), graph.inputs, strict=True)]
    found: list[tuple] = []

    @tf.function(autograph=False)
    def trace(*given):
        found.clear()  # a trace that makes a variable, such as Keras's global seed, is repeated
        values = {id(tensor): value for tensor, value in zip(graph.inputs, given, strict=True)}
        with keras.StatelessScope():
            for call in calls:
                inputs = _bytes_by_name(values[id(tensor)] for tensor in call.inputs)
                own = _trace_call(call, values)
                produced = frozenset(_bytes_by_name(values[id(tensor)] for tensor in call.outputs))
                found.append((own, inputs, produced))
            found.append(_bytes_by_name(values[id(tensor)] for tensor in graph.outputs))
        return tf.zeros([])

    trace.get_concrete_function(*specs)
    outputs = found.pop()
    own, inputs, produced = zip(*found, strict=True)
    return SavedTensors(tuple(calls), own, inputs, produced, outputs)


def _trace_call(call: model_graph.Call, values: dict) -> Tensors:
    """What the gradient of a call reads; adds the call's results to the values."""
    inputs = [values[id(tensor)] for tensor in call.inputs]
    if not inputs:
        return {}
    graph = inputs[0].graph
    before = len(graph.get_operations())
    with tf.GradientTape() as tape:
        floats = [value for value in inputs if value.dtype.is_floating]
        tape.watch(floats)
        model_graph.run([call], values, model_graph.in_training)
    made = [value for value in (values[id(tensor)] for tensor in call.outputs) if value.dtype.is_floating]
    forward = len(graph.get_operations())
    weights = [variables.own_copy(v.value) for v in getattr(call.operation, "trainable_variables", ())]
    if made:
        tape.gradient(made, [*floats, *weights])
    operations = graph.get_operations()
    own = {op.name for op in operations[before:forward]}
    names = _bytes_by_name(inputs)
    found: Tensors = {}
    for op in operations[forward:]:
        for tensor in map(_behind_views, op.inputs):
            if tensor.name in names or (tensor.op.name in own and tensor.op.type not in _FREE):
                found[tensor.name] = _bytes(tensor, [*inputs, *made])
    return found


def _behind_views(tensor) -> tf.Tensor:
    """The tensor that a view shows."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _bytes_by_name(tensors: Iterable) -> Tensors:
    return {tensor.name: _bytes(tensor) for tensor in map(_behind_views, tensors)}


def _bytes(tensor, like: Sequence = ()) -> int:
    """A tensor's bytes. What a loop keeps has no size in the graph, and counts as the largest tensor of `like`."""
    if tensor.shape.is_fully_defined() and tensor.dtype not in (tf.variant, tf.resource):
        return int(np.prod(tensor.shape)) * tensor.dtype.size
    return max((_bytes(one) for one in like), default=0) if tensor.dtype != tf.resource else 0


def _spec(tensor, rows: int) -> tf.TensorSpec:
    shape = (tensor.shape[0] or rows, *tensor.shape[1:])
    if None in shape:
        raise InputError(f"The input {tensor.name!r} has an unknown size: {tensor.shape}. Give a `batch` of inputs.")
    return tf.TensorSpec(shape, tensor.dtype)


def _union(all_of: Iterable[Tensors]) -> Tensors:
    found: Tensors = {}
    for tensors in all_of:
        found |= tensors
    return found


def _sum(tensors: Tensors) -> int:
    return sum(tensors.values())

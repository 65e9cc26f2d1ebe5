"""Describes a Keras model for the planner from the graph of a training step, which is traced but not run.

A tensor that the forward pass computes and the backward pass reads is kept in between; views of it (a reshape) are not
counted again. Two traces, the second with twice as many rows, show what grows with the rows. The graph does not say how
much a loop (an LSTM) keeps: a warning names such layers.
"""

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import keras
import tensorflow as tf

from tfgpu.errors import InputError
from tfgpu.parallel import model_graph
from tfgpu.parallel.pipeline import sections
from tfgpu.parallel.planning import axis_splits
from tfgpu.parallel.planning.workload import Block, Workload, in_segments

_ROWS = 4
_VIEWS = {"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
_READ_NO_VALUES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
_FREE = {"Const", "ReadVariableOp", "VarHandleOp"}  # variables are counted as such

_log = logging.getLogger(__name__)


@dataclass
class _Traced:
    """Bytes kept and operations of each call, bytes kept of the inputs, and calls that keep unknown sizes."""

    kept: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    given: float = 0.0
    unknown: set[str] = field(default_factory=set)


def workload(model: keras.Model) -> Workload:
    """Describes a functional Keras model for the planner.

    Its blocks are the runs of layers between places that a single tensor crosses. A model with layers that mix the rows
    of a batch is not split into stages.

    Args:
        model: functional or Sequential, built; all sizes of its inputs but the rows are known.

    Raises:
        InputError: the model has no graph, or an input has an unknown size.

    Example:
        >>> layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)]
        >>> found = workload(keras.Sequential(layers))
        >>> found.parameters, [round(block.kept_whole) for block in found.blocks]  # the input; what relu made
        (212, [96, 0])
    """
    calls = model_graph.calls(model)
    few, many = _trace(model, calls, _ROWS), _trace(model, calls, 2 * _ROWS)
    for name in sorted(many.unknown):
        _log.warning("The size of what the loop of %r keeps for its gradient is unknown and not in the plan.", name)
    costs, given = _costs(calls, few, many), (many.given - few.given) / _ROWS

    @functools.cache
    def cutter(ways: int) -> Workload | None:
        found = axis_splits.along_tensor(model, calls, ways)
        return None if found is None else _described(model, calls, costs, given, found, ways)

    return replace(_described(model, calls, costs, given), cutter=cutter)


@dataclass(frozen=True)
class _Cost:
    """What one call needs: bytes kept per example and per pass, operations per example, and its own variables."""

    kept: float
    casts: float
    flops: float
    variables: tuple


def _costs(calls: Sequence[model_graph.Call], few: _Traced, many: _Traced) -> list[_Cost]:
    found = []
    for at, variables in enumerate(_variables(calls)):
        slope = (many.kept[at] - few.kept[at]) / _ROWS
        flops = (many.flops[at] - few.flops[at]) / _ROWS
        found.append(_Cost(slope, few.kept[at] - _ROWS * slope, flops, tuple(variables)))
    return found


def _described(
    model: keras.Model,
    calls: Sequence[model_graph.Call],
    costs: Sequence[_Cost],
    given: float,
    split=None,
    ways: int = 1,
) -> Workload:
    """The model as blocks.

    Args:
        model, calls, costs: what is described.
        given: bytes kept of each example itself.
        split: what the tensor axis splits, a `TensorSplit`; None splits nothing.
        ways: the size of the tensor axis.
    """
    split = split or axis_splits.TensorSplit()
    experts = axis_splits.along_expert(calls)
    size = next((_bytes(v) // max(1, math.prod(v.shape)) for v in model.trainable_variables), 4)
    free = [at for at in _places(model, calls) if not any(first < at <= last for first, last in split.spans)]
    blocks = [
        _block(model, calls, costs, range(begin, end), given if begin == 0 else 0, split, ways, size, experts)
        for begin, end in itertools.pairwise([0, *free, len(calls)])
    ]
    return Workload(
        model.name,
        tuple(blocks),
        size,
        model.dtype_policy.name,
        outputs=sum(_row_bytes(tensor) for tensor in model_graph.functional(model).outputs),
        experts=experts.count,
        segments=in_segments([block.kept_whole + block.kept_split for block in blocks]),
        most_stages=1 if any(map(sections.is_known_to_mix_rows, calls)) else len(blocks),
        loss_splits=split.loss_splits,
    )


def _block(
    model, calls, costs, inner: range, given: float, split: axis_splits.TensorSplit, ways: int, size, experts
) -> Block:
    """One block: the calls at the positions `inner`, with parameters of `size` bytes."""
    owned = [variable for at in inner for variable in costs[at].variables]

    def count(trains: bool, is_split: bool) -> int:
        mine = [v for v in owned if v.trainable == trains and (id(v) in split.variables) == is_split]
        return sum(map(_bytes, mine)) // size

    def of_experts(trains: bool) -> int:
        return sum(_bytes(v) for v in owned if v.trainable == trains and id(v) in experts.variables) // size

    def of_calls(found: dict[int, float]) -> float:
        return sum(found.get(at, 0) for at in inner)

    def total(name: str, among) -> float:
        return sum(getattr(costs[at], name) for at in inner if at in among)

    return Block(
        calls[inner[0]].name,
        split=count(True, True),
        whole=count(True, False),
        frozen=count(False, False),
        frozen_split=count(False, True),
        experts=of_experts(True),
        frozen_experts=of_experts(False),
        kept_split=total("kept", split.kept),
        kept_whole=total("kept", set(inner) - split.kept) + given,
        casts=total("casts", inner),
        casts_whole=total("casts", set(inner) - split.flops) if ways > 1 else 0,
        casts_experts=min(of_calls(experts.casts), total("casts", inner)),
        takes=sum(_row_bytes(tensor) for tensor in _crossing(model, calls, inner[0])),
        flops=total("flops", inner),
        flops_whole=total("flops", set(inner) - split.flops) if ways > 1 else 0,
        # As for an all-reduce, which sends 2 (ways - 1) / ways of it in the forward and the backward pass.
        reduces=of_calls(split.sent) * ways / 4,
        spreads=of_calls(experts.spreads),
        exchanges=of_calls(experts.exchanges),
    )


def _trace(model: keras.Model, calls: Sequence[model_graph.Call], rows: int) -> _Traced:
    graph, ends = model_graph.functional(model), []

    @tf.function(autograph=False)
    def step(*given):
        values = dict(zip(map(id, graph.inputs), given, strict=True))
        here = tf.compat.v1.get_default_graph()
        with keras.StatelessScope(), tf.GradientTape() as tape:
            for call in calls:
                model_graph.run([call], values, model_graph.in_training)
                ends.append(len(here.get_operations()))
        weights = [v.value for v in model.trainable_variables]
        outputs = [values[id(tensor)] for tensor in graph.outputs]
        found = tape.gradient([value for value in outputs if value.dtype.is_floating], weights)
        return [gradient for gradient in found if gradient is not None]

    made = step.get_concrete_function(*(tf.TensorSpec(_shape(tensor, rows), tensor.dtype) for tensor in graph.inputs))
    return _read(made.graph.get_operations(), calls, ends)


def _read(operations: Sequence[tf.Operation], calls: Sequence[model_graph.Call], ends: Sequence[int]) -> _Traced:
    number = {operation: at for at, operation in enumerate(operations)}
    found = _Traced([0.0] * len(calls), [0.0] * len(calls))
    forward = ends[-1] if ends else 0
    kept = {}
    for operation in operations[forward:]:
        if operation.type in _READ_NO_VALUES:
            continue
        for tensor in map(_root, operation.inputs):
            if number[tensor.op] < forward and tensor.op.type not in _FREE and tensor.dtype != tf.resource:
                kept[tensor.ref()] = tensor
    for tensor in kept.values():
        at = _call_of(number[tensor.op], ends)
        if tensor.op.type == "Placeholder" and tensor.shape.is_fully_defined():
            found.given += tensor.shape.num_elements() * tensor.dtype.size
        elif tensor.dtype == tf.variant or not tensor.shape.is_fully_defined():
            found.unknown.add(calls[at].name)
        else:
            found.kept[at] += tensor.shape.num_elements() * tensor.dtype.size
    for at, operation in enumerate(operations[:forward]):
        found.flops[_call_of(at, ends)] += _flops(operation)
    return found


def _root(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _call_of(number: int, ends: Sequence[int]) -> int:
    return next(at for at, end in enumerate(ends) if number < end)


def _flops(operation: tf.Operation) -> float:
    """Operations of one node: those of a product; for other nodes, one for each number of the result."""
    made = operation.outputs[0].shape if operation.outputs else tf.TensorShape(None)
    if not made.is_fully_defined() or operation.type in _FREE | _VIEWS | {"Placeholder"}:
        return 0
    count, shapes = made.num_elements(), [tensor.shape for tensor in operation.inputs]
    if operation.type == "MatMul":
        return 2 * count * shapes[0][0 if operation.get_attr("transpose_a") else 1]
    if operation.type.startswith("BatchMatMul"):
        return 2 * count * shapes[0][-2 if operation.get_attr("adj_x") else -1]
    if operation.type == "Einsum":
        names = operation.get_attr("equation").decode().split("->")[0].split(",")
        sizes = {}
        for name, shape in zip(names, shapes, strict=True):
            batch = "".join(chr(ord("α") + at) for at in range(len(shape) - len(name) + 3))
            sizes |= zip(name.replace("...", batch), shape, strict=True)
        return 2 * math.prod(sizes.values())
    if operation.type.startswith(("Conv2D", "Conv3D")):
        return 2 * count * math.prod(shapes[1][:-1])
    if operation.type == "DepthwiseConv2dNative":
        return 2 * count * math.prod(shapes[1][:2])
    return count


def _variables(calls: Sequence[model_graph.Call]) -> list[list]:
    """The variables of each call, except those of earlier calls."""
    seen, found = set(), []
    for call in calls:
        mine = [v for v in getattr(call.operation, "variables", ()) if id(v) not in seen]
        seen.update(map(id, mine))
        found.append(mine)
    return found


def _places(model: keras.Model, calls: Sequence[model_graph.Call]) -> list[int]:
    """The calls before which the model can be cut: one tensor crosses, and no layer is on both sides."""
    last = {id(call.operation): at for at, call in enumerate(calls)}
    reach, places = 0, []
    for at, call in enumerate(calls):
        if at and reach < at and len(_crossing(model, calls, at)) == 1:
            places.append(at)
        reach = max(reach, last[id(call.operation)])
    return places


def _crossing(model: keras.Model, calls: Sequence[model_graph.Call], at: int) -> list:
    """The tensors that calls from a position on take from earlier ones."""
    own = {id(tensor) for call in calls[at:] for tensor in call.outputs}
    needed = {id(tensor): tensor for call in calls[at:] for tensor in call.inputs}
    needed |= {id(tensor): tensor for tensor in model_graph.functional(model).outputs}
    return [tensor for key, tensor in needed.items() if key not in own]


def _shape(tensor, rows: int) -> tuple:
    if None in tensor.shape[1:]:
        raise InputError(
            f"The input {tensor.name!r} has an unknown size: {tensor.shape}. Build the model with fixed sizes "
            "for all axes but the rows."
        )
    return (rows, *tensor.shape[1:])


def _row_bytes(tensor) -> int:
    return int(axis_splits.bytes_of([tensor]))


def _bytes(variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size

"""What the indices of a lookup depend on, read from the graph: what is alike on all replicas, or a replica's rows.

A table that is looked up by position (`table(ops.arange(5))`) has one slice for each position on one device; each
replica has its part of that slice. A table that is looked up by the rows of a batch has slices of its own for each row.
The values of the indices do not tell the two apart: rows may hold equal numbers.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import slots, variables
from tfgpu.compat import tensorflow as private
from tfgpu.core.randomness.tensor_origin import READS_DATA, captured_by

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"}
_BY_ELEMENT = set(
    "Identity Cast Neg Abs Relu Relu6 Selu Elu Tanh Sigmoid Softmax Exp Log Sqrt Square AddV2 Add Sub Mul RealDiv Div "
    "FloorDiv FloorMod Maximum Minimum BiasAdd SelectV2 NotEqual Equal Less LessEqual Greater GreaterEqual "
    "LogicalAnd LogicalOr LogicalNot ClipByValue StopGradient ZerosLike OnesLike Pad PadV2 Slice EnsureShape".split()
)
"""The axes of what these give, other than the first, have sizes that follow from those of their inputs."""


class Origin(enum.Enum):
    """What a tensor depends on."""

    ALIKE = "nothing that differs between replicas"
    UNIQUE = "a replica's rows, of which it holds each number once"
    ROWS = "a replica's rows"
    UNKNOWN = "what the graph does not tell"


class _Use(enum.Enum):
    VALUE = "the numbers of a tensor"
    SHAPE = "the sizes of its axes other than the first"
    UNSURE = "it may be used"


@dataclass(frozen=True)
class _Place:
    """A tensor, the calls of functions that lead to its graph, and what is used of it."""

    tensor: tf.Tensor
    calls: tuple[tf.Operation, ...] = ()
    use: _Use = _Use.VALUE


def mark(values: object, *, alike: bool) -> None:
    """Says of the tensors of a structure whether they are alike on all replicas, where their graph does not tell."""
    for value in tf.nest.flatten(values, expand_composites=True):
        if tf.is_tensor(value) and hasattr(value, "op") and not hasattr(value, "numpy"):
            slots.of(value).is_alike = alike


def origin_of(indices: tf.Tensor, calls: tuple[tf.Operation, ...] = ()) -> Origin:
    """What the indices of a lookup depend on.

    Args:
        indices: a tensor of the graph under construction; of an eager one nothing is known.
        calls: of functions, from the outside in, that lead to its graph.
    """
    if hasattr(indices, "numpy") or not hasattr(indices, "op"):
        return Origin.UNKNOWN
    start = _Place(indices, calls)
    unique = _unique_below(start)
    if unique is not None:
        found = _walk(_inputs(unique)[0])
        return Origin.UNIQUE if found is Origin.ROWS else found
    return _walk(start)


def inner(place: tuple) -> tuple:
    """A tensor within the function whose call gives it, and past what changes nothing: (tensor, calls)."""
    tensor, calls = place
    while True:
        op = tensor.op
        if op.type in ("Identity", "IdentityN", "StopGradient") and not hasattr(op.inputs[tensor.value_index], "numpy"):
            tensor = op.inputs[tensor.value_index]
        elif op.type in _CALLS and (graph := private.graph_of_call(op)) is not None:
            tensor, calls = graph.outputs[tensor.value_index], (*calls, op)
        else:
            return tensor, calls


def _walk(start: _Place) -> Origin:
    """What a tensor depends on: a replica's rows, as soon as one way leads there."""
    waiting, seen, is_unknown = [start], set(), False
    while waiting:
        place = waiting.pop()
        key = id(place.tensor), place.calls, place.use
        if key in seen:
            continue
        seen.add(key)
        found = _known(place)
        if found is None:
            waiting += _inputs(place)
        elif found is Origin.ROWS and place.use is _Use.VALUE:
            return found
        elif found is not Origin.ALIKE and place.use is not _Use.SHAPE:
            is_unknown = True
    return Origin.UNKNOWN if is_unknown else Origin.ALIKE


def _known(place: _Place) -> Origin | None:
    """What is known of a tensor by itself, or None: then its inputs decide."""
    tensor = place.tensor
    if hasattr(tensor, "numpy") or not hasattr(tensor, "op"):  # captured from eager code: a constant
        return Origin.ALIKE
    if (is_alike := slots.get(tensor, "is_alike")) is not None:
        return Origin.ALIKE if is_alike else Origin.ROWS
    op = tensor.op
    if tensor.dtype == tf.resource or op.type == "Const":  # but a list of tensors (a variant) may hold rows
        return Origin.ALIKE
    if op.type in READS_DATA:
        return Origin.ROWS
    if op.type == "ReadVariableOp":
        copy = variables.read_by(op)
        return Origin.ROWS if copy is not None and slots.get(copy, "differs_by_replica") else Origin.ALIKE
    if op.type == "Placeholder":
        return None if _argument(place) is not None else Origin.ROWS
    is_random = op.op_def is not None and op.op_def.is_stateful and op.type not in {*_CALLS, *_BRANCHES}
    return Origin.ROWS if is_random and op.type != "ResourceGather" else None


def _inputs(place: _Place) -> list[_Place]:
    """What a tensor is made of, and what is used of that."""
    tensor, calls, use, op = place.tensor, place.calls, place.use, place.tensor.op
    if op.type == "Placeholder":
        return [_argument(place)]
    if op.type in _CALLS and (graph := private.graph_of_call(op)) is not None:
        return [_Place(graph.outputs[tensor.value_index], (*calls, op), use)]
    if op.type in _CALLS | _BRANCHES:
        use = _Use.UNSURE
    elif op.type == "IdentityN":
        return [_Place(op.inputs[tensor.value_index], calls, use)]
    elif use is _Use.SHAPE:
        return list(_of_shape(place))
    elif (of := _measured(tensor)) is not None:
        return [_Place(of, calls, _Use.SHAPE)]
    return [_Place(each, calls, use) for each in op.inputs]


def _argument(place: _Place) -> _Place | None:
    """What a placeholder stands for: a captured tensor, or what a function is called with; None for other arguments."""
    tensor, calls = place.tensor, place.calls
    if calls and (graph := private.graph_of_call(calls[-1])) is tensor.graph:
        at = next(at for at, each in enumerate(graph.inputs) if each is tensor)
        return _Place(calls[-1].inputs[at], calls[:-1], place.use)
    outer = captured_by(tensor)
    return None if outer is None else _Place(outer, calls, place.use)


def _measured(tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor of whose shape `tensor` is a part without the first axis; None if it is no such part."""
    op = tensor.op
    if op.type == "Unpack":
        of, first = op.inputs[0], tensor.value_index
    elif op.type == "StridedSlice":
        of, first = op.inputs[0], tf.get_static_value(op.inputs[1])
        first = None if first is None or len(first) != 1 or op.get_attr("begin_mask") else int(first[0])
    else:
        return None
    while of.op.type in ("Identity", "Cast"):
        of = of.op.inputs[0]
    if of.op.type != "Shape" or first is None:
        return None
    of = of.op.inputs[0]
    if first < 0 and of.shape.rank is not None:
        first += of.shape.rank
    return of if first > 0 else None


def _of_shape(place: _Place) -> Iterator[_Place]:
    """Of what the sizes of a tensor's axes, other than the first, follow."""
    op = place.tensor.op
    if op.type in _BY_ELEMENT:
        yield from (_Place(each, place.calls, _Use.SHAPE) for each in op.inputs)
    elif op.type == "StridedSlice" and not op.get_attr("new_axis_mask"):
        yield _Place(op.inputs[0], place.calls, _Use.SHAPE)
    elif op.type in ("GatherV2", "ResourceGather"):  # rows of a table, one for each index
        yield _Place(op.inputs[0], place.calls, _Use.UNSURE)
        yield _Place(op.inputs[1], place.calls, _Use.SHAPE)
    else:
        yield from (_Place(each, place.calls, _Use.UNSURE) for each in op.inputs)


def _unique_below(place: _Place) -> _Place | None:
    """The numbers without repetition (`tf.unique`) from which a tensor follows one by one."""
    if hasattr(place.tensor, "numpy") or not hasattr(place.tensor, "op"):
        return None
    op = place.tensor.op
    if op.type in ("Unique", "UniqueV2"):
        return place if place.tensor.value_index == 0 else None
    if op.type in ("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "StopGradient"):
        return _unique_below(_Place(op.inputs[0], place.calls))
    if op.type == "IdentityN" or op.type in _CALLS or op.type == "Placeholder":
        inputs = _inputs(place) if op.type != "Placeholder" or _argument(place) is not None else []
        return _unique_below(inputs[0]) if len(inputs) == 1 else None
    if op.type in ("SelectV2", "AddV2"):  # Keras replaces negative indices
        found = [_unique_below(_Place(each, place.calls)) for each in op.inputs[-2:]]
        return next((each for each in found if each is not None), None)
    return None

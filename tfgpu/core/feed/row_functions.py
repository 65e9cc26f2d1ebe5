"""Which functions of a batch give each row its own value, the same to the bit whatever the number of rows.

Read from the function's graph, operation by operation. An operation counts if its rows cannot meet, and if its kernel
rounds a row alike wherever in the batch it stands: a product does, an exponential need not, because kernels compute
several numbers at once and the rest one by one. What is not known here counts as one that lets rows meet.
"""

from collections.abc import Callable, Sequence
from enum import Enum

import tensorflow as tf


class Kind(Enum):
    """What a tensor holds: rows of the batch along its first axis, or what has nothing to do with rows."""

    ROWS = "rows"
    FREE = "free"


_EXACT = frozenset(
    "Abs Add AddV2 AsString Cast Ceil ClipByValue Equal Floor FloorDiv FloorMod Greater GreaterEqual Identity Invert "
    "IsFinite IsInf IsNan Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul Neg NotEqual OnesLike "
    "RealDiv RegexFullMatch RegexReplace Relu Relu6 Rint Round SelectV2 Sign Square StaticRegexFullMatch "
    "StaticRegexReplace StopGradient StringLength StringLower StringStrip StringToHashBucketFast StringToNumber "
    "StringUpper Sub TruncateDiv ZerosLike".split()
)
"""Element by element, with operands that are stretched to one shape."""
_FIRST_BY_ROWS = frozenset("ResizeNearestNeighbor DecodeRaw".split())
"""Row by row of the first input; the others are free."""


def gives_rows(
    function: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]], given: Sequence[tuple[tf.TensorSpec, Kind]]
) -> bool:
    """Whether each row that a function gives depends on the same row of what it takes, and on nothing else.

    Args:
        function: takes and gives lists of tensors; it is traced.
        given: for each tensor that it takes, its spec, in which the number of rows is unknown, and its kind.
    """
    taken, made = [], []

    def trace(*tensors):
        taken.extend(tensors)
        made.extend(function(tensors))
        return made

    try:
        traced = tf.function(trace, autograph=False).get_concrete_function(*[spec for spec, _ in given])
    except (ValueError, TypeError):
        return False  # its shapes need the number of rows
    found = {tensor.name: kind for tensor, (_, kind) in zip(taken, given, strict=True)}
    for operation in traced.graph.get_operations():
        if operation.type == "Placeholder":
            found.setdefault(operation.outputs[0].name, Kind.FREE)  # what the function has captured
            continue
        kind = _kind_of(operation, [found.get(tensor.name) for tensor in operation.inputs])
        found |= {output.name: kind for output in operation.outputs}
    return all(found.get(tensor.name) is Kind.ROWS and tensor.shape.rank for tensor in made)


def _kind_of(operation: tf.Operation, kinds: Sequence[Kind | None]) -> Kind | None:
    """What an operation gives; None if that is not known."""
    if None in kinds:
        return None
    if Kind.ROWS not in kinds:
        return Kind.FREE
    if any(tensor.shape.rank is None for tensor in [*operation.inputs, *operation.outputs]):
        return None
    if operation.type in _EXACT:
        is_by_rows = _is_stretched_by_rows(operation, kinds)
    elif kinds[0] is Kind.ROWS and Kind.ROWS not in kinds[1:]:
        is_by_rows = operation.type in _FIRST_BY_ROWS or _keeps_first_axis(operation, kinds)
    else:
        is_by_rows = _joins(operation, kinds)
    return Kind.ROWS if is_by_rows else None


def _is_stretched_by_rows(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether the first axis of the result is that of all operands with rows, and no other operand has it."""
    rank = operation.outputs[0].shape.rank
    for tensor, kind in zip(operation.inputs, kinds, strict=True):
        if kind is Kind.ROWS and tensor.shape.rank != rank:
            return False
        if kind is Kind.FREE and tensor.shape.rank == rank and tensor.shape[0] != 1:
            return False
    return rank > 0


def _known(tensor: tf.Tensor) -> list[int] | None:
    found = tf.get_static_value(tensor)
    return None if found is None else found.reshape(-1).tolist()


def _are_within(axes: Sequence[int] | None, rank: int) -> bool:
    """Whether axes, of a tensor of that rank, leave its first axis out."""
    return axes is not None and all(axis % rank for axis in axes)


def _joins(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether an operation of several inputs, not of the first alone, gives rows."""
    rank = operation.inputs[0].shape.rank
    match operation.type:
        case "ConcatV2":
            return Kind.FREE not in kinds[:-1] and _are_within(_known(operation.inputs[-1]), rank)
        case "Pack":
            return Kind.FREE not in kinds and _are_within([operation.get_attr("axis")], rank + 1)
        case "LookupTableFindV2":
            return kinds == [Kind.FREE, Kind.ROWS, Kind.FREE]
        case "GatherV2":  # rows of a table, at places that the batch's rows give
            is_whole_row = _known(operation.inputs[2]) == [0] and not operation.get_attr("batch_dims")
            return is_whole_row and kinds == [Kind.FREE, Kind.ROWS, Kind.FREE]
    return False


def _keeps_first_axis(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether each row of the first input, which alone has rows, stays by itself."""
    values = operation.inputs[0].shape
    others = [_known(each) for each in operation.inputs[1:]]
    known = others[0] if others else None
    match operation.type:
        case "All" | "Any" | "Max" | "Min" | "ArgMax" | "ArgMin" | "ReverseV2":
            return _are_within(known, values.rank)
        case "ExpandDims":
            return _are_within(known, values.rank + 1)
        case "Squeeze":
            axes = operation.get_attr("squeeze_dims")
            return bool(axes) and _are_within(axes, values.rank)
        case "Transpose":
            return known is not None and known[0] == 0
        case "OneHot":
            return operation.get_attr("axis") == -1
        case "GatherV2":  # columns of the batch's rows
            return not operation.get_attr("batch_dims") and _are_within(others[1], values.rank)
        case "Reshape":  # each row keeps its numbers
            if not known or known[0] != -1 or None in values[1:].as_list():
                return False
            return tf.TensorShape(known[1:]).num_elements() == values[1:].num_elements()
        case "Pad" | "PadV2" | "MirrorPad":
            return known is not None and known[:2] == [0, 0]
        case "Tile":
            return known is not None and known[0] == 1
        case "ParseExampleV2":
            return _parses(operation)
        case "StridedSlice":
            return _slices(operation, others[2])
    return _joins(operation, kinds)


def _parses(operation: tf.Operation) -> bool:
    """Whether each serialized example gives arrays of fixed shapes: others are sparse, or padded to the longest."""
    others = [operation.get_attr(name) for name in ("num_sparse", "ragged_value_types")]
    is_named = operation.inputs[1].shape.num_elements() != 0
    if any(others) or is_named or operation.inputs[0].shape.rank != 1:
        return False
    return all(tf.TensorShape(each).is_fully_defined() for each in operation.get_attr("dense_shapes"))


def _slices(operation: tf.Operation, strides: list[int] | None) -> bool:
    """Whether a slice `[:, ...]` or `[..., at]` leaves the first axis whole."""
    names = "begin", "end", "ellipsis", "new_axis", "shrink_axis"
    begin, end, ellipsis, new_axis, shrink_axis = (operation.get_attr(f"{name}_mask") for name in names)
    if not strides or new_axis:
        return False
    if ellipsis & 1:  # the others are of the last axes
        return len(strides) - 1 < operation.inputs[0].shape.rank
    return bool(begin & end & 1) and not shrink_axis & 1 and strides[0] == 1

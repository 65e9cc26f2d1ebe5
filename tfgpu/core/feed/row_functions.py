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
_REDUCTIONS = frozenset("All Any Max Min ArgMax ArgMin".split())
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
    judge = _JUDGES.get(operation.type)
    if operation.type in _EXACT:
        judge = _is_stretched_by_rows
    elif operation.type in _REDUCTIONS:
        judge = _reduces_within_rows
    elif operation.type in _FIRST_BY_ROWS:
        judge = _is_first_alone
    return Kind.ROWS if judge is not None and judge(operation, kinds) else None


def _is_stretched_by_rows(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether the first axis of the result is that of all operands with rows, and no other operand has it."""
    rank = operation.outputs[0].shape.rank
    for tensor, kind in zip(operation.inputs, kinds, strict=True):
        if kind is Kind.ROWS and tensor.shape.rank != rank:
            return False
        if kind is Kind.FREE and tensor.shape.rank == rank and tensor.shape[0] != 1:
            return False
    return rank > 0


def _is_first_alone(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    return kinds[0] is Kind.ROWS and Kind.ROWS not in kinds[1:]


def _known(tensor: tf.Tensor) -> list[int] | None:
    found = tf.get_static_value(tensor)
    return None if found is None else found.reshape(-1).tolist()


def _are_within(axes: Sequence[int] | None, rank: int) -> bool:
    """Whether axes, of a tensor of that rank, leave its first axis out."""
    return axes is not None and all(axis % rank for axis in axes)


def _reduces_within_rows(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    values, axes = operation.inputs
    return _is_first_alone(operation, kinds) and _are_within(_known(axes), values.shape.rank)


def _expands(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    values, axes = operation.inputs
    return _is_first_alone(operation, kinds) and _are_within(_known(axes), values.shape.rank + 1)


def _squeezes(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    axes = operation.get_attr("squeeze_dims")
    return bool(axes) and _are_within(axes, operation.inputs[0].shape.rank)


def _transposes(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    order = _known(operation.inputs[1])
    return _is_first_alone(operation, kinds) and order is not None and order[0] == 0


def _joins(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    *values, axis = operation.inputs
    return Kind.FREE not in kinds[:-1] and _are_within(_known(axis), values[0].shape.rank)


def _packs(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    return Kind.FREE not in kinds and _are_within([operation.get_attr("axis")], operation.inputs[0].shape.rank + 1)


def _is_one_hot(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    return _is_first_alone(operation, kinds) and operation.get_attr("axis") == -1


def _gathers(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Rows of a table, at places that the batch's rows give; or columns of the batch's rows."""
    axis = _known(operation.inputs[2])
    if axis is None or operation.get_attr("batch_dims") or kinds[2] is not Kind.FREE:
        return False
    if kinds[0] is Kind.FREE:
        return axis == [0] and kinds[1] is Kind.ROWS
    return kinds[1] is Kind.FREE and _are_within(axis, operation.inputs[0].shape.rank)


def _looks_up(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    return kinds == [Kind.FREE, Kind.ROWS, Kind.FREE]


def _reshapes(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether each row keeps its numbers."""
    values, shape = operation.inputs[0].shape, _known(operation.inputs[1])
    if not _is_first_alone(operation, kinds) or not shape or shape[0] != -1 or None in values[1:].as_list():
        return False
    return tf.TensorShape(shape[1:]).num_elements() == values[1:].num_elements()


def _pads(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    found = _known(operation.inputs[1])
    return _is_first_alone(operation, kinds) and found is not None and found[:2] == [0, 0]


def _tiles(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    found = _known(operation.inputs[1])
    return _is_first_alone(operation, kinds) and found is not None and found[0] == 1


def _parses(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether each serialized example gives arrays of fixed shapes: others are sparse, or padded to the longest."""
    shapes = operation.get_attr("dense_shapes")
    others = [operation.get_attr(name) for name in ("num_sparse", "ragged_value_types")]
    is_named = operation.inputs[1].shape.num_elements() != 0
    if any(others) or is_named or not _is_first_alone(operation, kinds):
        return False
    return operation.inputs[0].shape.rank == 1 and all(tf.TensorShape(each).is_fully_defined() for each in shapes)


def _slices(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    """Whether a slice `[:, ...]` or `[..., at]` leaves the first axis whole."""
    masks = {
        name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    strides = _known(operation.inputs[3])
    if not _is_first_alone(operation, kinds) or not strides or masks["new_axis"]:
        return False
    if masks["ellipsis"] & 1:  # the others are of the last axes
        return len(strides) - 1 < operation.inputs[0].shape.rank
    return bool(masks["begin"] & masks["end"] & 1) and not masks["shrink_axis"] & 1 and strides[0] == 1


_JUDGES = {
    "ConcatV2": _joins,
    "ExpandDims": _expands,
    "GatherV2": _gathers,
    "LookupTableFindV2": _looks_up,
    "MirrorPad": _pads,
    "OneHot": _is_one_hot,
    "Pack": _packs,
    "Pad": _pads,
    "PadV2": _pads,
    "ParseExampleV2": _parses,
    "Reshape": _reshapes,
    "ReverseV2": _reduces_within_rows,
    "Squeeze": _squeezes,
    "StridedSlice": _slices,
    "Tile": _tiles,
    "Transpose": _transposes,
}

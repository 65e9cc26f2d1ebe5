"""The lookups of which a sparse gradient is made, each with what its indices depend on."""

import inspect
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import step_context
from tfgpu.core.sparse import index_origin
from tfgpu.core.sparse.index_origin import Origin

_MOST = 64
"""Operations between constants and the indices of a lookup up to which these are computed while a step is traced."""


@dataclass(frozen=True)
class Lookup:
    """The slices of one lookup in a gradient.

    Attributes:
        origin: what its indices depend on.
        count: how many slices: an int, else an int32 scalar.
        indices: a vector; None where they are known together with those of other lookups only.
        is_certain: whether the origin is known, not the likelier of two.
    """

    origin: Origin
    count: int | tf.Tensor
    indices: tf.Tensor | None = None
    is_certain: bool = True


def lookups_of(indices: tf.Tensor, rows: int | None) -> list[Lookup]:
    """The lookups of which a gradient's indices are put together, in their order.

    Args:
        indices: a vector.
        rows: how many the code that looked the table up has seen; None if that is not known before the step runs.
    """
    if hasattr(indices, "numpy"):
        return [Lookup(Origin.UNKNOWN, indices.shape[0], indices)]
    parts = _parts((indices, ()))
    if len(parts) == 1:
        origin, is_certain = _origin(*parts[0], rows)
        return [Lookup(origin, _size(indices), indices, is_certain)]
    if any(calls and tensor.shape[0] is None for tensor, calls in parts):
        return [Lookup(Origin.UNKNOWN, _size(indices), indices)]  # of a function's graph, whose sizes stay there
    found = []
    for tensor, calls in parts:
        origin, is_certain = _origin(tensor, calls, rows)
        found.append(Lookup(origin, _size(tensor), None if calls else tensor, is_certain))
    return found


def _size(vector: tf.Tensor) -> int | tf.Tensor:
    return tf.size(vector) if vector.shape[0] is None else vector.shape[0]


def _parts(place: tuple) -> list[tuple]:
    """The tensors that are concatenated in a vector, with the calls that lead to them."""
    tensor, calls = index_origin.inner(place)
    op = tensor.op
    if op.type == "Reshape" and op.inputs[0].shape.rank == 1 and tensor.shape.rank == 1:
        return _parts((op.inputs[0], calls))
    if op.type != "ConcatV2" or tensor.shape.rank != 1:
        return [(tensor, calls)]
    return [part for each in op.inputs[:-1] for part in _parts((each, calls))]


def _origin(tensor: tf.Tensor, calls: tuple, rows: int | None) -> tuple[Origin, bool]:
    """What the indices of a lookup depend on, and whether that is certain.

    In a batch of static size nothing in the graph tells how often a constant is repeated: once for each row
    (`ops.zeros(ops.shape(x)[0])`), or as often on one device. A table that has the same indices for each row is taken
    to be looked up by rows.
    """
    origin = index_origin.origin_of(tensor, calls)
    if origin is not Origin.ALIKE or rows is None:
        return origin, True
    repeated = is_repeated(_unflattened(tensor), rows)
    if repeated is None:
        return Origin.UNKNOWN, True
    if not repeated:
        return origin, True
    if rows == 1:  # nothing can be repeated, and positions are the common case
        return origin, False
    index_origin.mark(tensor, alike=False)  # a pipeline asks for its micro-batches before the replicas do
    return Origin.ROWS, _unflattened(tensor).shape.rank > 1


def is_repeated(tensor: tf.Tensor, rows: int) -> bool | None:
    """Whether a tensor of constants and weights holds the same numbers for each of `rows` rows; None if not known."""
    if not tensor.shape.rank or tensor.shape[0] != rows:
        return False
    values = _Values().of(tensor)
    return None if values is None else bool((values == values[:1]).all())


def _unflattened(tensor: tf.Tensor) -> tf.Tensor:
    """The indices as they were passed to the lookup: its gradient has them as a vector."""
    while not hasattr(tensor, "numpy") and tensor.op.type in ("Reshape", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def static_rows() -> int | None:
    """How many rows this replica holds, if that is known before the step runs."""
    facts = step_context.step()
    found = step_context.current().given_rows if facts is None else (facts.whole.facts if facts.whole else facts).rows
    known = None if found is None else tf.get_static_value(found.local)
    return None if known is None else int(known)


class _Values:
    """The numbers of a tensor that is made of constants. Variables count as other numbers in each place."""

    def __init__(self):
        self._known: dict[int, np.ndarray | None] = {}
        self._left = _MOST

    def of(self, tensor: tf.Tensor) -> np.ndarray | None:
        """The numbers, or None where they are not known."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._found(tensor)
        return self._known[id(tensor)]

    def _found(self, tensor: tf.Tensor) -> np.ndarray | None:
        known = tf.get_static_value(tensor)
        self._left -= 1
        if known is not None or self._left < 0:
            return known
        op, kernel = tensor.op, getattr(tf.raw_ops, tensor.op.type, None)
        if not op.inputs or any(each.dtype in (tf.resource, tf.variant) for each in op.inputs):
            size = tensor.shape.num_elements()
            return None if size is None else np.arange(size).reshape(tensor.shape).astype(tensor.dtype.as_numpy_dtype)
        values = [self.of(each) for each in op.inputs]
        if kernel is None or slots.get(tensor, "is_alike") is not None or any(each is None for each in values):
            return None
        return _computed(op, kernel, values)[tensor.value_index]


def _computed(op: tf.Operation, kernel, values: list[np.ndarray]) -> list[np.ndarray]:
    """What an operation gives for other inputs."""
    left, inputs = iter(values), {}
    for each in op.op_def.input_arg:
        has_many = each.number_attr or each.type_list_attr
        count = op.get_attr(each.number_attr) if each.number_attr else len(op.inputs)
        inputs[each.name] = [next(left) for _ in range(count)] if has_many else next(left)
    names = inspect.signature(kernel).parameters
    attributes = {each.name: op.get_attr(each.name) for each in op.op_def.attr if each.name in names}
    with tf.init_scope(), tf.device("CPU:0"):
        found = kernel(**inputs, **attributes)
        return [each.numpy() for each in (found if isinstance(found, (list, tuple)) else [found])]

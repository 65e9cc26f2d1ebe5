"""The logits of a softmax or a sigmoid, from which Keras's cross-entropies compute without losing digits.

Keras finds them as an attribute of the activation's output, or as the input of the operation that made the output.
Both are lost when a tensor is copied or concatenated, or is the output of a custom gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import logits_of, with_logits
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import has_own_gradient
from tfgpu.core import step_context

_OPERATIONS = {
    "Softmax": lambda value: tf.raw_ops.Softmax(logits=value),
    "Sigmoid": lambda value: tf.raw_ops.Sigmoid(x=value),
}


@dataclass(frozen=True)
class Logits:
    """The logits of a tensor.

    Attributes:
        tensor: the activation's input.
        operation: the name of the activation's operation; empty if Keras's attribute holds the logits.
    """

    tensor: tf.Tensor
    operation: str = ""

    def replace(self, tensor: tf.Tensor) -> "Logits":
        """Other logits of the same activation."""
        return Logits(tensor, self.operation)

    def attach_to(self, value: tf.Tensor) -> tf.Tensor:
        """A copy of `value` for which Keras finds these logits."""
        if self.operation:
            return _OPERATIONS[self.operation](self.tensor)
        return with_logits(value, self.tensor)


def find(value) -> Logits | None:
    """The logits that Keras finds for a tensor, or None."""
    _attach_delayed(value)
    found = logits_of(value)
    if found is not None:
        return Logits(found)
    made_by = value.op if hasattr(value, "graph") and isinstance(value, tf.Tensor) else None
    if made_by is not None and made_by.type in _OPERATIONS:
        return Logits(made_by.inputs[0], made_by.type)
    return None


def carried(value: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """`change(value)`, with the logits of `value` changed in the same way.

    Args:
        value: any tensor.
        change: gathers, slices or reorders rows.
    """
    known = find(value)
    if known is None:
        return change(value)
    # In 16 bits, computing the activation again, or using its input twice, can change the rounding of a row.
    is_wide = value.dtype.size >= 4
    made_by = value.op if hasattr(value, "graph") and is_wide else None
    if made_by is not None and made_by.type in _OPERATIONS and made_by.inputs[0] is known.tensor:
        logits = change(known.tensor)
        changed = _OPERATIONS[made_by.type](logits)
        return changed if known.operation else with_logits(changed, logits)  # Keras takes those for any activation
    changed = change(value)
    if is_wide:
        return with_logits(changed, change(known.tensor))
    context = step_context.current()
    fields = {name: getattr(context, name) for name in ("step", "is_trying", "recorder")}

    def make() -> tf.Tensor:
        with step_context.scope(**fields):
            return change(known.tensor)

    slots.of(changed).delayed_logits = make
    return changed


def attach_delayed() -> None:
    """Makes Keras's cross-entropies find logits that `carried` leaves until they are needed."""

    @wrap("nn.get_logits")
    def get_logits(stock, output, *args, **kwargs):
        _attach_delayed(output)
        return stock(output, *args, **kwargs)


def _attach_delayed(value: object) -> None:
    make = slots.get(value, "delayed_logits")
    if make is not None and logits_of(value) is None:
        with_logits(value, make())


def find_all(values: list) -> tuple[list, str] | None:
    """The logits of each tensor, and their one operation; None if a tensor has none, or operations differ."""
    found = [find(value) for value in values]
    if None in found or len({one.operation for one in found}) > 1:
        return None
    return [one.tensor for one in found], found[0].operation


def noted(value: object, name: str) -> object | None:
    """What `slots.of(tensor)` holds under a name, for a tensor of a graph or for the one that it is a copy of.

    A copy is the tensor itself, or its cast to as many bits or more.
    """
    while isinstance(value, tf.Tensor) and hasattr(value, "graph"):
        found = slots.get(value, name)
        if found is not None:
            return found
        made_by = value.op
        if made_by.type not in ("Cast", "Identity") or has_own_gradient(made_by):
            return None
        if value.dtype.size < made_by.inputs[0].dtype.size:
            return None
        value = made_by.inputs[0]
    return None


def origin(value: tf.Tensor) -> tf.Tensor:
    """The tensor of a graph that this one has the numbers of, in whatever dtype."""
    while value.op.type in ("Cast", "Identity", "Squeeze") and not has_own_gradient(value.op):
        value = value.op.inputs[0]
    return value

"""What lies behind a softmax or a sigmoid: Keras's cross-entropies take that in its place, and lose no digits.

Keras finds it as an attribute of the tensor that an activation returns, or as the input of the operation that made the
tensor. Both are lost where a tensor is copied, joined, or comes out of a block with a gradient of its own.
"""

from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat.keras import logits_of, with_logits

_OPERATIONS = {
    "Softmax": lambda value: tf.raw_ops.Softmax(logits=value),
    "Sigmoid": lambda value: tf.raw_ops.Sigmoid(x=value),
}


@dataclass(frozen=True)
class Behind:
    """The logits of a tensor.

    Attributes:
        logits: what the activation was given.
        kind: the operation's name, or an empty string for Keras's attribute.
    """

    logits: tf.Tensor
    kind: str = ""

    def of(self, logits: tf.Tensor) -> "Behind":
        """The same for what was made of the logits as the tensor was."""
        return Behind(logits, self.kind)

    def put(self, value: tf.Tensor) -> tf.Tensor:
        """A tensor of the same numbers as `value`, behind which Keras finds the logits."""
        if self.kind:
            return _OPERATIONS[self.kind](self.logits)
        return with_logits(value, self.logits)


def behind(value) -> Behind | None:
    """The logits that Keras finds behind a tensor, or None."""
    found = logits_of(value)
    if found is not None:
        return Behind(found)
    made_by = value.op if hasattr(value, "graph") and isinstance(value, tf.Tensor) else None
    if made_by is not None and made_by.type in _OPERATIONS:
        return Behind(made_by.inputs[0], made_by.type)
    return None


def together(values: list) -> tuple[list, str] | None:
    """The logits behind each of some tensors, and their kind; None where one has none, or another kind."""
    found = [behind(value) for value in values]
    if None in found or len({one.kind for one in found}) > 1:
        return None
    return [one.logits for one in found], found[0].kind

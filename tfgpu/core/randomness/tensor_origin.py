"""Whether a tensor depends on the batch or on weights only, to which some layers apply dropout."""

import tensorflow as tf

READS_DATA = {"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional", "OptionalGetValue"}


DATA, WEIGHTS, CONSTANTS = "data", "weights", "constants"


def origin_of(tensor) -> str:
    """What `tensor` depends on: a step's data (or its shape), else weights, else only constants.

    Args:
        tensor: a tensor of the graph under construction; if its origin is unknown, as in eager code, it counts as data.
    """
    if not tf.is_tensor(tensor) or tf.executing_eagerly() or hasattr(tensor, "numpy"):
        return DATA
    found_weights, seen, waiting = False, set(), [tensor]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if hasattr(found, "numpy") or not hasattr(found, "op"):  # captured from eager code: a constant
            continue
        if found.op.type in READS_DATA:
            return DATA
        found_weights |= found.op.type == "ReadVariableOp"
        if found.op.type == "Placeholder":
            outer = captured_by(found)
            if outer is None and found.dtype not in (tf.resource, tf.variant):
                return DATA  # an argument
            waiting += [outer] if outer is not None else []
        else:
            waiting += found.op.inputs
    return WEIGHTS if found_weights else CONSTANTS


def captured_by(placeholder: tf.Tensor) -> tf.Tensor | None:
    """What this placeholder captures from outside the graph, or None if it is an argument of the function."""
    for outer, inner in getattr(placeholder.graph, "captures", ()):
        if inner is placeholder:
            return outer
    return None

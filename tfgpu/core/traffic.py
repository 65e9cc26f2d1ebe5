"""How many bytes a replica hands to collectives, added up while a step is traced."""

import contextlib
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.core import step_context


@dataclass
class Sent:
    """What one replica hands to the collectives of one step, or of one call.

    Attributes:
        bytes: their payload; tensors whose shape is not known before the step runs are not in it.
        collectives: how many tensors or slices were handed over.
        is_whole: every shape was known.
    """

    bytes: float = 0.0
    collectives: int = 0
    is_whole: bool = True


@contextlib.contextmanager
def metering():
    """Notes what this replica's thread hands to collectives within the block."""
    sent = Sent()
    with step_context.scope(sent=sent):
        yield sent


def note(values: list, *, part: float = 1.0) -> None:
    """Adds tensors, or the values and indices of slices, that are handed over once in `1 / part` steps."""
    sent = step_context.current().sent
    if sent is None:
        return
    for value in tf.nest.flatten([value for value in values if value is not None], expand_composites=True):
        size = value.shape.num_elements()
        sent.collectives += 1
        sent.is_whole &= size is not None
        sent.bytes += part * (size or 0) * value.dtype.size

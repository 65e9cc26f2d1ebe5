"""How many bytes a replica passes to collectives: added up while a step is traced, and counted as steps run."""

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.core import step_context


@dataclass
class Sent:
    """What one replica passes to the collectives of one step or call.

    Attributes:
        bytes: the payload, without tensors whose shape is unknown until the step runs.
        collectives: number of tensors or slices.
        is_whole: every shape was known.
    """

    bytes: float = 0.0
    collectives: int = 0
    is_whole: bool = True


@contextlib.contextmanager
def metering() -> Iterator[Sent]:
    """Counts what this replica's thread passes to collectives inside the block."""
    sent = Sent()
    with step_context.scope(sent=sent):
        yield sent


def note(values: list, *, part: float = 1.0) -> None:
    """Adds tensors, or the values and indices of slices, that are sent once in `1 / part` steps."""
    sent = step_context.current().sent
    if sent is None:
        return
    for value in tf.nest.flatten([value for value in values if value is not None], expand_composites=True):
        size = value.shape.num_elements()
        sent.collectives += 1
        sent.is_whole &= size is not None
        sent.bytes += part * (size or 0) * value.dtype.size


def collectives_of(graph: tf.Graph) -> int:
    """Collectives in the graph of a step, of all replicas in this process."""
    kinds = ("CollectiveReduce", "CollectiveGather", "CollectiveAllToAll", "CollectiveBcast")
    return sum(operation.type.startswith(kinds) for operation in graph.get_operations())


class Meter:
    """Counts the bytes of all steps of a model, from what their traces pass to collectives.

    Attributes:
        bytes: total so far.
    """

    def __init__(self):
        self.bytes = 0.0
        self._by_kind: dict[Hashable, Sent] = {}

    @contextlib.contextmanager
    def tracing(self, kind: Hashable) -> Iterator[None]:
        """Inside the block, a kind of step is traced or, if `kind` is None, what every call does at its end."""
        with metering() as self._by_kind[kind]:
            yield

    def count(self, steps: int, kind: Hashable) -> None:
        """Adds a call of `steps` steps of a kind."""
        for each, times in ((kind, steps), (None, 1)):
            if each in self._by_kind:
                self.bytes += times * self._by_kind[each].bytes

    @property
    def is_whole(self) -> bool:
        """Whether `bytes` is complete: every shape was known when the steps were traced."""
        return all(sent.is_whole for sent in self._by_kind.values())

"""What was found of each piece of a step: by rows or on all rows, why, and what travels for it.

Each trial notes its piece with the strategy, where `of` finds all. `tfgpu doctor SCRIPT` prints them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import extensions, step_context

BY_ROWS, BY_PARTS, ON_ALL_ROWS = "by rows", "layers within on all rows", "on all rows"
REFUSED, NOT_AS_ONE = "refused", "by rows, not as one device"
TRIED, MARKED, KNOWN, UNPROVEN = "trial", "your mark", "Keras's own", "not tried"


@dataclass(frozen=True)
class Piece:
    """One piece of a step, and how replicas compute it.

    Attributes:
        name: with its kind, such as "layer 'center' (Center)".
        verdict: `BY_ROWS`, `BY_PARTS`, `ON_ALL_ROWS`, `REFUSED` or, of a function of `strategy.run`, `NOT_AS_ONE`.
        why: "" where there is nothing to say.
        source: `TRIED`, `MARKED` (`tfgpu.by_rows`, `tfgpu.on_all_rows`), `KNOWN` (from the table of Keras's own) or
            `UNPROVEN` (it could not be tried, and the strategy's `unproven` decides).
        bytes_a_row: that travel in each step for each row of the batch; 0 for none, None where it is not known.
        rows: of a batch; None where it is not known.
        fixed_bytes: that travel in each step, however many rows there are.

    Example:
        >>> Piece("loss 'dice'", ON_ALL_ROWS, "it is not a mean over rows", TRIED, 44, 64).traffic
        '2,816 bytes a step'
    """

    name: str
    verdict: str
    why: str
    source: str
    bytes_a_row: int | None = 0
    rows: int | None = None
    fixed_bytes: int = 0

    @property
    def traffic(self) -> str:
        """What travels, for people."""
        if self.bytes_a_row == 0:
            return f"{self.fixed_bytes:,} bytes a step" if self.fixed_bytes else "none"
        if self.bytes_a_row is None:
            return "an unknown number of bytes"
        if self.rows is None:
            return f"{self.bytes_a_row:,} bytes for each row of a batch"
        return f"{self.fixed_bytes + self.bytes_a_row * self.rows:,} bytes a step"


def note(piece: Piece, strategy: tf.distribute.Strategy | None = None) -> Piece:
    """Keeps what was found of a piece; a later word on a piece of that name replaces it.

    Args:
        piece: what was found.
        strategy: under which it runs; None is the current one.
    """
    strategy = strategy or tf.distribute.get_strategy()
    vars(slots.of(strategy)).setdefault("pieces", {})[piece.name] = piece
    for listen in extensions.verdict_listeners:
        listen(piece)
    return piece


def note_rows(name: str, needs_all: bool, why: str, source: str, tensors: Iterable[tf.Tensor]) -> Piece:
    """Keeps whether a piece gets all rows, which are those of `tensors`; the arguments are those of `Piece`."""
    size, verdict = bytes_a_row(tensors) if needs_all else 0, ON_ALL_ROWS if needs_all else BY_ROWS
    return note(Piece(name, verdict, why, source, size, rows_of_batch()))


def of(strategy: tf.distribute.Strategy) -> list[Piece]:
    """What was found so far of the pieces that run under a strategy."""
    return list(slots.get(strategy, "pieces", {}).values())


def bytes_a_row(tensors: Iterable[tf.Tensor]) -> int | None:
    """How many bytes of each row of a batch are in tensors; None where a size is not known before the step runs."""
    sizes = [(tensor.shape[1:].num_elements(), tensor.dtype.size) for tensor in tensors]
    if any(count is None for count, _ in sizes):
        return None
    return sum(count * size for count, size in sizes)


def rows_of_batch() -> int | None:
    """How many rows the batches have, where that is known while a step is traced."""
    rows = step_context.rows()
    total = None if rows is None else tf.get_static_value(rows.total)
    return step_context.current().batch_rows if total is None else int(total)

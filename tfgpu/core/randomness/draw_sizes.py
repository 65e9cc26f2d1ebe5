"""Random draws of a fixed size in the user's code.

On a replica that holds 32 rows, a draw of 32 numbers may be one number for each row, or 32 numbers for any batch. A
trial shows which: it runs the code on batches of different lengths, and a size that does not change is fixed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tfgpu.compat import slots
from tfgpu.core import step_context
from tfgpu.errors import InputError

_known = step_context.Slot("draw_sizes.known")
_noted = step_context.Slot("draw_sizes.noted")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the draws of a piece of code.

    Attributes:
        fixed: first dimensions that are the same for any number of rows.
        by_row: some of its draws have a number for each row.
    """

    fixed: tuple[int, ...] = ()
    by_row: bool = False


class Noted:
    """Notes the draws of a trial."""

    def __init__(self):
        self._runs: dict[int, set[int]] = {}
        self._of_rows: set[int] = set()

    @contextlib.contextmanager
    def run(self, rows: int) -> Iterator[None]:
        """Notes the draws in the block, which is a run on so many rows."""
        self._rows = rows
        self._runs.setdefault(rows, set())
        with _noted.set_to(self):
            yield

    def note(self, size: int, *, is_row: bool) -> None:
        """A draw has this first dimension."""
        self._runs[self._rows].add(size)
        if is_row:
            self._of_rows.add(size)

    @property
    def sizes(self) -> Sizes:
        """What all runs have shown."""
        fixed = set.intersection(*self._runs.values()) if len(self._runs) > 1 else set()
        return Sizes(tuple(sorted(fixed)), bool(self._of_rows - fixed))


def note(size: int, *, is_row: bool) -> None:
    """Notes a draw, if code is tried here."""
    if (noted := _noted.get()) is not None:
        noted.note(size, is_row=is_row)


def known(sizes: Sizes):
    """Within the block, the code that draws is known to have these sizes."""
    return _known.set_to(sizes if sizes.fixed else None)


def keep(owner: object, key: object, sizes: Sizes) -> None:
    """Keeps the sizes of a piece of code as plain values: a copy of its owner may go where no tfgpu is."""
    vars(slots.of(owner)).setdefault("draw_sizes", {})[key] = dataclasses.astuple(sizes)


def kept(owner: object, key: object) -> Sizes:
    """What was kept; of a piece that was not tried, nothing is known."""
    return Sizes(*slots.get(owner, "draw_sizes", {}).get(key, ()))


def are_watched() -> bool:
    """Whether the code's draws are noted, or its sizes known."""
    return _known.get() is not None or _noted.get() is not None


@contextlib.contextmanager
def of_other_code() -> Iterator[None]:
    """Within the block, another piece of code draws."""
    with _known.set_to(None), _noted.set_to(None):
        yield


def is_fixed(size: int) -> bool:
    """Whether a draw whose first dimension equals the replica's rows has that size by chance.

    Raises:
        InputError: the code has draws of both kinds.
    """
    sizes: Sizes | None = _known.get()
    if sizes is None or size not in sizes.fixed:
        return False
    if sizes.by_row:
        raise InputError(
            f"Your code draws {size} random numbers in every batch, and others for each row. Each replica holds {size} "
            f"rows, so the two cannot be told apart. Use another batch size, or give the first draw the shape "
            f"(1, {size}, ...)."
        )
    return True

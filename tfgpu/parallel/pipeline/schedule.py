"""In which order the stages of a pipeline work on the micro-batches. Pure Python: no device, no model.

Source: Huang et al., GPipe, 2019; Narayanan et al., PipeDream-Flush (1F1B) and the interleaved schedule, 2021.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tfgpu.errors import InputError, unknown

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Cell(NamedTuple):
    """One piece of work: a stage's forward or backward pass over one micro-batch.

    Attributes:
        stage: from 0.
        micro: which micro-batch, from 0.
        backward: the backward pass.
    """

    stage: int
    micro: int
    backward: bool = False


@dataclass(frozen=True)
class Timed:
    """When a cell runs: start and end, in the unit of the costs."""

    cell: Cell
    device: int
    start: float
    end: float


def forward(stages: int, microbatches: int, devices: int | None = None) -> list[list[Cell]]:
    """What each device does, in order, where no backward pass follows.

    Example:
        >>> [[(cell.stage, cell.micro) for cell in row] for row in forward(2, 2)]
        [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    """
    return _listed(stages, microbatches, devices, wanted=(False,), urgent=_by_group(stages, devices or stages))


def training(kind: str, stages: int, microbatches: int, devices: int | None = None) -> list[list[Cell]]:
    """What each device does, in order, in forward and backward passes.

    Args:
        kind: `"gpipe"`: all forward passes, then all backward passes; every device keeps what all micro-batches need.
            `"1f1b"`: a backward pass as soon as there is one, and never more micro-batches under way than stages
            follow; what is kept does not grow with the micro-batches. `"interleaved"`: 1f1b where each device has
            several stages, every `devices`-th, so that it waits less.
        stages: how many.
        microbatches: how many.
        devices: how many; None is one a stage.

    Raises:
        InputError: no such schedule; stages that devices do not divide; several stages a device without `interleaved`.
    """
    if kind not in SCHEDULES:
        raise unknown("schedule", kind, SCHEDULES)
    devices = devices or stages
    if (stages != devices) != (kind == "interleaved") and not (kind == "interleaved" and devices == 1):
        raise InputError(
            f"{kind!r} with {stages} stages on {devices} devices: `interleaved` needs several stages a device, the "
            "others one."
        )
    if kind == "gpipe":
        back = [[cell._replace(backward=True) for cell in reversed(row)] for row in forward(stages, microbatches)]
        return [ahead + row for ahead, row in zip(forward(stages, microbatches), back, strict=True)]
    if stages != devices:
        return _interleaved(stages, microbatches, devices)
    most = [devices - device for device in range(devices)]
    return _listed(stages, microbatches, devices, wanted=(False, True), urgent=_by_group(stages, devices), most=most)


def timed(rows: list[list[Cell]], cost: Callable[[Cell], float] = lambda cell: 1.0) -> list[Timed]:
    """When each cell runs, where each device works through its row as soon as what a cell needs is there.

    Raises:
        InputError: the rows wait for each other.
    """
    stages = 1 + max(cell.stage for row in rows for cell in row)
    ends: dict[Cell, float] = {}
    found, at, free = [], [0] * len(rows), [0.0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        moved = False
        for device, row in enumerate(rows):
            while at[device] < len(row) and all(need in ends for need in needs(row[at[device]], stages, rows)):
                cell = row[at[device]]
                start = max([free[device], *(ends[need] for need in needs(cell, stages, rows))])
                ends[cell] = free[device] = start + cost(cell)
                found.append(Timed(cell, device, start, ends[cell]))
                at[device] += 1
                moved = True
        if not moved:
            raise InputError("The rows of this schedule wait for each other for ever.")
    return sorted(found, key=lambda one: (one.start, one.device))


def needs(cell: Cell, stages: int, rows: list[list[Cell]] | None = None) -> list[Cell]:
    """The cells that must be done before one can run."""
    if not cell.backward:
        return [Cell(cell.stage - 1, cell.micro)] if cell.stage else []
    found = [Cell(cell.stage, cell.micro)]
    return found + ([Cell(cell.stage + 1, cell.micro, True)] if cell.stage + 1 < stages else [])


def idle_share(cells: list[Timed], devices: int) -> float:
    """The part of the devices' time in which they wait."""
    span = max(one.end for one in cells) - min(one.start for one in cells)
    return 1 - sum(one.end - one.start for one in cells) / (span * devices)


def bound(stages: int, microbatches: int) -> float:
    """The idle share of `gpipe` and `1f1b` where all stages cost the same: `(S - 1) / (M + S - 1)`."""
    return (stages - 1) / (microbatches + stages - 1)


def live(rows: list[list[Cell]]) -> list[int]:
    """For each device, the most forward passes whose backward pass is still to come."""
    found = []
    for row in rows:
        now = most = 0
        for cell in row:
            now += -1 if cell.backward else 1
            most = max(most, now)
        found.append(most)
    return found


def _by_group(stages: int, devices: int) -> Callable[[Cell], tuple]:
    """Which of the cells that a device could run comes first: backward before forward, then by groups of `devices`
    micro-batches, of which each stage of the device does all before its next stage does.
    """

    def key(cell: Cell) -> tuple:
        chunk = cell.stage // devices
        if cell.backward:
            chunk = stages // devices - 1 - chunk
        return (not cell.backward, cell.micro // devices, chunk, cell.micro)

    return key


def _interleaved(stages: int, microbatches: int, devices: int) -> list[list[Cell]]:
    """The order of Narayanan et al. 2021: forward passes until the last device can send the first gradient back, then
    one forward and one backward pass in turns.
    """
    chunks = stages // devices
    if stages % devices or microbatches % devices:
        raise InputError(
            f"`interleaved` needs stages and micro-batches that {devices} devices divide. Received: {stages} and "
            f"{microbatches}. Take {-(-microbatches // devices) * devices} micro-batches, or schedule='1f1b'."
        )
    rows = []
    for device in range(devices):

        def cell(number: int, backward: bool, device=device) -> Cell:
            group, place = divmod(number, stages)
            chunk = chunks - 1 - place // devices if backward else place // devices
            return Cell(chunk * devices + device, group * devices + place % devices, backward)

        total = microbatches * chunks
        ahead = min(total, 2 * (devices - device - 1) + (chunks - 1) * devices)
        row = [cell(number, False) for number in range(ahead)]
        for number in range(total - ahead):
            row += [cell(ahead + number, False), cell(number, True)]
        rows.append(row + [cell(number, True) for number in range(total - ahead, total)])
    return rows


def _listed(stages: int, microbatches: int, devices: int | None, *, wanted, urgent, most=None) -> list[list[Cell]]:
    """Lets every device take the most urgent cell that is ready, step by step, each cell a step long."""
    devices = devices or stages
    if stages % devices:
        raise InputError(f"{stages} stages cannot be dealt to {devices} devices: take a multiple of {devices}.")
    left = {Cell(s, m, back) for s in range(stages) for m in range(microbatches) for back in wanted}
    rows: list[list[Cell]] = [[] for _ in range(devices)]
    done: set[Cell] = set()
    while left:
        taken = []
        for device in range(devices):
            ready = [
                cell
                for cell in left
                if cell.stage % devices == device and all(need in done for need in needs(cell, stages))
            ]
            ahead = sum(-1 if cell.backward else 1 for cell in rows[device])
            if most is not None and ahead >= most[device]:
                ready = [cell for cell in ready if cell.backward]
            if ready:
                taken.append((device, min(ready, key=urgent)))
        if not taken:
            raise InputError(f"No schedule for {stages} stages, {microbatches} micro-batches, {devices} devices.")
        for device, cell in taken:
            rows[device].append(cell)
            left.remove(cell)
        done.update(cell for _, cell in taken)
    return rows

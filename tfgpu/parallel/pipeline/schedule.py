"""The order in which the stages of a pipeline work on the micro-batches. Pure Python: no device, no model.

Source: Huang et al., GPipe, 2019; Narayanan et al., PipeDream-Flush (1F1B) and the interleaved schedule, 2021.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tfgpu.errors import InputError, unknown

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Cell(NamedTuple):
    """A stage's forward or backward pass over one micro-batch.

    Attributes:
        stage: its number, from 0.
        micro: the number of the micro-batch, from 0.
        backward: whether it is the backward pass.
    """

    stage: int
    micro: int
    backward: bool = False


@dataclass(frozen=True)
class Timed:
    """When and where a cell runs: start and end are in the unit of the costs."""

    cell: Cell
    device: int
    start: float
    end: float


def forward(stages: int, microbatches: int, devices: int | None = None) -> list[list[Cell]]:
    """The forward cells of each device, in order, for a schedule without backward passes.

    Example:
        >>> [[(cell.stage, cell.micro) for cell in row] for row in forward(2, 2)]
        [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    """
    return _listed(stages, microbatches, devices, wanted=(False,), urgent=_by_group(stages, devices or stages))


def training(kind: str, stages: int, microbatches: int, devices: int | None = None) -> list[list[Cell]]:
    """The forward and backward cells of each device, in order.

    Args:
        kind: `"gpipe"`: all forward passes, then all backward passes; each device keeps what all micro-batches need.
            `"1f1b"`: a backward pass as soon as one is possible, and no more micro-batches in flight than there are
            stages left; memory does not grow with the number of micro-batches. `"interleaved"`: 1f1b where each device
            has several stages, every `devices`-th, so that it waits less.
        stages: how many.
        microbatches: how many.
        devices: how many; None is one per stage.

    Raises:
        InputError: there is no such schedule, the devices do not divide the stages, or a device has several stages
            without `interleaved`.
    """
    if kind not in SCHEDULES:
        raise unknown("schedule", kind, SCHEDULES)
    devices = devices or stages
    if (stages != devices) != (kind == "interleaved") and not (kind == "interleaved" and devices == 1):
        raise InputError(
            f"`interleaved` needs several stages per device, other schedules need one. Received: schedule={kind!r}, "
            f"{stages} stages, {devices} devices."
        )
    if kind == "gpipe":
        back = [[cell._replace(backward=True) for cell in reversed(row)] for row in forward(stages, microbatches)]
        return [ahead + row for ahead, row in zip(forward(stages, microbatches), back, strict=True)]
    if stages != devices:
        return _interleaved(stages, microbatches, devices)
    most = [devices - device for device in range(devices)]
    return _listed(stages, microbatches, devices, wanted=(False, True), urgent=_by_group(stages, devices), most=most)


def timed(rows: list[list[Cell]], cost: Callable[[Cell], float] = lambda cell: 1.0) -> list[Timed]:
    """When each cell runs, if each device runs its row in order and each cell as soon as its dependencies are done.

    Raises:
        InputError: the rows wait for each other.
    """
    stages = 1 + max(cell.stage for row in rows for cell in row)
    ends: dict[Cell, float] = {}
    found, at, free = [], [0] * len(rows), [0.0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        moved = False
        for device, row in enumerate(rows):
            while at[device] < len(row) and all(need in ends for need in needs(row[at[device]], stages)):
                cell = row[at[device]]
                start = max([free[device], *(ends[need] for need in needs(cell, stages))])
                ends[cell] = free[device] = start + cost(cell)
                found.append(Timed(cell, device, start, ends[cell]))
                at[device] += 1
                moved = True
        if not moved:
            raise InputError("The rows of this schedule wait for each other forever.")
    return sorted(found, key=lambda one: (one.start, one.device))


def needs(cell: Cell, stages: int) -> list[Cell]:
    """The cells that must be done before a cell can run."""
    if not cell.backward:
        return [Cell(cell.stage - 1, cell.micro)] if cell.stage else []
    found = [Cell(cell.stage, cell.micro)]
    return found + ([Cell(cell.stage + 1, cell.micro, True)] if cell.stage + 1 < stages else [])


def bound(stages: int, microbatches: int) -> float:
    """The idle share of `gpipe` and `1f1b` with stages of equal cost: `(S - 1) / (M + S - 1)`."""
    return (stages - 1) / (microbatches + stages - 1)


def live(rows: list[list[Cell]]) -> list[int]:
    """For each device, the largest number of forward passes that wait for their backward pass."""
    found = []
    for row in rows:
        now = most = 0
        for cell in row:
            now += -1 if cell.backward else 1
            most = max(most, now)
        found.append(most)
    return found


def _by_group(stages: int, devices: int) -> Callable[[Cell], tuple]:
    """The priority of the cells that a device could run: backward before forward, then by groups of `devices`
    micro-batches; each stage of the device finishes a group before the device's next stage begins it.
    """

    def key(cell: Cell) -> tuple:
        chunk = cell.stage // devices
        if cell.backward:
            chunk = stages // devices - 1 - chunk
        return (not cell.backward, cell.micro // devices, chunk, cell.micro)

    return key


def _interleaved(stages: int, microbatches: int, devices: int) -> list[list[Cell]]:
    """The order of Narayanan et al. 2021: forward passes until the last device can send the first gradient back, then
    one forward and one backward pass in turn.
    """
    chunks = stages // devices
    if stages % devices or microbatches % devices:
        raise InputError(
            f"`interleaved` needs numbers of stages and micro-batches that are multiples of {devices}, the number of "
            f"devices. Received: {stages} stages, {microbatches} micro-batches. Use "
            f"{-(-microbatches // devices) * devices} micro-batches, or schedule='1f1b'."
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
    """Simulates devices that take the most urgent ready cell in each time step; every cell takes one step."""
    devices = devices or stages
    if stages % devices:
        raise InputError(f"{stages} stages do not divide among {devices} devices. Use a multiple of {devices} stages.")
    left = {Cell(s, m, back) for s in range(stages) for m in range(microbatches) for back in wanted}
    rows: list[list[Cell]] = [[] for _ in range(devices)]
    done: set[Cell] = set()

    def most_urgent(device: int, ready: list[Cell]) -> Cell | None:
        in_flight = sum(-1 if cell.backward else 1 for cell in rows[device])
        is_full = most is not None and in_flight >= most[device]
        own = [cell for cell in ready if cell.stage % devices == device and (cell.backward or not is_full)]
        return min(own, key=urgent, default=None)

    while left:
        ready = [cell for cell in left if all(need in done for need in needs(cell, stages))]
        taken = {device: cell for device in range(devices) if (cell := most_urgent(device, ready)) is not None}
        if not taken:
            raise InputError(
                f"There is no schedule for {stages} stages, {microbatches} micro-batches and {devices} devices."
            )
        for device, cell in taken.items():
            rows[device].append(cell)
        left -= {*taken.values()}
        done |= {*taken.values()}
    return rows

"""Summarizes samples by epoch: means, maxima and energy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfgpu.sensors.limits import limit
from tfgpu.sensors.sample import Value

Row = Mapping[str, Any]
_NO_MEANS = ("time", "seconds", "epoch", "step", "cores", "step_time_s", "examples_per_s")
_CONSTANT = ("energy_j", "total_bytes", "limit_bytes", "power_limit_w")


@dataclass(frozen=True)
class Epoch:
    """An epoch as recorded by the training.

    Attributes:
        number: from 1.
        begin_s: its start, by the clock of the samples.
        end_s: its end, including validation.
        steps: the number of steps.
        train_s: the time of the timed steps, without validation.
        timed_steps: their number; the first block of a training, which includes tracing, is not timed.
        examples: rows of this process's replicas; `None` if the loss does not count them.
    """

    number: int
    begin_s: float
    end_s: float
    steps: int
    train_s: float
    timed_steps: int
    examples: int | None = None


class Epochs:
    """Combines samples and epochs. An epoch's row is complete once there is a sample after its end.

    Args:
        workers: number of workers that train together.
    """

    def __init__(self, *, workers: int = 1):
        self._workers = workers
        self._samples: list[Row] = []
        self._open: list[Epoch] = []

    def add(self, sample: Row) -> list[dict[str, Value]]:
        """Adds a sample; returns the rows of the epochs that it completes."""
        self._samples.append(sample)
        now = sample["seconds"]
        done = [epoch for epoch in self._open if epoch.end_s <= now]
        self._open = [epoch for epoch in self._open if epoch.end_s > now]
        rows = [self._summary(epoch) for epoch in done]
        if done:  # only the last sample before the end is needed from now on
            old = (at for at, one in enumerate(self._samples) if one["seconds"] <= done[-1].end_s)
            del self._samples[: max(old, default=0)]
        return rows

    def end(self, epoch: Epoch) -> None:
        """Adds a finished epoch."""
        self._open.append(epoch)

    def _summary(self, epoch: Epoch) -> dict[str, Value]:
        step_s = epoch.train_s / epoch.timed_steps if epoch.timed_steps else None
        per_step = epoch.examples / epoch.steps if epoch.examples and epoch.steps else None
        figures = _means_and_most(self._pieces(epoch))
        found = limit({name: mean for name, (mean, _) in figures.items()}, workers=self._workers)
        wait, _ = figures.pop("input_wait", (None, None))
        # The energy of each counter within the epoch, by linear interpolation between samples.
        counters = dict.fromkeys(name for sample in self._samples for name in sample if name.endswith("energy_j"))
        energy = {name: self._between(name, epoch.begin_s, epoch.end_s) for name in counters}
        joules = energy.get("gpu_energy_j")
        row: dict[str, Value] = {"epoch": epoch.number, "steps": epoch.steps, "examples": epoch.examples}
        row |= {"step_time_s": step_s, "examples_per_s": per_step / step_s if per_step and step_s else None}
        row |= {"input_wait": wait, "limit": found.resource, "why": found.why, **energy, "energy_j": joules}
        row["energy_per_example_j"] = joules / epoch.examples if joules is not None and epoch.examples else None
        for name, (mean, most) in figures.items():
            row |= {f"{name}_mean": mean, f"{name}_max": most}
        return row

    def _pieces(self, epoch: Epoch) -> list[tuple[float, Row]]:
        """The samples of an epoch, each weighted with the seconds since the previous sample."""
        before, found = None, []
        for sample in self._samples:
            begin = epoch.begin_s if before is None else before
            seconds = min(sample["seconds"], epoch.end_s) - max(begin, epoch.begin_s)
            if seconds > 0:
                found.append((seconds, sample))
            before = sample["seconds"]
        return found or [(1.0, self._samples[-1])]

    def _between(self, name: str, begin_s: float, end_s: float) -> float | None:
        points = [
            (sample["seconds"], value) for sample in self._samples if isinstance(value := sample.get(name), float)
        ]
        if len(points) < 2:
            return None
        return max(0.0, _along(points, end_s) - _along(points, begin_s))


def _means_and_most(pieces: list[tuple[float, Row]]) -> dict[str, tuple[float | None, float | None]]:
    """The mean and the maximum of the columns that have them: numbers except counts and limits."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for name in dict.fromkeys(name for _, row in pieces for name, value in row.items() if not isinstance(value, str)):
        if name in _NO_MEANS or name.endswith(_CONSTANT):
            continue
        told = [(seconds, value) for seconds, row in pieces if isinstance(value := row.get(name), int | float)]
        total = sum(seconds for seconds, _ in told)
        mean = sum(seconds * value for seconds, value in told) / total if total else None
        found[name] = mean, max((value for _, value in told), default=None)
    return found


def _along(points: list[tuple[float, float]], seconds: float) -> float:
    """Interpolates linearly between points; extrapolates beyond the ends."""
    for (left_s, left), (right_s, right) in zip(points, points[1:], strict=False):
        if seconds <= right_s or (right_s, right) == points[-1]:
            return left + (right - left) * (seconds - left_s) / (right_s - left_s) if right_s > left_s else right
    return points[-1][1]

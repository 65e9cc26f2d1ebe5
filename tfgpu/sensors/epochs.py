"""Summarizes samples by epoch: means, maxima and energy."""

from collections.abc import Mapping
from dataclasses import dataclass

from tfgpu.sensors.limits import limit
from tfgpu.sensors.sample import Value

Row = Mapping[str, Value]
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
        now = _at(sample)
        done = [epoch for epoch in self._open if epoch.end_s <= now]
        self._open = [epoch for epoch in self._open if epoch.end_s > now]
        rows = [self._summary(epoch) for epoch in done]
        if done:
            self._forget(done[-1].end_s)
        return rows

    def end(self, epoch: Epoch) -> None:
        """Adds a finished epoch."""
        self._open.append(epoch)

    def _forget(self, before_s: float) -> None:
        """Drops all samples before the last one that precedes a time."""
        first = max((at for at, sample in enumerate(self._samples) if _at(sample) <= before_s), default=0)
        del self._samples[:first]

    def _summary(self, epoch: Epoch) -> dict[str, Value]:
        row: dict[str, Value] = {"epoch": epoch.number, "steps": epoch.steps, "examples": epoch.examples}
        step_s = epoch.train_s / epoch.timed_steps if epoch.timed_steps else None
        row["step_time_s"] = step_s
        per_step = epoch.examples / epoch.steps if epoch.examples and epoch.steps else None
        row["examples_per_s"] = per_step / step_s if per_step and step_s else None
        pieces = self._pieces(epoch)
        means, most = _means(pieces), _most(pieces)
        row["input_wait"] = means.pop("input_wait", None)
        found = limit({**means, "input_wait": row["input_wait"]}, workers=self._workers)
        row |= {"limit": found.resource, "why": found.why}
        energy = self._energies(epoch)
        joules = energy.get("gpu_energy_j")
        row |= {**energy, "energy_j": joules}
        row["energy_per_example_j"] = joules / epoch.examples if joules is not None and epoch.examples else None
        for name in means:
            row |= {f"{name}_mean": means[name], f"{name}_max": most[name]}
        return row

    def _pieces(self, epoch: Epoch) -> list[tuple[float, Row]]:
        """The samples of an epoch, each weighted with the seconds since the previous sample."""
        before, found = None, []
        for sample in self._samples:
            begin = epoch.begin_s if before is None else before
            seconds = min(_at(sample), epoch.end_s) - max(begin, epoch.begin_s)
            if seconds > 0:
                found.append((seconds, sample))
            before = _at(sample)
        return found or [(1.0, self._samples[-1])]

    def _energies(self, epoch: Epoch) -> dict[str, float | None]:
        """The energy of each counter within an epoch in joules, by linear interpolation between samples."""
        names = dict.fromkeys(name for sample in self._samples for name in sample if name.endswith("energy_j"))
        return {name: self._between(name, epoch.begin_s, epoch.end_s) for name in names}

    def _between(self, name: str, begin_s: float, end_s: float) -> float | None:
        points = [(_at(sample), value) for sample in self._samples if isinstance(value := sample.get(name), float)]
        if len(points) < 2:
            return None
        return max(0.0, _along(points, end_s) - _along(points, begin_s))


def _means(pieces: list[tuple[float, Row]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in _names(pieces):
        told = [(seconds, value) for seconds, row in pieces if isinstance(value := row.get(name), int | float)]
        total = sum(seconds for seconds, _ in told)
        found[name] = sum(seconds * value for seconds, value in told) / total if total else None
    return found


def _most(pieces: list[tuple[float, Row]]) -> dict[str, float | None]:
    return {
        name: max((value for _, row in pieces if isinstance(value := row.get(name), int | float)), default=None)
        for name in _names(pieces)
    }


def _names(pieces: list[tuple[float, Row]]) -> list[str]:
    """The columns with a mean: numbers except counts and limits."""
    names = dict.fromkeys(name for _, row in pieces for name, value in row.items() if not isinstance(value, str))
    return [name for name in names if name not in _NO_MEANS and not name.endswith(_CONSTANT)]


def _along(points: list[tuple[float, float]], seconds: float) -> float:
    """Interpolates linearly between points; extrapolates beyond the ends."""
    for (left_s, left), (right_s, right) in zip(points, points[1:], strict=False):
        if seconds <= right_s or (right_s, right) == points[-1]:
            return left + (right - left) * (seconds - left_s) / (right_s - left_s) if right_s > left_s else right
    return points[-1][1]


def _at(sample: Row) -> float:
    value = sample["seconds"]
    return float(value) if isinstance(value, int | float) else 0.0

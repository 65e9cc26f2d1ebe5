"""Rates that are measured several times in turn, so that a machine that slows down slows them all."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tfgpu.errors import InputError


@dataclass(frozen=True)
class Rate:
    """So many a second, measured several times.

    Attributes:
        values: each measurement, in the order in which they were made.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """The distance from the lowest to the highest, as a share of the median; 0 for one measurement."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def facts(self) -> dict[str, float | int]:
        """Returns plain numbers for JSON."""
        return {
            "median": round(self.median, 2),
            "lowest": round(min(self.values), 2),
            "highest": round(max(self.values), 2),
            "repeats": len(self.values),
        }


def check(seconds: float, repeats: int) -> None:
    """Raises `InputError` unless there is something to measure."""
    if not 0 < seconds < float("inf") or repeats < 1:
        raise InputError(
            f"`seconds` must be above 0 and `repeats` at least 1. Received: {seconds!r} and {repeats!r}. Try 1 and 3."
        )


def alternate(runs: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, Rate]:
    """Measures several things in turn, each round in the other direction.

    Args:
        runs: a name and a function that measures once and returns the rate.
        repeats: rounds.

    Returns:
        The rates by name, in the order of `runs`.

    Example:
        >>> rates = alternate({"one": lambda: 2.0, "two": lambda: 4.0}, repeats=3)
        >>> rates["two"].median, rates["two"].spread
        (4.0, 0.0)
    """
    values: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            values[name].append(runs[name]())
    return {name: Rate(tuple(each)) for name, each in values.items()}

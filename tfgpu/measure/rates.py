"""Rates measured alternately, so that a slowdown of the machine affects all of them."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tfgpu.errors import InputError, is_number, whole_number


@dataclass(frozen=True)
class Rate:
    """A rate per second, measured several times.

    Attributes:
        values: the measurements, in order.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """The range of the measurements as a share of the median; 0 for one measurement."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def facts(self) -> dict[str, float | int]:
        """Returns JSON-compatible values."""
        return {
            "median": round(self.median, 2),
            "lowest": round(min(self.values), 2),
            "highest": round(max(self.values), 2),
            "repeats": len(self.values),
        }


def check(seconds: float, repeats: int) -> None:
    """Raises `InputError` if a number is out of range."""
    whole_number("repeats", repeats)
    if not is_number(seconds) or not seconds > 0:
        raise InputError(f"`seconds` must be above 0 and finite. Received: {seconds!r}. Try 1.")


def alternate(runs: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, Rate]:
    """Measures several rates alternately, reversing the order in each round.

    Args:
        runs: functions by name; each measures once and returns a rate.
        repeats: the number of rounds.

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

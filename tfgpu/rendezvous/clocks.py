"""How far the clocks of two machines are apart, from the answers of a preflight.

A caller notes its own time before and after; the answer has the other's time in between. Halfway is the best guess, and
half of the way is how wrong that can be (Cristian, "Probabilistic clock synchronization", 1989; NTP does the same).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_S = 2.0
"""Seconds that clocks may differ: file times, logs of several machines and certificates are compared by them."""
FIX = "Set the clocks: `sudo timedatectl set-ntp true`, or `sudo chronyc makestep`."


@dataclass(frozen=True)
class Clock:
    """Another machine's clock.

    Attributes:
        ahead_s: seconds that it is ahead of this one's; below 0 where it is behind.
        within_s: how wrong that can be.
    """

    ahead_s: float
    within_s: float

    @property
    def is_off(self) -> bool:
        """Whether the clocks surely differ by more than `MOST_S`."""
        return abs(self.ahead_s) - self.within_s > MOST_S


def read(told: object, *, sent_s: float, took_s: float) -> Clock | None:
    """Makes a clock of the time in an answer; `None` where there is none, as from an older tfgpu.

    Args:
        told: the other's time, in seconds since 1970.
        sent_s: this machine's, when it asked.
        took_s: seconds until the answer was there, by a clock that nobody sets.

    Example:
        >>> read(130.0, sent_s=99.0, took_s=2.0)
        Clock(ahead_s=30.0, within_s=1.0)
    """
    if isinstance(told, bool) or not isinstance(told, (int, float)):
        return None
    return Clock(told - (sent_s + took_s / 2), took_s / 2)


class Comparison:
    """What several calls have said of the others' clocks; the surest counts."""

    def __init__(self):
        self._found: dict[int, Clock] = {}

    def note(self, index: int, answer: Mapping, *, sent_s: float, took_s: float) -> None:
        """Keeps the time in an answer, if it is there and surer than what is known."""
        clock, known = read(answer.get("clock"), sent_s=sent_s, took_s=took_s), self._found.get(index)
        if clock and (known is None or clock.within_s < known.within_s):
            self._found[index] = clock

    def named(self, names: Sequence[str]) -> dict[str, Clock]:
        """The clocks by name.

        Args:
            names: of all, by their indices.
        """
        return {names[index]: clock for index, clock in sorted(self._found.items())}


def advice(clocks: Mapping[str, Clock]) -> list[str]:
    """Says whose clock is off.

    Args:
        clocks: by the process's name.

    Example:
        >>> advice({"worker 1": Clock(-34.5, 0.01), "worker 2": Clock(0.5, 0.01)})
        ['The clock of worker 1 is 34.5 s behind. Set the clocks: ...']
    """
    off = {name: clock for name, clock in clocks.items() if clock.is_off}
    if not off:
        return []
    told = [f"{name} is {shown(clock)}" for name, clock in off.items()]
    return [f"The clock of {', of '.join(told)}. {FIX}"]


def shown(clock: Clock) -> str:
    """A difference in words.

    Example:
        >>> shown(Clock(2.25, 0.001))
        '2.2 s ahead'
    """
    return f"{abs(clock.ahead_s):.1f} s {'ahead' if clock.ahead_s > 0 else 'behind'}"

"""Estimates the offset between the clocks of two machines from a request and its answer.

The caller records its own time before and after; the answer contains the other's time. The midpoint is the best
estimate, with an error of at most half the round trip (Cristian, "Probabilistic clock synchronization", 1989; as NTP).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_S = 2.0
"""The largest tolerated offset in seconds; larger ones confuse file times, logs of several machines, certificates."""
FIX = "Set the clocks: `sudo timedatectl set-ntp true`, or `sudo chronyc makestep`."


@dataclass(frozen=True)
class Clock:
    """The offset of another machine's clock.

    Attributes:
        ahead_s: seconds that it is ahead of this machine's clock; negative if it is behind.
        within_s: the largest possible error.
    """

    ahead_s: float
    within_s: float

    @property
    def is_off(self) -> bool:
        """Whether the clocks certainly differ by more than `MOST_S`."""
        return abs(self.ahead_s) - self.within_s > MOST_S


def read(told: object, *, sent_s: float, took_s: float) -> Clock | None:
    """Computes the offset from the time in an answer; `None` if the answer has no time.

    Args:
        told: the other machine's time, in seconds since 1970.
        sent_s: this machine's time of the request.
        took_s: seconds until the answer arrived, by a monotonic clock.

    Example:
        >>> read(130.0, sent_s=99.0, took_s=2.0)
        Clock(ahead_s=30.0, within_s=1.0)
    """
    if isinstance(told, bool) or not isinstance(told, (int, float)):
        return None
    return Clock(told - (sent_s + took_s / 2), took_s / 2)


class Comparison:
    """Collects clock offsets from several calls, and keeps the most accurate of each machine."""

    def __init__(self):
        self._found: dict[int, Clock] = {}

    def note(self, index: int, answer: Mapping, *, sent_s: float, took_s: float) -> None:
        """Records an answer, if it gives a more accurate offset."""
        clock, known = read(answer.get("clock"), sent_s=sent_s, took_s=took_s), self._found.get(index)
        if clock and (known is None or clock.within_s < known.within_s):
            self._found[index] = clock

    def named(self, names: Sequence[str]) -> dict[str, Clock]:
        """The offsets by name.

        Args:
            names: the names of all members, by index.
        """
        return {names[index]: clock for index, clock in sorted(self._found.items())}


def advice(clocks: Mapping[str, Clock]) -> list[str]:
    """Returns a message on clocks that are off.

    Args:
        clocks: offsets by the name of the process.

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
    """Formats an offset.

    Example:
        >>> shown(Clock(2.25, 0.001))
        '2.2 s ahead'
    """
    return f"{abs(clock.ahead_s):.1f} s {'ahead' if clock.ahead_s > 0 else 'behind'}"

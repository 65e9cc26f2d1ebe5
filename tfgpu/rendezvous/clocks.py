"""Estimates the offset between the clocks of two machines from a request and its answer.

The caller records its own time before and after; the answer contains the other's time. The midpoint is the best
estimate, with an error of at most half the round trip (Cristian, "Probabilistic clock synchronization", 1989; as NTP).
"""

from collections.abc import Mapping
from dataclasses import dataclass

MOST_S = 2.0
"""The largest tolerated offset in seconds; larger ones confuse file times, logs of several machines, certificates."""


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


def note(clocks: dict[int, Clock], index: int, answer: Mapping, *, sent_s: float, took_s: float) -> None:
    """Records an answer, if it gives a more accurate offset.

    Args:
        clocks: the most accurate offset of each machine so far, by its number.
        index: the number of the machine that has answered.
        answer: its answer, with its time as `clock`.
        sent_s: this machine's time at the request.
        took_s: seconds until the answer.
    """
    clock, known = read(answer.get("clock"), sent_s=sent_s, took_s=took_s), clocks.get(index)
    if clock and (known is None or clock.within_s < known.within_s):
        clocks[index] = clock


def advice(clocks: Mapping[str, Clock]) -> list[str]:
    """Returns a message on clocks that are off.

    Args:
        clocks: offsets by the name of the process.

    Example:
        >>> advice({"worker 1": Clock(-30.0, 0.1), "worker 2": Clock(0.5, 0.1)})
        ['The clock of worker 1 is 30.0 s behind. Set the clocks: `sudo timedatectl set-ntp true`, or `sudo chronyc \
makestep`.']
    """
    told = [
        f"{name} is {abs(clock.ahead_s):.1f} s {'ahead' if clock.ahead_s > 0 else 'behind'}"
        for name, clock in clocks.items()
        if clock.is_off
    ]
    fix = "Set the clocks: `sudo timedatectl set-ntp true`, or `sudo chronyc makestep`."
    return [f"The clock of {', of '.join(told)}. {fix}"] if told else []

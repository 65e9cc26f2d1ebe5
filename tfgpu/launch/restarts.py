"""The restart policy of every engine: how many restarts a group gets, and the back-off before each.

An engine (this machine, ssh, Slurm, Ray, Spark) can run its group once, which is an attempt. This module decides for
all engines when to start another attempt, after which back-off, and when to give up.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

from tfgpu.errors import Preempted

PREEMPTED = Preempted.EXIT_CODE
"""Exit code of a process that was asked to stop and has saved (EX_TEMPFAIL: try again later)."""
WRONG_INPUT = 2
"""Exit code of the command line for wrong input, which no restart can fix."""
HEARTBEAT_TIMEOUT = 124
"""Exit code of a process that was killed after a heartbeat timeout (as `timeout` has it)."""
BRIEF_S = 5.0
"""Seconds after the start within which a preemption is followed by a wait, to avoid a hot loop."""
PROGRESS_S = 600.0
"""Seconds after which an attempt counts as progress: the back-off starts over."""


@dataclass
class Restarts:
    """The restart policy of a group, and how many restarts are used.

    A failure uses one restart, a preemption none. The back-off doubles from failure to failure, and starts over after
    an attempt of ten minutes.

    Args:
        most: restarts after failures.
        first_wait_s: the first back-off in seconds.
        longest_wait_s: the longest back-off.

    Example:
        >>> restarts = Restarts(most=1)
        >>> restarts.after(75, ran_s=60), restarts.after(1, ran_s=60), restarts.after(1, ran_s=60)
        (0.0, 1.0, None)
        >>> restarts = Restarts(most=9)
        >>> [restarts.after(1, ran_s=seconds) for seconds in (3, 3, 3, 700, 3)]
        [1.0, 2.0, 4.0, 1.0, 2.0]
    """

    most: int = 0
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    made: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)

    def __str__(self) -> str:
        return f"{self.made} of {self.most} restarts used"

    def after(self, code: int, ran_s: float) -> float | None:
        """Decides on a restart.

        Args:
            code: exit code of the process that ended first: 0 done, 75 preempted, 2 wrong input, others a failure.
            ran_s: seconds that the attempt ran.

        Returns:
            Seconds to wait before the next attempt; None: no further attempt.
        """
        if code == PREEMPTED:
            return 0.0 if ran_s >= BRIEF_S else self.first_wait_s
        if code in (0, WRONG_INPUT) or self.made >= self.most:
            return None
        if ran_s >= PROGRESS_S:
            self.in_a_row = 0
        wait_s = min(self.first_wait_s * 2**self.in_a_row, self.longest_wait_s)
        self.made, self.in_a_row = self.made + 1, self.in_a_row + 1
        return wait_s


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        code: exit code of the decisive process: 128+n for signal n, 124 for a heartbeat timeout.
        member: the number of that process; None if it was not a member, such as `srun` itself.
        asked: whether the group had been asked to stop.
    """

    code: int
    member: int | None = None
    asked: bool = False


class Engine(Protocol):
    """Where a group runs."""

    def run(self, attempt: int) -> Ending:
        """Runs the group once, and returns when all its processes have ended."""

    def may_restart(self, ending: Ending) -> bool:
        """Whether the restart policy applies at all after a failed attempt."""

    def restart(self, ending: Ending, wait_s: float | None) -> bool:
        """Reports the policy's decision, and waits.

        Args:
            ending: how the last attempt ended.
            wait_s: the back-off in seconds; None: the policy allows no restart.

        Returns:
            Whether to start the next attempt.
        """


def supervise(engine: Engine, restarts: Restarts, *, first: int = 1) -> Ending:
    """Runs attempts until one succeeds or no restart is allowed.

    Args:
        engine: runs the group.
        restarts: the restart policy.
        first: the number of the first attempt.

    Returns:
        How the last attempt ended.
    """
    attempt = first
    while True:
        began_at = time.monotonic()
        ending = engine.run(attempt)
        if ending.code == 0 or not engine.may_restart(ending):
            return ending
        wait_s = restarts.after(ending.code, time.monotonic() - began_at)
        if not engine.restart(ending, wait_s) or wait_s is None:
            return ending
        attempt += 1

"""The supervisor of every engine: runs a group of processes, and restarts it as a whole by one policy.

An engine (this machine, ssh, Slurm, Ray, Spark) can run its group once, which is an attempt. This module decides for
all engines when to start another attempt, after which back-off, and when to give up.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from tfgpu.launch.restarts import Restarts


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

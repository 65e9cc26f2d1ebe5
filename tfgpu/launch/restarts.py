"""Whether a group of processes that has ended is started again: a budget that a preemption does not spend."""

from dataclasses import dataclass, field

from tfgpu.errors import Preempted

PREEMPTED = Preempted.EXIT_CODE
"""Exit code of a process that was asked to leave and has saved (EX_TEMPFAIL: try again later)."""
WRONG_INPUT = 2
"""Exit code of the command line for what another start cannot mend."""
BRIEF_S = 5.0
"""A preemption within so many seconds of the start is followed by a wait: again and again, it would be a hot loop."""
GOOD_S = 600.0
"""What ran for so many seconds was well: its failure is the first in a row."""
SILENT = 124
"""Exit code that stands for a process which gave no sign of life (as `timeout` has it)."""


@dataclass
class Restarts:
    """Counts what is left.

    Args:
        most: restarts after failures.
        first_wait_s: seconds before the first restart; each further one doubles it.
        longest_wait_s: no wait is longer.

    Example:
        >>> restarts = Restarts(most=1)
        >>> restarts.after(75), restarts.after(1), restarts.after(1)
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

    def after(self, code: int, ran_s: float | None = None) -> float | None:
        """Seconds to wait before the next start, or None where there is to be none.

        Args:
            code: the exit code of the process that ended first: 0 done, 75 preempted, 2 wrong input, others failed.
            ran_s: seconds that it ran, where that is known: after ten good minutes the waits begin anew.
        """
        if code == PREEMPTED:
            return 0.0 if ran_s is None or ran_s >= BRIEF_S else self.first_wait_s
        if code in (0, WRONG_INPUT) or self.made >= self.most:
            return None
        if ran_s is not None and ran_s >= GOOD_S:
            self.in_a_row = 0
        wait = min(self.first_wait_s * 2**self.in_a_row, self.longest_wait_s)
        self.made, self.in_a_row = self.made + 1, self.in_a_row + 1
        return wait

"""One repair: a fault of Keras or TensorFlow under replicas, its probe, and its fix."""

from collections.abc import Callable
from dataclasses import dataclass

from tfgpu.compat import versions


@dataclass(frozen=True)
class Repair:
    """One upstream fault and its repair.

    Attributes:
        name: short name, shown by `tfgpu doctor`.
        fault: what stock Keras does, in one line.
        issue: the upstream issue's URL, or `""` if none was reported.
        probe: tells whether this Keras has the fault. Takes about a second on a CPU with four logical devices, and runs
            in a process without repairs.
        apply: wraps the functions at fault by `compat.patch.wrap`. Called once per process.
        since: the first minor version of Keras that has the fault; None if every supported one before `until` has it.
        until: the last minor version of Keras that has the fault; None if every supported one after `since` has it.
    """

    name: str
    fault: str
    issue: str
    probe: Callable[[], bool]
    apply: Callable[[], None]
    since: str | None = None
    until: str | None = None

    def is_for_this_keras(self) -> bool:
        """Whether the installed version of Keras is between `since` and `until`."""
        is_old = self.since is not None and not versions.is_at_least("keras", self.since)
        return not is_old and (self.until is None or versions.is_at_most("keras", self.until))

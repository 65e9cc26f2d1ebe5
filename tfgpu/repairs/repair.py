"""One repair: a fault of Keras or TensorFlow under replicas, its probe, and its fix."""

from collections.abc import Callable
from dataclasses import dataclass


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
        until: the last minor version of Keras that has the fault; None if no version is known to be without it.
    """

    name: str
    fault: str
    issue: str
    probe: Callable[[], bool]
    apply: Callable[[], None]
    until: str | None = None

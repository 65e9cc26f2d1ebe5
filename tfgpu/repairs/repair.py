"""One repair: a fault of Keras or TensorFlow under replicas, how to see it, and how it is repaired."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Repair:
    """One upstream fault and its repair.

    Attributes:
        name: short name, shown by `tfgpu doctor`.
        fault: what stock Keras does, in one line.
        issue: the upstream issue's address, or `""` where none was reported.
        probe: tells whether this Keras has the fault. Takes about a second on a CPU with four logical devices, and runs
            in a process without repairs.
        apply: wraps the functions at fault by `compat.patch.wrap`. Called once a process.
        until: the last minor version of Keras that has the fault; None while no version is known to be without it.
    """

    name: str
    fault: str
    issue: str
    probe: Callable[[], bool]
    apply: Callable[[], None]
    until: str | None = None

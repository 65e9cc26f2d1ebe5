"""Repairs of Keras 3 under `tf.distribute`: one per fault, each wrapped around the smallest function at fault.

The strategy factories call `repair_keras()`. Before using a `tf.distribute` strategy of your own, call
`tfgpu.repair_keras()`. Without a strategy, Keras computes the same as before. `TFGPU_REPAIR=0` in the environment
leaves Keras unchanged.

Each module with repairs has a tuple `REPAIRS`; features have theirs in their own module `repairs`.
"""

import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tfgpu.compat import versions

__all__ = ["Repair", "all_repairs", "is_enabled", "repair_keras"]

MODULES = (
    "tfgpu.repairs.strategies",
    "tfgpu.repairs.losses",
    "tfgpu.repairs.row_mixing",
    "tfgpu.repairs.layers",
    "tfgpu.repairs.batch_normalization",
    "tfgpu.repairs.functions",
    "tfgpu.repairs.optimizers",
    "tfgpu.optim.repairs",
    "tfgpu.repairs.trainer",
    "tfgpu.repairs.predict",
    "tfgpu.repairs.random",
    "tfgpu.repairs.numpy",
    "tfgpu.repairs.image_preprocessing",
    "tfgpu.parallel.repairs",
    "tfgpu.attention.repairs",
    "tfgpu.repairs.saving",
    "tfgpu.checkpoint.repairs",
    "tfgpu.parameter_server.repairs",
)
"""In the order in which their repairs are applied; imported only then, so that features can be listed here."""

_lock = threading.Lock()
_in_force: list[str] = []


@dataclass(frozen=True)
class Repair:
    """One upstream fault and its repair.

    Attributes:
        name: short name, shown by `tfgpu doctor`.
        probe: tells whether this Keras has the fault. Takes about a second on a CPU with four logical devices, and runs
            in a process without repairs.
        apply: wraps the functions at fault by `compat.patch.wrap`. Called once per process.
        fault: what stock Keras does, in one line; by default what `probes` says of the probe.
        issue: the upstream issue's URL, or `""` if none was reported.
        since: the first minor version of Keras that has the fault; None if every supported one before `until` has it.
        until: the last minor version of Keras that has the fault; None if every supported one after `since` has it.
    """

    name: str
    probe: Callable[[], bool]
    apply: Callable[[], None]
    fault: str = ""
    issue: str = ""
    since: str | None = None
    until: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "fault", self.fault or getattr(self.probe, "fault", ""))

    def is_for_this_keras(self) -> bool:
        """Whether the installed version of Keras is between `since` and `until`."""
        is_old = self.since is not None and not versions.is_at_least("keras", self.since)
        return not is_old and (self.until is None or versions.is_at_most("keras", self.until))


def is_enabled() -> bool:
    """Whether repairs are enabled: `TFGPU_REPAIR=0` in the environment disables them."""
    return os.environ.get("TFGPU_REPAIR", "1") != "0"


def probes(fault: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Decorator: says which fault of stock Keras a probe looks for, in one line."""

    def mark(probe: Callable[[], bool]) -> Callable[[], bool]:
        probe.fault = fault
        return probe

    return mark


@cache
def all_repairs() -> tuple[Repair, ...]:
    """All repairs that the installed Keras may need, in the order in which they are applied."""
    listed = [repair for name in MODULES for repair in importlib.import_module(name).REPAIRS]
    return tuple(repair for repair in listed if repair.is_for_this_keras())


def repair_keras() -> tuple[str, ...]:
    """Applies every repair, once per process.

    If this version has changed a function, it is repaired only if the repair's probe still finds the fault. A probe
    runs in its own process, which takes some seconds.

    Returns:
        The names of the active repairs; empty under `TFGPU_REPAIR=0`.

    Raises:
        MachineError: this version of Keras or TensorFlow lacks a function that a repair wraps.

    Example:
        >>> import tfgpu
        >>> names = tfgpu.repair_keras()
    """
    if not is_enabled():
        return ()
    with _lock:
        if not _in_force:
            _in_force.extend(repair.name for repair in all_repairs() if _apply(repair))
    return tuple(_in_force)


def _apply(repair: Repair) -> bool:
    """Applies one repair; returns whether it is active."""
    from tfgpu.compat import patch
    from tfgpu.repairs import probing

    answers: list[bool | None] = []

    def is_needed() -> bool:
        answers.append(probing.ask_in_new_process(repair.name))
        return answers[-1] is not False  # without an answer, assume that the fault exists

    with patch.applying(is_needed):
        repair.apply()
    return answers != [False]

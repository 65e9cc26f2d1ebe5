"""Repairs of Keras 3 under `tf.distribute`: one function a fault, wrapped around the smallest Keras function at fault.

`repair_keras()` is called by the strategy factories; people who make their own `tf.distribute` strategy call
`tfgpu.repair_keras()`, which is the same. With no strategy, Keras computes what it always did.
"""

import os
import threading

from tfgpu.repairs.repair import Repair

__all__ = ["Repair", "fixes", "is_enabled", "repair_keras"]

_lock = threading.Lock()
_installed: list[str] = []


def is_enabled() -> bool:
    """Whether repairs are wanted: `TFGPU_REPAIR=0` in the environment leaves Keras alone."""
    return os.environ.get("TFGPU_REPAIR", "1") != "0"


def fixes() -> tuple[Repair, ...]:
    """All repairs, in the order in which they are applied."""
    from tfgpu.repairs import catalogue

    return catalogue.FIXES


def repair_keras() -> tuple[str, ...]:
    """Applies every repair, once a process.

    Returns:
        The names of the repairs in force; empty under `TFGPU_REPAIR=0`.

    Raises:
        MachineError: this Keras lacks a function that a repair wraps.

    Example:
        >>> import tfgpu
        >>> names = tfgpu.repair_keras()
    """
    if not is_enabled():
        return ()
    with _lock:
        if not _installed:
            for fix in fixes():
                fix.apply()
                _installed.append(fix.name)
    return tuple(_installed)

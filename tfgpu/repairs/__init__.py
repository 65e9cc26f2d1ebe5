"""Repairs of Keras 3 under `tf.distribute`: one per fault, each wrapped around the smallest function at fault.

The strategy factories call `repair_keras()`. Before using a `tf.distribute` strategy of your own, call
`tfgpu.repair_keras()`. Without a strategy, Keras computes the same as before. `TFGPU_REPAIR=0` in the environment
leaves Keras unchanged.

Each module with repairs has a tuple `REPAIRS`; features have theirs in their own module `repairs`.
"""

import importlib
import os
import threading
from functools import cache

from tfgpu.repairs.repair import Repair

__all__ = ["Repair", "all_repairs", "is_enabled", "repair_keras"]

MODULES = (
    "tfgpu.repairs.collective_keys",
    "tfgpu.repairs.first_values",
    "tfgpu.repairs.losses",
    "tfgpu.repairs.row_mixing",
    "tfgpu.repairs.layers",
    "tfgpu.repairs.batch_normalization",
    "tfgpu.repairs.regularizers",
    "tfgpu.repairs.functions",
    "tfgpu.repairs.custom_gradients",
    "tfgpu.repairs.optimizers",
    "tfgpu.optim.repairs",
    "tfgpu.repairs.data",
    "tfgpu.repairs.trainer",
    "tfgpu.repairs.predict",
    "tfgpu.repairs.random",
    "tfgpu.repairs.numpy",
    "tfgpu.repairs.accuracy_metrics",
    "tfgpu.repairs.image_preprocessing",
    "tfgpu.repairs.aug_mix",
    "tfgpu.repairs.seed_generator",
    "tfgpu.parallel.repairs",
    "tfgpu.attention.repairs",
    "tfgpu.repairs.distribution_lib",
    "tfgpu.repairs.saving",
    "tfgpu.checkpoint.repairs",
    "tfgpu.parameter_server.repairs",
    "tfgpu.repairs.variables",
)
"""In the order in which their repairs are applied; imported only then, so that features can be listed here."""

_lock = threading.Lock()
_in_force: list[str] = []


def is_enabled() -> bool:
    """Whether repairs are enabled: `TFGPU_REPAIR=0` in the environment disables them."""
    return os.environ.get("TFGPU_REPAIR", "1") != "0"


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

"""Finds what stops or slows training on this machine, and the commands that fix it.

`facts/` collects facts about the machine, `checks/` judges them, `check.py` writes the fixes as a script. `selftest/`
measures and trains; `bundle.py` writes a file for a bug report, cleaned by `tfgpu/redact/`.

Example:
    >>> from tfgpu import doctor
    >>> for check in doctor.examine():
    ...     print(check.name, check.status, check.found, check.fix)
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from tfgpu.doctor.check import Check, script
from tfgpu.doctor.checks import judge
from tfgpu.doctor.facts import gather
from tfgpu.errors import InputError

if TYPE_CHECKING:
    import keras

__all__ = ["Check", "advise", "batch_norm", "examine", "gather", "judge", "script"]
__all__ += ["stops_training", "tensor_cores", "to_json"]


def examine(*, environ: Mapping[str, str] | None = None, model: "keras.Model | str | None" = None) -> list[Check]:
    """Checks everything that training needs on this machine, without changes. Takes about 20 s, mostly to probe Keras.

    Args:
        environ: environment variables by name; `None` means this process's.
        model: a Keras model, or a name for `tfgpu.models.build`, whose layers are checked too.

    Returns:
        The checks, in reading order.

    Raises:
        InputError: `model` is an unknown name.

    Example:
        checks = doctor.examine(model="resnet")
        print([check.fix for check in checks if check.status == "problem"])
    """
    environ = dict(os.environ if environ is None else environ)
    advice = advise(model)  # first, so that a wrong name fails at once
    return [*judge(gather(environ), environ), *advice]


def advise(model: "keras.Model | str | None") -> list[Check]:
    """The checks of a model; empty without one, or if Keras cannot be imported, which `judge` reports."""
    with contextlib.suppress(ImportError):
        if model is not None:
            model = _built(model)
            return [tensor_cores(model), *batch_norm(model)]
    return []


def stops_training(checks: Iterable[Check]) -> bool:
    """Returns whether a problem was found; the command line then exits with 1."""
    return any(check.status == "problem" for check in checks)


def to_json(checks: Iterable[Check]) -> str:
    """Returns the checks as a JSON list of objects with the fields of `Check`."""
    return json.dumps([asdict(check) for check in checks], indent=2)


def tensor_cores(model: "keras.Model | str") -> Check:
    """Looks for layer sizes that Tensor Cores cannot use well.

    Args:
        model: a Keras model, or a name for `tfgpu.models.build`.

    Returns:
        A check: ok, or a warning with a suggestion for each size.
    """
    from tfgpu import precision

    model = _built(model)
    findings = precision.advice(model)
    if not findings:
        return Check("Tensor Cores", "ok", "every layer width is a multiple of 8 (of 16 in 8-bit layers)")
    found = "; ".join(f"{each.layer}: {each.dimension}={each.size}" for each in findings)
    return Check("Tensor Cores", "warning", found, " ".join(f"{each.layer}: {each.suggestion}" for each in findings))


def batch_norm(model: "keras.Model | str") -> list[Check]:
    """Says over which rows the BatchNormalization layers of a model take their moments when several replicas train it.

    Args:
        model: a Keras model, or a name for `tfgpu.models.build`.

    Returns:
        No check for a model without such layers. Else one: ok where the whole batch's moments are taken, a warning
        where `tfgpu.strategy(..., batch_norm="replica")` takes each replica's.

    Example:
        >>> from tfgpu import doctor
        >>> [check.status for check in doctor.batch_norm("resnet")]
        ['ok']
    """
    import keras

    from tfgpu.compat.layers import layers_within
    from tfgpu.compat.training import strategy_of
    from tfgpu.repairs.batch_normalization import has_replica_moments

    model = _built(model)
    found = [layer for layer in layers_within(model) if isinstance(layer, keras.layers.BatchNormalization)]
    strategy = strategy_of(model)
    by_replica = [layer for layer in found if not layer.synchronized]
    if not found:
        return []
    if strategy is None or not has_replica_moments(strategy) or not by_replica:
        most = 2 * len(found)  # layers on parallel branches share theirs
        text = f"{_count(found)} by the whole batch: on several replicas up to {most} collectives a step"
        return [Check("BatchNormalization", "ok", text)]
    text = f"{_count(by_replica)} by each replica's own rows: the result depends on the number of replicas"
    fix = 'Leave out batch_norm="replica", or set `synchronized=True` in layers that need the whole batch\'s moments.'
    return [Check("BatchNormalization", "warning", text, fix)]


def _count(layers: list) -> str:
    return "1 layer normalizes" if len(layers) == 1 else f"{len(layers)} layers normalize"


def _built(model: "keras.Model | str") -> "keras.Model":
    """A model, by its name for `tfgpu.models.build` too."""
    from tfgpu import models

    if not isinstance(model, str):
        return model
    try:
        return models.build(model, input_shape=(96, 96, 3), classes=1000)
    except InputError as error:
        if str(error).startswith("Unknown model"):
            raise
        return models.build(model, input_shape=(128,), classes=1000)

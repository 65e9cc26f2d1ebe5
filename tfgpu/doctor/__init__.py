"""Finds what stops or slows training on this machine, and the commands that fix it.

`facts/` collects facts about the machine, `checks/` judges them, `script.py` writes the fixes as a script. `selftest/`
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

from tfgpu.doctor.check import Check
from tfgpu.doctor.checks import judge
from tfgpu.doctor.facts import gather
from tfgpu.doctor.script import script
from tfgpu.errors import InputError

if TYPE_CHECKING:
    import keras

__all__ = ["Check", "advise", "examine", "gather", "judge", "script", "stops_training", "tensor_cores", "to_json"]


def examine(*, environ: Mapping[str, str] | None = None, model: "keras.Model | str | None" = None) -> list[Check]:
    """Checks everything that training needs on this machine, without changes. Takes about 20 s, mostly to probe Keras.

    Args:
        environ: environment variables by name; `None` means this process's.
        model: a Keras model, or a name for `tfgpu.models.build`, whose layer sizes are checked too.

    Returns:
        The checks, in reading order.

    Raises:
        InputError: `model` is an unknown name.
    """
    environ = dict(os.environ if environ is None else environ)
    advice = advise(model)  # first, so that a wrong name fails at once
    return [*judge(gather(environ), environ), *advice]


def advise(model: "keras.Model | str | None") -> list[Check]:
    """The check of `tensor_cores`; empty without a model, or if Keras cannot be imported, which `judge` reports."""
    with contextlib.suppress(ImportError):
        return [] if model is None else [tensor_cores(model)]
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
    from tfgpu import models, precision

    if isinstance(model, str):
        try:
            model = models.build(model, input_shape=(96, 96, 3), classes=1000)
        except InputError as error:
            if str(error).startswith("Unknown model"):
                raise
            model = models.build(model, input_shape=(128,), classes=1000)
    findings = precision.advice(model)
    if not findings:
        return Check("Tensor Cores", "ok", "every layer width is a multiple of 8 (of 16 in 8-bit layers)")
    found = "; ".join(f"{each.layer}: {each.dimension}={each.size}" for each in findings)
    return Check("Tensor Cores", "warning", found, " ".join(f"{each.layer}: {each.suggestion}" for each in findings))

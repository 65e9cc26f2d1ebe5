"""What stops or slows training on this machine, and the command that mends it.

`facts/` asks the machine, `checks/` decides what the answers mean, `script.py` writes down what mends it. `selftest/`
measures and trains; `bundle.py` makes one file for a bug report, which `tfgpu/redact/` has cleaned.

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
    """Looks at everything that training needs here. Changes nothing; takes about 20 s, mostly to try Keras.

    Args:
        environ: environment variables by name; `None` means this process's.
        model: a Keras model, or a name that `tfgpu.models.build` knows, whose layer sizes are looked at too.

    Returns:
        The checks, in the order in which they are to be read.

    Raises:
        InputError: `model` is a name that is not known.
    """
    environ = dict(os.environ if environ is None else environ)
    advice = advise(model)  # first, so that a wrong name is said at once
    return [*judge(gather(environ), environ), *advice]


def advise(model: "keras.Model | str | None") -> list[Check]:
    """As `tensor_cores`; nothing without a model, or where Keras cannot be imported, which `judge` says."""
    with contextlib.suppress(ImportError):
        return [] if model is None else [tensor_cores(model)]
    return []


def stops_training(checks: Iterable[Check]) -> bool:
    """Tells whether a problem was found; the command line then exits with 1."""
    return any(check.status == "problem" for check in checks)


def to_json(checks: Iterable[Check]) -> str:
    """Returns the checks as a JSON list of objects with the fields of `Check`."""
    return json.dumps([asdict(check) for check in checks], indent=2)


def tensor_cores(model: "keras.Model | str") -> Check:
    """Looks for layer sizes that Tensor Cores cannot use well.

    Args:
        model: a Keras model, or a name that `tfgpu.models.build` knows.

    Returns:
        A check that is ok, or a warning with a suggestion for each size.
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

"""What stops or slows training on this machine, and the command that mends it.

`facts.py` asks the machine, `checks.py` decides what the answers mean.

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

from tfgpu.doctor.checks import Check, judge
from tfgpu.doctor.facts import gather
from tfgpu.errors import InputError

if TYPE_CHECKING:
    import keras

__all__ = ["Check", "examine", "gather", "judge", "stops_training", "tensor_cores", "to_json"]


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
    advice = []
    if model is not None:  # first, so that a wrong name is said at once
        with contextlib.suppress(ImportError):
            advice.append(tensor_cores(model))
    return [*judge(gather(environ), environ), *advice]


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

"""How a repair takes hold: one Keras function is wrapped, and a Keras without it is a clear error."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import keras

from tfgpu.errors import MachineError

TESTED_KERAS = "3.15"


@dataclass(frozen=True)
class Fix:
    """One upstream fault and its repair.

    Attributes:
        name: short name, shown by `tfgpu doctor`.
        fault: what stock Keras does, in one line.
        issue: the upstream issue's address, or `""` where none was reported.
        probe: tells whether this Keras still has the fault; under one second on a CPU with four logical devices.
        apply: wraps the Keras functions at fault. Called once a process.
    """

    name: str
    fault: str
    issue: str
    probe: Callable[[], bool]
    apply: Callable[[], None]


def wrap(owner: object, name: str) -> Callable[[Callable], Callable]:
    """Decorator: `owner.name` becomes the decorated function, which gets the stock one as its first argument.

    Args:
        owner: the class or module that holds the function.
        name: the function's name there.

    Raises:
        MachineError: this Keras has no such function: the repair does not fit it.

    Example:
        @wrap(Loss, "__call__")
        def call(stock, self, y_true, y_pred, sample_weight=None): ...
    """
    if not hasattr(owner, name):
        raise MachineError(
            f"Keras {keras.__version__} has no `{getattr(owner, '__name__', owner)}.{name}`, which a repair needs "
            f"(tested with Keras {TESTED_KERAS}). Install `keras~={TESTED_KERAS}`, or set TFGPU_REPAIR=0."
        )

    def put(fix: Callable) -> Callable:
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def wrapped(*args, **kwargs):
            return fix(stock, *args, **kwargs)

        setattr(owner, name, wrapped)
        return fix

    return put

"""The errors that tfgpu raises on purpose, the end of a preempted process, and the sentence for an unknown name."""

import difflib
import importlib
import math
import numbers
import re
from collections.abc import Iterable
from types import ModuleType

MOST_NAMED = 40
"""How many choices an error lists."""
_SILENT = re.compile(r"stopped sending heartbeats\):\n(/job:\w+/replica:0/task:\d+)")
_TO_FIRST = "/tensorflow.CoordinationService/Heartbeat"


class InputError(ValueError):
    """Something that the caller wrote is wrong; the message names the fix. The command line exits with 2."""

    __init__ = Exception.__init__  # autograph then raises it as itself, with the user's lines, and no StagingError


class MachineError(RuntimeError):
    """The machine or the process is not in a state to do this; the message names the next action."""


class ReplicasDiffer(MachineError):
    """What must be equal on all replicas and workers is not.

    Args:
        message: who differs, in what, and what to do.
        replicas: the numbers of those that differ from the others.
        variable: the path of the first variable in which they differ.
        step: steps of this `fit` that were done when it was found.
    """

    def __init__(self, message: str, *, replicas: Iterable[int] = (), variable: str | None = None, step: int = 0):
        super().__init__(message)
        self.replicas, self.variable, self.step = tuple(replicas), variable, step


class OutOfMemory(MachineError):
    """A device's or the host's memory is used up.

    Args:
        sizes: what was asked for, and how much is known to be in use.
        fix: what makes it smaller.
    """

    def __init__(self, sizes: str, fix: str):
        super().__init__(f"{sizes} {fix}")
        self.sizes = sizes


class Preempted(SystemExit):
    """The process was asked to leave and has saved its training; uncaught, it ends the process with exit code 75.

    A launcher that knows the code (`EX_TEMPFAIL` of sysexits.h) starts the same command again.

    Args:
        message: who asked, and what is saved.

    Example:
        >>> Preempted("Asked to leave by SIGTERM.").code
        75
    """

    EXIT_CODE = 75

    def __init__(self, message: str):
        super().__init__(message)
        self.code: int = self.EXIT_CODE


def whole_number(name: str, value: object, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Checks that an argument is a whole number, Python's or NumPy's; True and False are not.

    Args:
        name: the argument's name.
        value: what was received.
        minimum, maximum: the smallest and the largest allowed value.

    Returns:
        The value as an `int`.

    Raises:
        InputError: it is something else, or out of range.

    Example:
        >>> whole_number("keep", 3)
        3
    """
    if not is_whole(value, minimum=minimum) or (maximum is not None and value > maximum):
        span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InputError(f"`{name}` must be a whole number {span}. Received: {value!r}.")
    return int(value)


def is_whole(value: object, *, minimum: int = 1) -> bool:
    """Whether a value is a whole number from `minimum`, Python's or NumPy's; True and False are not.

    Example:
        >>> is_whole(3), is_whole(0), is_whole(2.0), is_whole(True)
        (True, False, False, False)
    """
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= minimum


def positive(name: str, value: object) -> float:
    """Checks that an argument is a number above 0, Python's or NumPy's; True is not, infinity is.

    Args:
        name: the argument's name.
        value: what was received.

    Returns:
        The value.

    Raises:
        InputError: it is something else.

    Example:
        >>> positive("timeout_s", 3)
        3
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value > 0:
        raise InputError(f"`{name}` must be above 0. Received: {value!r}.")
    return value


def is_number(value: object) -> bool:
    """Whether a value is a finite real number, Python's or NumPy's; True and False are not.

    Example:
        >>> is_number(0.5), is_number(float("nan")), is_number(True)
        (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return isinstance(value, numbers.Integral) or math.isfinite(value)


def unknown(kind: str, name: object, choices: Iterable[str]) -> InputError:
    """Makes the error for a name that is not one of `choices`, with the closest match.

    Args:
        kind: what the name stands for, such as `"model"`.
        name: what was received.
        choices: the names that would have been right.

    Returns:
        An `InputError`, to be raised by the caller.

    Example:
        >>> str(unknown("strategy", "mirored", ["one_device", "mirrored"]))
        "Unknown strategy 'mirored'. Did you mean 'mirrored'? Choices: one_device, mirrored."
    """
    names = list(choices)
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(names[:MOST_NAMED])
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return InputError(f"Unknown {kind} {name!r}.{hint} Choices: {shown}{more}.")


def required(package: str, need: str, fix: str, kind: type[Exception] = InputError) -> ModuleType:
    """Imports an optional package.

    Args:
        package: its full name.
        need: what needs it, without a full stop.
        fix: how to install it.
        kind: of the error.

    Raises:
        InputError, MachineError: it is not installed, or does not import beside the other installed packages.

    Example:
        >>> required("json", "Settings need json", "Install Python.").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(package)
    except Exception as error:  # a release for another NumPy or ml_dtypes: an AttributeError
        raise kind(f"{need} ({' '.join(str(error).split())}). {fix}") from error


def no_script(script: str) -> InputError:
    """Makes the error for a missing script, or for an unknown option in its position.

    Args:
        script: what was given as the script.

    Returns:
        An `InputError`, to be raised by the caller.

    Example:
        >>> str(no_script("train.py"))
        "There is no script 'train.py'. Give the path of a Python file."
    """
    if script.startswith("-"):
        return InputError(
            f"{script!r} is not an option of this command. Give the path of a Python file, and the script's own "
            "options after it."
        )
    return InputError(f"There is no script {script!r}. Give the path of a Python file.")


def silent_task(message: str) -> str | None:
    """Finds in an error of TensorFlow the task whose heartbeats have stopped for 10 s.

    Args:
        message: of the error.

    Returns:
        Its name, such as `"/job:worker/replica:0/task:1"`; "" for the first task, which holds the service; else None.
    """
    found = _SILENT.search(message)
    if found is not None:
        return found[1]
    return "" if _TO_FIRST in message else None

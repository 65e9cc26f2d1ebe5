"""What a function or an object of the user's captures: its integer constants, and TensorFlow's variables.

A label to ignore, the k of a top-k loss: such numbers are in a function's code, its closure, its defaults, its object,
its module, or a module or class that it names. Elsewhere they are not found.
"""

import contextlib
import functools
import inspect
import itertools
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.core.state import trial_scope

_LIBRARIES = ("keras", "tensorflow", "tfgpu", "numpy", "builtins", "functools")
_NUMBERS, _THINGS, _STEPS = 12, 200, 10**7
_TF_FUNCTION = tf.types.experimental.PolymorphicFunction
_OF_CLASSES = _TF_FUNCTION, int, float, np.integer, np.floating


@dataclass
class Captures:
    """Numbers and variables that a function uses.

    Attributes:
        numbers: up to twelve distinct integers other than -1, 0 and 1, in the order in which they were found.
        variables: TensorFlow's own, whose changes a Keras scope does not intercept.
    """

    numbers: list[float] = field(default_factory=list)
    variables: list[tf.Variable] = field(default_factory=list)
    _before: list = field(default_factory=list)

    def largest(self, most: int) -> int:
        """The largest whole number up to `most`, or 0."""
        return max((int(each) for each in self.numbers if 0 < each <= most), default=0)

    @property
    def beyond(self) -> int:
        """The largest number that may be one of steps, if it is beyond those that a trial tries anyway; else 0."""
        found = self.largest(_STEPS)
        return found if found >= trial_scope.LATER else 0

    @contextlib.contextmanager
    def preserving_variables(self) -> Iterator[None]:
        """Restores the variables' values after the block."""
        self._before = [(copy, copy.read_value()) for each in self.variables for copy in variables.copies(each)]
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Gives the variables the values that they had at the block's begin."""
        for variable, value in self._before:
            variable.assign(value)


def of(thing: object) -> Captures:
    """Searches a function, a partial, a method or an object, and the user's functions that it calls.

    Example:
        >>> of(functools.partial(max, 0.5, 1, -9999, np.array([50]))).numbers
        [-9999, 50]
    """
    found, left, seen = Captures(), [thing], set()
    while left and len(seen) < _THINGS:
        each = left.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (int, float, np.integer, np.floating)):
            is_whole = not isinstance(each, bool) and 1 < abs(each) < 1e12 and each == int(each)
            if is_whole and each not in found.numbers and len(found.numbers) < _NUMBERS:
                found.numbers.append(each.item() if isinstance(each, np.generic) else each)
        elif isinstance(each, tf.Variable):
            found.variables.append(each)
        else:
            left += _parts(each)
    return found


def names_of(thing: object, number: int) -> list[str]:
    """The names by which the user's functions that `of` searches hold a whole number: global, free or an attribute.

    Example:
        >>> import types
        >>> names_of(types.SimpleNamespace(replicas=2), 2)
        ['replicas']
    """
    left, seen, found = [thing], set(), []
    while left and len(seen) < _THINGS:
        each = left.pop(0)
        if id(each) in seen or isinstance(each, (int, float)):
            continue
        seen.add(id(each))
        found += [name for name, value in _named(each).items() if type(value) is int and value == number]
        left += _parts(each)
    return list(dict.fromkeys(found))


def _named(thing: object) -> dict[str, object]:
    """What a function finds by a name, and the attributes of an object."""
    if isinstance(thing, types.FunctionType) and not _is_of_library(thing):
        known = inspect.getclosurevars(thing)
        return {**known.globals, **known.nonlocals}
    if isinstance(thing, (type, types.ModuleType, types.CodeType)) or _is_of_library(type(thing)):
        return {}
    return dict(getattr(thing, "__dict__", {}))


def _parts(thing: object) -> list:
    if isinstance(thing, (list, tuple)):
        return list(thing[:_NUMBERS])
    if isinstance(thing, (set, frozenset)):
        return list(itertools.islice(thing, _NUMBERS))
    if isinstance(thing, np.ndarray) or (isinstance(thing, tf.Tensor) and hasattr(thing, "numpy")):
        return _of_array(thing)
    if isinstance(thing, dict):
        return list(thing.values())[:_NUMBERS]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.CodeType):
        return list(thing.co_consts)
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    if isinstance(thing, _TF_FUNCTION):  # not by `hasattr`, which would run an object's own `__getattr__`
        return [thing.python_function]
    if isinstance(thing, (type, types.ModuleType)):
        return []
    if _is_of_library(type(thing)) and not isinstance(thing, (keras.losses.Loss, keras.metrics.Metric)):
        return []
    attributes = [value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_tfgpu")]
    methods = [value for cls in type(thing).__mro__ if not _is_of_library(cls) for value in vars(cls).values()]
    return attributes + [each for each in methods if inspect.isfunction(each) or isinstance(each, _OF_CLASSES)]


def _of_function(function: types.FunctionType) -> list:
    if hasattr(function, "__wrapped__"):
        return [function.__wrapped__]
    if _is_of_library(function):
        return []
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    used = function.__code__.co_names
    names = [function.__globals__[name] for name in used if name in function.__globals__]
    owners = [each for each in (*names, *cells) if isinstance(each, (type, types.ModuleType)) and _is_own(each)]
    named = [vars(each)[name] for each in owners for name in used if name in vars(each)]
    kept = (function.__kwdefaults__ or {}).values()
    return [function.__code__, *(function.__defaults__ or ()), *kept, *cells, *names, *named]


def _of_array(thing: np.ndarray | tf.Tensor) -> list:
    """The numbers of a small array or tensor."""
    shape = tuple(thing.shape)
    is_small = None not in shape and 0 < math.prod(shape) <= _NUMBERS
    dtype = thing.dtype.as_numpy_dtype if isinstance(thing, tf.Tensor) else thing.dtype
    return np.asarray(thing).reshape(-1).tolist() if is_small and np.dtype(dtype).kind in "iuf" else []


def _is_own(thing: type | types.ModuleType) -> bool:
    """Whether a class or a module is the user's."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__ or ""
    return name.split(".")[0] not in (*_LIBRARIES, *sys.stdlib_module_names)


def _is_of_library(thing: object) -> bool:
    return (getattr(thing, "__module__", None) or "").split(".")[0] in _LIBRARIES

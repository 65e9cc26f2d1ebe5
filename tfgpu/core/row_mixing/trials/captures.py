"""What a function or an object of the user's captures: its integer constants, and TensorFlow's variables.

A label to ignore, the k of a top-k loss: such numbers are in a function's code, its closure, its defaults, its object,
its module, or a module or class that it names. Elsewhere they are not found.
"""

import contextlib
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.compat import variables
from tfgpu.core.row_mixing import held_values
from tfgpu.core.state import trial_scope

_NUMBERS, _COMPARED, _THINGS, _STEPS = 12, 4, 200, 10**7


@dataclass
class Captures:
    """Numbers and variables that a function uses.

    Attributes:
        numbers: up to twelve distinct whole numbers other than -1, 0 and 1, in the order in which they were found;
            and up to four more, with which the code has compared tensors since.
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
    def used(self) -> Iterator[None]:
        """Restores the variables' values after the block, in which the code runs.

        Notes the numbers with which it compares tensors by `==` or `!=`: it may have computed them.
        """
        self._before = [(copy, copy.read_value()) for each in self.variables for copy in variables.copies(each)]
        try:
            with private.comparing(self.add):
                yield
        finally:
            self.restore()

    def add(self, number: float | np.generic) -> None:
        """Adds a number, if it is whole and none that is drawn anyway."""
        number = number.item() if isinstance(number, np.generic) else number
        is_whole = not isinstance(number, bool) and 1 < abs(number) < 1e12 and number == int(number)
        if is_whole and number not in self.numbers and len(self.numbers) < _NUMBERS + _COMPARED:
            self.numbers.append(number)

    def restore(self) -> None:
        """Gives the variables the values that they had at the block's begin."""
        for variable, value in self._before:
            variable.assign(value)


def of(thing: object) -> Captures:
    """Searches a function, a partial, a method or an object, and the user's functions that it calls.

    Example:
        >>> import functools
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
            if len(found.numbers) < _NUMBERS:
                found.add(each)
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
        named = held_values.of(each)
        found += [name.rpartition(".")[2] for name, value in named if type(value) is int and value == number]
        left += _parts(each)
    return list(dict.fromkeys(found))


def _parts(thing: object) -> list:
    if isinstance(thing, np.ndarray) or (isinstance(thing, tf.Tensor) and hasattr(thing, "numpy")):
        return _of_array(thing)
    if isinstance(thing, types.CodeType):
        return list(thing.co_consts)
    if isinstance(thing, type):
        return []  # a function that uses it has named what it uses
    found = [value for _, value in held_values.of(thing) if not isinstance(value, (str, bytes, type(None)))]
    is_own = isinstance(thing, types.FunctionType) and not held_values.is_of_library(thing)
    return [thing.__code__, *found] if is_own and not hasattr(thing, "__wrapped__") else found


def _of_array(thing: np.ndarray | tf.Tensor) -> list:
    """The numbers of a small array or tensor."""
    shape = tuple(thing.shape)
    is_small = None not in shape and 0 < math.prod(shape) <= _NUMBERS
    dtype = thing.dtype.as_numpy_dtype if isinstance(thing, tf.Tensor) else thing.dtype
    return np.asarray(thing).reshape(-1).tolist() if is_small and np.dtype(dtype).kind in "iuf" else []

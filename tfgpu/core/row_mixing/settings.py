"""The settings that code uses, as a key that is cheap enough to take before each step: it changes when they do.

They are plain values that the code finds by a name: of its object, closure, defaults, module and class, and of the
user's objects, functions and modules that it uses. Large structures, arrays and what libraries hold are left to
`trial_cache.code_digest`, which reads all, and takes longer.
"""

import functools
import itertools
import types
from collections.abc import Collection, Iterable

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import attributes

_LIBRARIES = ("keras", "tensorflow", "tfgpu", "numpy", "builtins", "functools")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_TF_FUNCTION = tf.types.experimental.PolymorphicFunction
_THINGS, _PER_THING = 200, 32
_VALUES = 4
"""Of one integer or text, those that count as settings: with more, it counts or names something."""


def key(thing: object, numbers: dict[str, list], changing: Collection[str] = ()) -> tuple:
    """The settings of a function, a method or an object of the user's.

    Of a float it counts only whether it is 0, and of an integer or a text that has had more than four values, nothing:
    a rate, a counter or the name of a file changes in each step.

    Args:
        thing: what uses the settings.
        numbers: keeps the values that each integer and text has had.
        changing: names that the code itself changes, and which are left out.

    Example:
        >>> import types
        >>> options, had = types.SimpleNamespace(on=False), {}
        >>> first, options.on = key(options, had), True
        >>> first == key(options, had)
        False
    """
    found, left, seen = [], [("", thing)], set()
    while left and len(seen) < _THINGS:
        path, each = left.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in itertools.islice(_held(each), _PER_THING):
            if name in changing or name.startswith("_tfgpu"):
                continue
            whole = f"{path}.{name}"
            if isinstance(value, np.generic):
                value = value.item()
            if isinstance(value, _PLAIN):
                found.append((whole, _of_plain(value, numbers.setdefault(whole, []))))
            else:
                found.append((whole, _kind(value)))
                left.append((whole, value))
    return tuple(found)


def _of_plain(value: object, had: list) -> object:
    if isinstance(value, float):
        return "float", value == 0
    if value is None or isinstance(value, bool):
        return value
    if value not in had and len(had) <= _VALUES:
        had.append(value)
    return type(value).__name__, value if len(had) <= _VALUES else None


def _kind(value: object) -> object:
    if isinstance(value, types.FunctionType):
        return id(value.__code__)
    return id(value) if isinstance(value, type) else type(value).__qualname__


def _held(thing: object) -> Iterable[tuple[str, object]]:
    """What a thing holds, by name."""
    if isinstance(thing, dict):
        return [(str(name), value) for name, value in itertools.islice(thing.items(), _PER_THING)]
    if isinstance(thing, (list, tuple)):
        return [(str(at), value) for at, value in enumerate(thing[:_PER_THING])]
    if isinstance(thing, (set, frozenset)):
        return [(repr(each), each) for each in sorted(thing, key=repr)] if len(thing) < _PER_THING else []
    if isinstance(thing, functools.partial):
        given = *enumerate(thing.args), *thing.keywords.items()
        return [("func", thing.func), *((str(name), value) for name, value in given)]
    if isinstance(thing, types.MethodType):
        return [("func", thing.__func__), ("self", thing.__self__)]
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    if isinstance(thing, _TF_FUNCTION):  # not by `hasattr`, which would run an object's own `__getattr__`
        return [("func", thing.python_function)]
    if isinstance(thing, property):
        return [("func", thing.fget)]
    if isinstance(thing, (staticmethod, classmethod)):
        return [("func", thing.__func__)]
    if isinstance(thing, type):
        return [] if _is_of_library(thing) else _of_class(thing)
    if isinstance(thing, types.ModuleType):
        return []  # a function that uses it has named what it uses
    return _of_object(thing)


def _of_object(thing: object) -> Iterable[tuple[str, object]]:
    if _is_of_library(type(thing)) and not isinstance(thing, (keras.losses.Loss, keras.metrics.Metric)):
        return ()
    given = ()
    if isinstance(thing, keras.layers.Layer):
        given = attributes.of_layer(isinstance(thing, keras.Model))
    elif isinstance(thing, keras.metrics.Metric):
        given = attributes.of_metric()
    own = [item for item in getattr(thing, "__dict__", {}).items() if item[0] not in given]
    classes = [each for each in type(thing).__mro__ if not _is_of_library(each)]
    return [*own, *(item for each in classes for item in _of_class(each))]


def _of_class(cls: type) -> list[tuple[str, object]]:
    kinds = (types.FunctionType, property, staticmethod, classmethod, *_PLAIN)
    items = [(name, value) for name, value in vars(cls).items() if isinstance(value, (*kinds, _TF_FUNCTION))]
    return [(name, value) for name, value in items if not (name.startswith("__") and isinstance(value, _PLAIN))]


def _of_function(function: types.FunctionType) -> list[tuple[str, object]]:
    if hasattr(function, "__wrapped__"):
        return [("func", function.__wrapped__)]
    if _is_of_library(function):
        return []
    found = [(str(at), value) for at, value in enumerate(function.__defaults__ or ())]
    found += (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # it has no value yet
            continue
    names = _names(function.__code__)
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [each for each in known.values() if isinstance(each, types.ModuleType)]:
        if module.__name__.split(".")[0] not in _LIBRARIES:
            found += [(f"{module.__name__}.{name}", vars(module)[name]) for name in names if name in vars(module)]
    return [*found, *known.items()]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function's code and that of functions within it look up."""
    within = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *itertools.chain(*within)]))


def _is_of_library(thing: object) -> bool:
    return (getattr(thing, "__module__", None) or "").split(".")[0] in _LIBRARIES

"""What a function, a method or an object of the user's holds or finds by a name: the step of a search through code.

Keras's, TensorFlow's and NumPy's own objects hold nothing here, but for losses and metrics.
"""

import functools
import itertools
import sys
import types
from collections.abc import Collection

import keras
import tensorflow as tf

_LIBRARIES = ("keras", "tensorflow", "tfgpu", "numpy", "builtins", "functools")
_MEMBERS = (types.FunctionType, property, staticmethod, classmethod)
_MOST = 32
PLAIN = (bool, int, float, complex, str, bytes, type(None))
TF_FUNCTION = tf.types.experimental.PolymorphicFunction


def of(thing: object, given: Collection[str] = ()) -> list[tuple[str, object]]:
    """Names and values: a function's defaults, closure and globals, an object's attributes and those of its class.

    Args:
        thing: is searched; of a list or a dict, the first 32.
        given: names of attributes that are left out.

    Example:
        >>> of(functools.partial(max, 3, key=abs))[1:]
        [('0', 3), ('key', <built-in function abs>)]
    """
    if isinstance(thing, dict):
        return [(str(name), value) for name, value in itertools.islice(thing.items(), _MOST)]
    if isinstance(thing, (list, tuple)):
        return [(str(at), value) for at, value in enumerate(thing[:_MOST])]
    if isinstance(thing, (set, frozenset)):
        return [(repr(each), each) for each in sorted(thing, key=repr)] if len(thing) <= _MOST else []
    if isinstance(thing, functools.partial):
        items = *enumerate(thing.args), *thing.keywords.items()
        return [("func", thing.func), *((str(name), value) for name, value in items)]
    if isinstance(thing, types.MethodType):
        return [("func", thing.__func__), ("self", thing.__self__)]
    if isinstance(thing, types.FunctionType):
        return _of_function(thing)
    if isinstance(thing, TF_FUNCTION):  # not by `hasattr`, which would run an object's own `__getattr__`
        return [("func", thing.python_function)]
    if isinstance(thing, property):
        return [("func", thing.fget)]
    if isinstance(thing, (staticmethod, classmethod)):
        return [("func", thing.__func__)]
    if isinstance(thing, type):
        return [] if is_of_library(thing) else _of_class(thing)
    if isinstance(thing, types.ModuleType):
        return []  # a function that uses it has named what it uses
    if is_of_library(type(thing)) and not isinstance(thing, (keras.losses.Loss, keras.metrics.Metric)):
        return []
    attributes = getattr(thing, "__dict__", {}).items()
    own = [(name, value) for name, value in attributes if name not in given and not name.startswith("_tfgpu")]
    classes = [each for each in type(thing).__mro__ if not is_of_library(each)]
    return [*own, *(item for each in classes for item in _of_class(each))]


def _of_class(cls: type) -> list[tuple[str, object]]:
    items = [(name, value) for name, value in vars(cls).items() if isinstance(value, (*_MEMBERS, TF_FUNCTION, *PLAIN))]
    return [(name, value) for name, value in items if not (name.startswith("__") and isinstance(value, PLAIN))]


def _of_function(function: types.FunctionType) -> list[tuple[str, object]]:
    if hasattr(function, "__wrapped__"):
        return [("func", function.__wrapped__)]
    if is_of_library(function):
        return []
    found = [(str(at), value) for at, value in enumerate(function.__defaults__ or ())]
    found += (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # it has no value yet
            continue
    names = _names(function.__code__)
    found += [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    for owner in [value for _, value in found if isinstance(value, (type, types.ModuleType)) and _is_own(value)]:
        found += [(f"{owner.__name__}.{name}", vars(owner)[name]) for name in names if name in vars(owner)]
    return found


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function's code and that of functions within it look up."""
    within = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *itertools.chain(*within)]))


def _is_own(thing: type | types.ModuleType) -> bool:
    """Whether a class or a module is the user's."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__ or ""
    return name.split(".")[0] not in (*_LIBRARIES, *sys.stdlib_module_names)


def is_of_library(thing: object) -> bool:
    """Whether a class or a function is of a library whose objects hold nothing of the user's."""
    return (getattr(thing, "__module__", None) or "").split(".")[0] in _LIBRARIES

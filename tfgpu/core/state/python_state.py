"""What code can change in Python, and how to put it back: attributes, containers, names of modules, random generators.

A call may keep what it makes the first time: a metric in an attribute, a layer in a list, an optimizer in a global
name, a cache in a closure or in a function's default. `Kept` finds all that code can reach by what it is written with,
and puts it back as it was. Keras's trackers are objects with containers, as any other; tensors and variables are not
looked into. Names that code makes up as it runs (`globals()[name]`) are not found.
"""

import collections
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import attributes
from tfgpu.compat import keras as private

_MOST = 300_000  # things
_NOT_OF_USERS = frozenset(
    "absl google h5py jax jaxlib keras matplotlib ml_dtypes numpy optree pandas PIL scipy sklearn tensorboard "
    "tensorflow tfgpu torch wrapt".split()
)
_OWN_STATE = "_tfgpu"  # see `compat.slots`
_PLAIN = frozenset(
    [type(None), bool, int, float, complex, str, bytes, np.ndarray, tf.DType, tf.TensorShape, types.CodeType, frozenset]
)
_OPAQUE = tf.Tensor, keras.Variable, keras.KerasTensor, np.generic, types.ModuleType
_OF_KERAS = (
    keras.Operation,
    keras.metrics.Metric,
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    private.Tracker,
)
_OF_PYTHON = types.SimpleNamespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet
_CONTAINERS = dict, list, set, collections.deque
_CACHED = type(functools.cache(len))
_NUMBERS = bool, int, float
_ABSENT = object()


class Kept:
    """The state of all that some things can reach.

    Args:
        things: functions, methods, models, layers, metrics and other objects.
        layers: where given, of all layers these alone are looked into.

    Attributes:
        variables: TensorFlow's own, which are not put back.

    Example:
        >>> seen = []
        >>> kept = Kept([seen])
        >>> seen.append(2)
        >>> kept.put_back()
        >>> seen
        []
    """

    def __init__(self, things: Iterable[object], layers: Iterable[object] | None = None):
        self.variables: list[tf.Variable] = []
        self._layers = None if layers is None else frozenset(map(id, layers))
        self._named: dict[int, _Names] = {}
        self._put_back: list[Callable[[], None]] = []
        self._left, self._seen = list(things), {}
        while self._left and len(self._seen) < _MOST:
            thing = self._left.pop()
            if type(thing) not in _PLAIN and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._look_at(thing)

    def put_back(self) -> None:
        """Puts everything back as it was."""
        for names in self._named.values():
            names.put_back()
        for put_back in self._put_back:
            put_back()

    def changed_numbers(self) -> list[str]:
        """The names of numbers that have changed and were there, such as a count of calls; none of Keras's own."""
        return sorted({name for names in self._named.values() for name in names.changed_numbers()})

    def _look_at(self, thing: Any) -> None:
        if isinstance(thing, tf.Variable):
            self.variables.append(thing)
        elif isinstance(thing, _OPAQUE):
            return
        elif (generator := _generator(thing)) is not None:
            self._put_back.append(generator)
        elif isinstance(thing, type):
            if not _is_of_library(thing):
                self._keep_all_names(thing)
        elif isinstance(thing, types.FunctionType):
            self._look_at_function(thing)
        elif isinstance(thing, types.CellType):
            self._look_at_cell(thing)
        elif isinstance(thing, tuple):
            self._left += thing
        elif (parts := _parts_of_wrapper(thing)) is not None:
            self._left += parts
            if isinstance(thing, _CACHED) and not thing.cache_info().currsize:
                self._put_back.append(thing.cache_clear)
        else:
            self._look_at_object(thing)

    def _look_at_object(self, thing: Any) -> None:
        container = next((kind for kind in _CONTAINERS if kind in type(thing).__mro__), None)
        if container is not None:
            content = container(thing)
            self._left += content.values() if container is dict else content
            self._put_back.append(functools.partial(_refill, thing, content))
        elif not self._is_open(thing):
            return
        if type(getattr(thing, "__dict__", None)) is dict:
            self._keep_all_names(thing)
        for cls in type(thing).__mro__:
            if not _is_of_library(cls):
                self._left.append(cls)
                self._keep_slots(thing, cls)

    def _is_open(self, thing: object) -> bool:
        if self._layers is not None and isinstance(thing, keras.Operation):
            return id(thing) in self._layers
        return isinstance(thing, (*_OF_KERAS, *_OF_PYTHON)) or not _is_of_library(type(thing))

    def _keep_all_names(self, owner: object) -> None:
        """Of an object or a class: those that it has later are none of them."""
        names = _Names(owner, is_whole=True)
        self._named[id(owner)] = names
        self._left += names.add(list(vars(owner)))

    def _keep_names(self, module: dict, names: Iterable[str]) -> None:
        self._left += self._named.setdefault(id(module), _Names(module)).add(names)

    def _keep_slots(self, thing: object, cls: type) -> None:
        for member in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType):
                value = getattr(thing, member.__name__, _ABSENT)
                self._left.append(value)
                self._put_back.append(functools.partial(_put_slot_back, member, thing, value))

    def _look_at_function(self, function: types.FunctionType) -> None:
        self._left += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._left += function.__closure__ or ()
        known = function.__globals__
        if _is_library(known.get("__name__")):
            return
        self._keep_all_names(function)
        names = _names_in(function.__code__)
        self._keep_names(known, names)
        for name in names:
            module = known.get(name, sys.modules.get(name))
            if isinstance(module, types.ModuleType) and not _is_library(module.__name__):
                self._keep_names(vars(module), names)

    def _look_at_cell(self, cell: types.CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing is in it yet
            value = _ABSENT
        self._left.append(value)
        self._put_back.append(functools.partial(_put_cell_back, cell, value))


class _Names:
    """The values that an object, a class or a module has under names.

    Args:
        owner: an object, a class, or the dict of a module.
        is_whole: other names than those that were added are to be removed.
    """

    def __init__(self, owner: Any, is_whole: bool = False):
        self._owner, self._is_whole = owner, is_whole
        self._is_class = isinstance(owner, type)
        self._values = owner if type(owner) is dict else vars(owner)
        self._before: dict[str, object] = {}

    def add(self, names: Iterable[str]) -> list:
        """Takes note of the values of these names, and returns them."""
        found = {name: self._values.get(name, _ABSENT) for name in names if self._is_kept(name)}
        self._before = found | self._before
        return list(found.values())

    def changed_numbers(self) -> list[str]:
        """The names of numbers that have changed and were there."""
        known = attributes.of_layer(True) if isinstance(self._owner, keras.Operation) else ()
        is_of_keras = isinstance(self._owner, _OF_KERAS)
        names = [name for name in self._values if name not in known and not (is_of_keras and name.startswith("_"))]
        return [name for name in names if self._is_changed_number(name)]

    def _is_changed_number(self, name: str) -> bool:
        value = self._values[name]
        before = self._before.get(name, getattr(type(self._owner), name, None))
        return type(before) in _NUMBERS and before is not value and before != value

    def put_back(self) -> None:
        """Gives the names their values again."""
        new = [name for name in self._values if self._is_whole and name not in self._before and self._is_kept(name)]
        for name, value in [*self._before.items(), *((name, _ABSENT) for name in new)]:
            if self._values.get(name, _ABSENT) is not value:
                self._set(name, value)

    def _is_kept(self, name: str) -> bool:
        return name != _OWN_STATE and not (self._is_class and name.startswith("__"))

    def _set(self, name: str, value: object) -> None:
        if self._is_class:
            type.__delattr__(self._owner, name) if value is _ABSENT else type.__setattr__(self._owner, name, value)
        elif value is _ABSENT:
            del self._values[name]
        else:
            self._values[name] = value


def _is_library(module: str | None) -> bool:
    root = (module or "").split(".")[0]
    return root in _NOT_OF_USERS or (root in sys.stdlib_module_names and root != "__main__")


def _is_of_library(thing: object) -> bool:
    return _is_library(getattr(thing, "__module__", None))


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that a function's code, and that of the functions within, finds or sets outside of itself."""
    found = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _names_in(each)
    return frozenset(found)


def _parts_of_wrapper(thing: Any) -> list | None:
    """What a method, a partial, a property or a decorator's object holds; None of anything else."""
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, (staticmethod, classmethod)):
        return [thing.__func__]
    if isinstance(thing, property):
        return [thing.fget, thing.fset, thing.fdel]
    if isinstance(thing, tf.types.experimental.PolymorphicFunction):
        return [thing.python_function]
    if isinstance(thing, _CACHED):
        return [thing.__wrapped__]
    is_proxy = type(thing).__module__.split(".")[0] in ("tensorflow", "wrapt")  # as of the dicts of a `tf.Module`
    return [thing.__wrapped__] if is_proxy and hasattr(thing, "__wrapped__") else None


def _generator(thing: Any) -> Callable[[], None] | None:
    """How to give a generator of random numbers the state that it has; None of anything else."""
    if isinstance(thing, random.Random):
        return functools.partial(thing.setstate, thing.getstate())
    if isinstance(thing, np.random.RandomState):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, np.random.Generator):
        return functools.partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)
    if isinstance(thing, tf.random.Generator):
        return functools.partial(thing.reset, tf.identity(thing.state))
    return None


def _put_slot_back(member: types.MemberDescriptorType, thing: object, value: object) -> None:
    if value is not _ABSENT:
        member.__set__(thing, value)
    elif hasattr(thing, member.__name__):
        member.__delete__(thing)


def _put_cell_back(cell: types.CellType, value: object) -> None:
    if value is not _ABSENT:
        cell.cell_contents = value
        return
    try:
        del cell.cell_contents
    except ValueError:
        return


def _refill(thing: Any, content: Any) -> None:
    """Bypasses Keras's tracking of what a layer's containers hold."""
    base = collections.OrderedDict if isinstance(thing, collections.OrderedDict) else type(content)
    if _is_same(base, thing, content):
        return
    base.clear(thing)
    if base in (list, collections.deque):
        base.extend(thing, content)
    else:
        base.update(thing, content)


def _is_same(base: type, thing: Any, content: Any) -> bool:
    if len(content) != base.__len__(thing):
        return False
    if isinstance(content, set):
        return all(set.__contains__(thing, each) for each in content)
    if isinstance(content, dict):
        pairs = zip(dict.items(thing), dict.items(content), strict=True)
        return all(a is b and c is d for (a, c), (b, d) in pairs)
    return all(a is b for a, b in zip(base.__iter__(thing), content, strict=True))

"""Where Python holds what code may change: names of objects, containers, arrays, the states of random generators."""

import collections
import functools
import pickle
import random
import types
from collections.abc import Callable, Container, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import attributes
from tfgpu.compat import keras as private

OF_KERAS = (keras.Operation, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer, private.Tracker)
"""Objects of Keras's, of which attributes and settings are looked at."""
CONTAINERS = dict, list, set, collections.deque
TENSORS = tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices, tf.experimental.ExtensionType
"""For attributes of any kind: `tf.is_tensor` would run an object's own `__getattr__`, which may raise."""
OWN_STATE = "_tfgpu"
"""See `compat.slots`."""
ABSENT = object()
"""The value of a name that there is not."""
_VALUES = type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic, tf.Tensor


class Content:
    """What is within a container, an array or a generator of random numbers."""

    def __init__(self, thing: Any, read: Callable, write: Callable, same: Callable | None = None, *, is_generator=True):
        self._thing, self._read, self._write, self.is_generator = thing, read, write, is_generator
        self._same, self._before, self.key = same or _are_pickled_alike, read(thing), (id(thing),)

    def value(self) -> object:
        return self._read(self._thing)

    def give(self, value: object) -> None:
        self._write(self._thing, value)

    def put_back(self) -> None:
        self.give(self._before)

    @property
    def kind(self) -> str:
        """In words, where it has no name."""
        return type(self._thing).__name__

    def holding(self, wanted: Container[int], name: str) -> list[tuple[str, object, Callable[[object], None]]]:
        """Where a dict, list or deque holds things, by `id`: a name, the thing, and what puts another there."""
        base = base_of(self._thing, self._before)
        keys = self._before if base in (dict, collections.OrderedDict) else range(len(self._before))
        pairs = [] if base is set else [(key, self._before[key]) for key in keys]
        put = functools.partial(base.__setitem__, self._thing) if pairs else None
        return [(f"{name}[{key!r}]", each, functools.partial(put, key)) for key, each in pairs if id(each) in wanted]

    @property
    def is_container(self) -> bool:
        return isinstance(self._thing, CONTAINERS)

    def is_changed(self) -> bool:
        return not self._same(self._thing if self.is_container else self.value(), self._before)


class Cell:
    """What a function's free variable holds.

    Args:
        name: of the variable.
        cell: its cell.
    """

    def __init__(self, name: str, cell: types.CellType):
        self.name, self._cell, self.key = name, cell, (id(cell),)
        self.before = self.value()

    def value(self) -> object:
        try:
            return self._cell.cell_contents
        except ValueError:  # nothing is in it yet
            return ABSENT

    def give(self, value: object) -> None:
        """Leaves what is made once for all replicas, a metric or a layer, where it is."""
        now = self.value()
        if now is not value and all(each is ABSENT or isinstance(each, _VALUES) for each in (now, value)):
            self._set(value)

    def put_back(self) -> None:
        if self.value() is not self.before:
            self._set(self.before)

    def holding(self, wanted: Container[int]) -> list[tuple[str, object, Callable[[object], None]]]:
        """As `Content.holding`."""
        return [(self.name, self.before, self._set)] if id(self.before) in wanted else []

    def is_changed(self) -> bool:
        return _is_other(self.before, self.value())

    def _set(self, value: object) -> None:
        if value is ABSENT:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


class SlotOf(Cell):
    """What an object holds in a slot (`__slots__`).

    Args:
        thing: the object.
        member: its class's descriptor of the slot.
    """

    def __init__(self, thing: object, member: types.MemberDescriptorType):
        self.name, self._thing, self._member, self.key = member.__name__, thing, member, (id(thing), member.__name__)
        self.before = self.value()

    def value(self) -> object:
        return getattr(self._thing, self.name, ABSENT)

    def _set(self, value: object) -> None:
        if value is ABSENT:
            self._member.__delete__(self._thing)
        else:
            self._member.__set__(self._thing, value)


Place = Content | Cell  # where Python holds something that each replica may have for itself; `key` tells it from others


class _Name(Cell):
    """A name's value, where it is one that each replica may have for itself."""

    def __init__(self, names: "Names", name: str):
        self._names, self.name, self.key = names, name, (names.owner, name)

    def value(self) -> object:
        return self._names.now(self.name)

    def _set(self, value: object) -> None:
        self._names.set(self.name, value)


class Names:
    """The values that an object, a class or a module has under names.

    Args:
        owner: an object, a class, or the dict of a module.
        is_whole: other names than those that were added are to be removed.

    Attributes:
        owner: its `id`.
    """

    def __init__(self, owner: Any, is_whole: bool = False):
        self._owner, self._is_whole = owner, is_whole
        self._is_class, self.owner = isinstance(owner, type), id(owner)
        self._is_of_keras, self._is_tracker = isinstance(owner, OF_KERAS), isinstance(owner, private.Tracker)
        self._is_of_library = type(owner).__module__.split(".")[0] in ("keras", "tfgpu")
        is_metric = isinstance(owner, keras.metrics.Metric)
        self._known = attributes.of_metric() if is_metric else attributes.of_layer(True) if self._is_of_keras else ()
        self._values = owner if type(owner) is dict else vars(owner)
        self._before: dict[str, object] = {}

    def add(self, names: Iterable[str]) -> list:
        """Takes note of the values of these names, and returns them."""
        found = {name: self._values.get(name, ABSENT) for name in names if self._is_kept(name)}
        self._before = found | self._before
        return list(found.values())

    def before(self) -> list[tuple[str, object]]:
        """The names, and the values that they had, without those of Keras itself."""
        if self._is_tracker:
            return []
        return [(name, value) for name, value in self._before.items() if self._is_of_user(name)]

    def holding(self, wanted: Container[int]) -> list[tuple[str, object, Callable[[object], None]]]:
        """As `Content.holding`."""
        found = [(name, value) for name, value in self.before() if id(value) in wanted]
        return [(name, value, functools.partial(self.set, name)) for name, value in found]

    def now(self, name: str) -> object:
        return self._values.get(name, ABSENT)

    def changed(self) -> list[str]:
        """The names of plain values that have changed and were there, without those of Keras itself."""
        if self._is_tracker:
            return []
        return [name for name, value in self._values.items() if self._differs(name, value) and self._is_of_user(name)]

    def put_back_counts(self) -> None:
        """Gives numbers back that were there and have changed, and nothing else."""
        for name in self.changed():
            before = self._before.get(name, ABSENT)
            was = getattr(type(self._owner), name, ABSENT) if before is ABSENT else before
            if type(was) in (int, float) and type(self.now(name)) in (int, float):
                self.set(name, before)

    def places(self, chosen: frozenset[str]) -> list[_Name]:
        """Where the values of chosen names are."""
        kept = [each for each in chosen if self._is_of_user(each)]
        return [_Name(self, each) for each in kept if each in self._values or self._is_whole]

    def _is_of_user(self, name: str) -> bool:
        """Whether it is no name of Keras's; in objects of Keras's own classes its private ones are not all known."""
        if name in attributes.OF_TRACKING:
            return False
        if not self._is_of_keras:
            return not name.startswith("__")
        return name not in self._known and not (name.startswith("_") and self._is_of_library)

    def _differs(self, name: str, value: object) -> bool:
        return _is_other(self._before.get(name, getattr(type(self._owner), name, ABSENT)), value)

    def put_back(self) -> None:
        """Gives the names their values again."""
        new = [name for name in self._values if self._is_whole and name not in self._before and self._is_kept(name)]
        for name, value in [*self._before.items(), *((name, ABSENT) for name in new)]:
            if self._values.get(name, ABSENT) is not value:
                self.set(name, value)

    def _is_kept(self, name: str) -> bool:
        return name != OWN_STATE and not (self._is_class and name.startswith("__"))

    def set(self, name: str, value: object) -> None:
        if self._is_class:
            type.__delattr__(self._owner, name) if value is ABSENT else type.__setattr__(self._owner, name, value)
        elif value is ABSENT:
            del self._values[name]
        else:
            self._values[name] = value


def generator(thing: Any) -> Content | None:
    """The state of a generator of random numbers, or of Python's or NumPy's module; None of anything else."""
    if isinstance(thing, random.SystemRandom):
        return None  # has no state
    if thing is random or isinstance(thing, random.Random):
        return Content(thing, lambda it: it.getstate(), lambda it, state: it.setstate(state))
    if thing is np.random or isinstance(thing, np.random.RandomState):
        return Content(thing, lambda it: it.get_state(), lambda it, state: it.set_state(state))
    if isinstance(thing, (np.random.Generator, np.random.BitGenerator)):
        bits = getattr(thing, "bit_generator", thing)
        return Content(bits, lambda it: it.state, lambda it, state: setattr(it, "state", state))
    if isinstance(thing, tf.random.Generator):
        return Content(thing, _state_of, lambda it, state: it.reset(state), lambda a, b: True)
    return None


def _state_of(it: tf.random.Generator) -> tf.Tensor:
    with tf.init_scope():  # else a number of the graph that is traced, which no trial can read
        return tf.identity(it.state)


def items_of(value: Any) -> list[tuple[str, object]]:
    """What a container or a tuple holds, each with what is written behind the container's name to get it."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", each) for key, each in dict.items(value)]
    if isinstance(value, set):
        return [("{...}", each) for each in set.__iter__(value)]
    if isinstance(value, (list, tuple, collections.deque)):
        return [(f"[{at}]", each) for at, each in enumerate(value)]
    return []


def _is_other(before: object, value: object) -> bool:
    """Whether both are plain values, and not the same."""
    if before is value or not isinstance(before, _VALUES) or not isinstance(value, _VALUES):
        return False
    are_arrays = any(isinstance(each, (np.ndarray, tf.Tensor)) for each in (before, value))
    return are_arrays or before != value


def _are_pickled_alike(one: object, other: object) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


def base_of(thing: Any, content: Any) -> type:
    return collections.OrderedDict if isinstance(thing, collections.OrderedDict) else type(content)


def refill(thing: Any, content: Any) -> None:
    """Bypasses Keras's tracking of what a layer's containers hold."""
    base = base_of(thing, content)
    if is_same(base, thing, content):
        return
    base.clear(thing)
    if base in (list, collections.deque):
        base.extend(thing, content)
    else:
        base.update(thing, content)


def is_same(base: type, thing: Any, content: Any) -> bool:
    if len(content) != base.__len__(thing):
        return False
    if isinstance(content, set):
        return all(set.__contains__(thing, each) for each in content)
    if isinstance(content, dict):
        pairs = zip(dict.items(thing), dict.items(content), strict=True)
        return all(a is b and c is d for (a, c), (b, d) in pairs)
    return all(a is b for a, b in zip(base.__iter__(thing), content, strict=True))

"""What code can change in Python, and how to put it back: attributes, containers, names of modules, random generators.

A call may keep what it makes the first time: a metric in an attribute, a layer in a list, an optimizer in a global
name, a cache in a closure or in a function's default. `Kept` finds all that code can reach by what it is written with,
and puts it back as it was. Keras's trackers are objects with containers, as any other; tensors and variables are not
looked into. Names that code makes up as it runs (`globals()[name]`) are not found.
"""

import collections.abc
import contextlib
import functools
import io
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.compat import tensorflow as private
from tfgpu.core.state import python_places
from tfgpu.core.state.python_places import CONTAINERS, OF_KERAS, Cell, Content, Names, Place, SlotOf
from tfgpu.errors import InputError

_Held = tuple[str, object, Callable[[object], None]]


class TakesElements(InputError):
    """Code takes elements from an iterator that it holds."""

    def __init__(self, name: str):
        super().__init__(
            f"The code takes elements from an iterator that it holds ({name}); each replica would take others than "
            "one device. Give `fit`, or the function of `strategy.run`, all data of a step, such as "
            "`tf.data.Dataset.zip((data, more))`; draw random numbers with `keras.random` and a "
            "`keras.random.SeedGenerator`. If replicas may take others, mark the code with `tfgpu.by_rows`."
        )


class _Refusing:
    """Stands where an iterator was."""

    def __init__(self, name: str):
        self._name = name

    def __iter__(self):
        return self

    def __next__(self):
        raise TakesElements(self._name)


@contextlib.contextmanager
def _refused(of_data: Iterable[tf.data.Iterator], named: Iterable[_Held]) -> Iterator[None]:
    """Inside the block, who takes an element is refused.

    Args:
        of_data: tf.data's iterators.
        named: of each iterator of Python's its name, itself, and what puts another object in its place.

    Raises:
        TakesElements: by who takes one.
    """

    def refuse(*args, **kwargs):
        raise TakesElements("of `tf.data`")

    named = list(named)
    for name, _, put in named:
        put(_Refusing(f"`{name}`"))
    try:
        with datasets.without_elements(of_data, refuse):
            yield
    finally:
        for _, iterator, put in named:
            put(iterator)


_MOST = 300_000  # things
_MOST_BYTES = 1 << 24  # of arrays whose content may be changed; others are locked
_NOT_OF_USERS = frozenset(
    "absl google h5py jax jaxlib keras matplotlib ml_dtypes numpy optree pandas PIL scipy sklearn tensorboard "
    "tensorflow tfgpu torch wrapt".split()
)
_PLAIN = {type(None), bool, int, float, complex, str, bytes, tf.DType, tf.TensorShape, types.CodeType, frozenset}
_OPAQUE = tf.Tensor, keras.Variable, keras.KerasTensor, np.generic, types.ModuleType
_OF_PYTHON = types.SimpleNamespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet
_CACHED = type(functools.cache(len))
_COUNTS = bool, int, float, str
GLOBAL_DRAWS = "random", "np.random"
"""Names of Python's and NumPy's own generators."""


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
        self._of_data: list[tf.data.Iterator] = []
        self._large: list[np.ndarray] = []
        self._iterators: dict[int, object] = {}  # of Python, whose elements cannot be given back
        self._layers = None if layers is None else frozenset(map(id, layers))
        self._named: dict[int, Names] = {}
        self._contents = {id(each): python_places.generator(each) for each in (random, np.random)}
        self._cells: dict[object, Cell] = {}
        self._given: list[tuple[str, object]] = []  # what functions have as defaults, or as a partial's arguments
        self._put_back: list[Callable[[], None]] = []
        self._left, self._seen, self._bytes = list(things), {}, 0
        while self._left and len(self._seen) < _MOST:
            thing = self._left.pop()
            if type(thing) not in _PLAIN and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                self._look_at(thing)

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *error: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Puts everything back as it was; at the end of a `with` block too."""
        for names in (*self._named.values(), *self._cells.values()):
            names.put_back()
        for content in self._contents.values():
            content.put_back()
        for put_back in self._put_back:
            put_back()

    @contextlib.contextmanager
    def without_iterators(self) -> Iterator[None]:
        """Inside the block, who takes an element from one of tf.data's or Python's iterators is refused.

        Raises:
            TakesElements: by who takes one.
        """
        found, wanted = [], self._iterators
        if wanted:
            found = [held for place in (*self._named.values(), *self._cells.values()) for held in place.holding(wanted)]
            names = {id(content): name for name, content in self._named_contents()}
            for content in filter(lambda each: each.is_container, self._contents.values()):
                found += content.holding(wanted, names.get(id(content), content.kind))
        with _refused(self._of_data, found), self.locked_arrays():
            yield

    @contextlib.contextmanager
    def locked_arrays(self) -> Iterator[None]:
        """Inside the block, arrays that are too large to be put back cannot be written: NumPy raises `ValueError`."""
        locked = [array for array in self._large if array.flags.writeable]  # an outer block may hold some
        for array in locked:
            array.flags.writeable = False
        try:
            yield
        finally:
            for array in sorted(locked, key=lambda each: isinstance(each.base, np.ndarray)):  # views after their owners
                array.flags.writeable = True

    def put_back_counts(self) -> None:
        """Puts numbers, arrays and the states of generators back, and leaves what was made."""
        for names in self._named.values():
            names.put_back_counts()
        for name, content in self._named_contents():
            if not content.is_container and name not in GLOBAL_DRAWS:
                content.put_back()

    def changes(self) -> list[str]:
        """The names of what has changed and was there: a count of calls, a tensor, a list, a generator's state.

        None is Keras's own. Python's and NumPy's own generators have the names in `GLOBAL_DRAWS`.
        """
        found = {name for names in self._named.values() for name in names.changed()}
        found |= {cell.name for cell in self._cells.values() if cell.is_changed()}
        changed = {id(content) for content in self._contents.values() if content.is_changed()}
        named = self._named_contents() if changed else ()  # they are walked for their names: most runs change nothing
        return sorted(found | {name for name, content in named if id(content) in changed})

    def draws(self, names: Iterable[str]) -> list[str]:
        """Those of some names under which there is a generator of random numbers."""
        if not (chosen := set(names)):
            return []
        return sorted(chosen & {name for name, content in self._named_contents() if content.is_generator})

    def counts(self, names: Iterable[str]) -> list[str]:
        """Those of some names under which there is a number, a text or a container."""
        if not (chosen := set(names)):
            return []
        found = {name for each in self._named.values() for name, value in each.before() if type(value) in _COUNTS}
        found |= {name for name, content in self._named_contents() if not content.is_generator}
        found |= {cell.name for cell in self._cells.values() if type(cell.before) in _COUNTS}
        return sorted(found & chosen)

    def places(self, names: Iterable[str]) -> list[Place]:
        """Where the values of some names are."""
        chosen = frozenset(names)
        plain = [place for each in self._named.values() for place in each.places(chosen)]
        plain += [cell for cell in self._cells.values() if cell.name in chosen]
        return plain + [content for name, content in self._named_contents() if name in chosen]

    def _named_contents(self) -> "Iterator[tuple[str, Content]]":
        yield from zip(GLOBAL_DRAWS, (self._contents[id(random)], self._contents[id(np.random)]), strict=True)
        seen = {id(random), id(np.random)}
        named = [pair for names in self._named.values() for pair in names.before()]
        for name, value in [*named, *((cell.name, cell.before) for cell in self._cells.values()), *self._given]:
            yield from self._contents_in(name, value, seen)
        for key, content in self._contents.items():
            if content.is_generator and key not in seen:
                yield content.kind, content

    def _contents_in(self, name: str, value: object, seen: set[int]) -> "Iterator[tuple[str, Content]]":
        """The content of a named value, and of what is in it, however deep: as `rngs[0]`, `state['noise']`."""
        content = self._contents.get(id(value))
        if id(value) in seen or (content is None and not isinstance(value, tuple)):
            return
        seen.add(id(value))
        if content is not None:
            yield name, content
        for key, each in python_places.items_of(value):
            if id(each) in self._contents or isinstance(each, tuple):
                yield from self._contents_in(f"{name}{key}", each, seen)

    def _look_at(self, thing: Any) -> None:
        if isinstance(thing, tf.Variable):
            self.variables.append(thing)
        elif isinstance(thing, tf.data.Iterator):
            self._of_data.append(thing)
        elif isinstance(thing, _OPAQUE):
            return
        elif isinstance(thing, collections.abc.Iterator) and _is_of_library(type(thing)):
            if not isinstance(thing, io.IOBase):
                self._iterators[id(thing)] = thing
        elif isinstance(thing, np.ndarray):
            self._look_at_array(thing)
        elif (found := python_places.generator(thing)) is not None:
            self._contents[id(thing)] = found
        elif isinstance(thing, type):
            if not _is_of_library(thing):
                self._keep_all_names(thing)
        elif isinstance(thing, types.FunctionType):
            self._look_at_function(thing)
        elif isinstance(thing, tuple):
            self._left.extend(thing)  # `+=` would fail for a tuple that TensorFlow wraps
        elif (parts := _parts_of_wrapper(thing)) is not None:
            self._left.extend(parts)
            self._look_at_wrapper(thing)
        else:
            self._look_at_object(thing)

    def _look_at_array(self, thing: np.ndarray) -> None:
        if not thing.flags.writeable or thing.dtype == object:
            return
        if self._bytes + thing.nbytes > _MOST_BYTES:
            self._large.append(thing)
            return
        self._bytes += thing.nbytes
        same = python_places.are_equal
        self._contents[id(thing)] = Content(thing, np.copy, np.copyto, same, is_generator=False)

    def _look_at_wrapper(self, thing: Any) -> None:
        if isinstance(thing, functools.partial):
            self._given += [*((f"args[{at}]", each) for at, each in enumerate(thing.args)), *thing.keywords.items()]
        if isinstance(thing, _CACHED) and not thing.cache_info().currsize:
            self._put_back.append(thing.cache_clear)

    def _look_at_object(self, thing: Any) -> None:
        container = next((kind for kind in CONTAINERS if kind in type(thing).__mro__), None)
        if container is not None:
            held = private.stored_list(thing)
            content = container(held)
            self._left += content.values() if container is dict else content
            same = functools.partial(python_places.is_same, python_places.base_of(held, content))
            self._contents[id(thing)] = Content(held, container, python_places.refill, same, is_generator=False)
            if held is not thing:  # what TensorFlow's wrapper notes of changes goes with them
                self._put_back.append(functools.partial(vars(thing).update, dict(vars(thing))))
                return
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
        return isinstance(thing, (*OF_KERAS, *_OF_PYTHON)) or not _is_of_library(type(thing))

    def _keep_all_names(self, owner: object) -> None:
        """Of an object or a class: those that it has later are none of them."""
        names = Names(owner, is_whole=True)
        self._named[id(owner)] = names
        self._left += names.add(list(vars(owner)))

    def _keep_names(self, module: dict, names: Iterable[str]) -> None:
        self._left += self._named.setdefault(id(module), Names(module)).add(names)

    def _keep_slots(self, thing: object, cls: type) -> None:
        for member in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType):
                found = self._cells.setdefault((id(thing), member.__name__), SlotOf(thing, member))
                self._left.append(found.before)

    def _look_at_function(self, function: types.FunctionType) -> None:
        defaults, code = function.__defaults__ or (), function.__code__
        first = code.co_argcount - len(defaults)
        names = code.co_varnames[first : code.co_argcount]
        given = [*zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
        self._left += [value for _, value in given]
        self._given += given if not _is_library(function.__globals__.get("__name__")) else []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            found = self._cells.setdefault(id(cell), Cell(name, cell))
            self._left.append(found.before)
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

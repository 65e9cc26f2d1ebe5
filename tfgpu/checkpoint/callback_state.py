"""The state of callbacks, and of further objects that a checkpoint keeps, such as a replay memory.

Keras keeps that of callbacks (the patience of EarlyStopping, the best value of ModelCheckpoint, History) in plain
attributes and cannot save it. Here a callback's state is every attribute that has changed since the training began and
that consists of numbers, text, arrays, lists and dicts. An attribute that never changes is a setting: the resumed
script decides it. So is an attribute that a Keras callback names after an argument: `min_delta` changes its sign in the
first epoch of every process.
"""

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.checkpoint.manifest import Snapshot
from tfgpu.compat.callbacks import SET_BY_FIT
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)

_LARGE = 1 << 24  # bytes
_DEEPEST = 100  # of lists in lists: JSON's reader ends at some hundreds, and a list that holds itself has no end
_EXTRA = "remembered"
_LONGEST_BITS = 1 << 12  # of a whole number: JSON's writer ends at 4,300 digits


class Unknown(TypeError):
    """A value that cannot be saved; the message names its type."""


class CallbackStates:
    """The states of the callbacks of one `fit`.

    Args:
        callbacks: the callbacks as the training begins, before any state is restored.
    """

    def __init__(self, callbacks: list):
        self._callbacks = dict(_named(callbacks))
        self._large = {name: _large(callback) for name, callback in self._callbacks.items()}
        self._settings = {name: self._attributes(name) for name in self._callbacks}

    def take(self) -> dict[str, dict[str, Any]]:
        """Copies what has changed, by callback and attribute."""
        found = {}
        for name in self._callbacks:
            before, now = self._settings[name], self._attributes(name)
            changed = {key: value for key, value in now.items() if key not in before or not _equal(before[key], value)}
            if changed:
                found[name] = changed
        return found

    def put(self, states: dict[str, dict[str, Any]]) -> None:
        """Restores states. Warns of a state whose callback is gone; a callback without a state starts fresh."""
        for name, attributes in states.items():
            if name not in self._callbacks:
                _log.warning("The checkpoint has the state of a callback %s, which this run does not have.", name)
                continue
            vars(self._callbacks[name]).update({key: plain(value) for key, value in attributes.items()})

    def _attributes(self, name: str) -> dict[str, Any]:
        found, large, settings = {}, self._large[name], _settings_of(type(self._callbacks[name]))
        for key, value in vars(self._callbacks[name]).items():
            if key in settings or (key in large and large[key] is value):
                continue
            try:
                found[key] = plain(value)
            except Unknown:
                continue
        return found


class ExtraState:
    """Objects whose state a checkpoint carries.

    Args:
        objects: by name; each with `state()` and `put(state, model)`.

    Raises:
        InputError: it is not a mapping of names to such objects.
    """

    def __init__(self, objects: Mapping[str, Any] | None):
        if not isinstance(objects or {}, Mapping) or not all(isinstance(name, str) for name in objects or {}):
            raise InputError(f'`remember` must be a mapping such as {{"replay": replay}}. Received: {objects!r}.')
        for name, one in (objects or {}).items():
            if not callable(getattr(one, "state", None)) or not callable(getattr(one, "put", None)):
                raise InputError(
                    f"Objects in `remember` must have `state()` and `put(state, model)`, as Replay and "
                    f"ElasticWeights have. Received: {name}={one!r}."
                )
        self._objects = dict(objects or {})

    def has(self, one: Any) -> bool:
        """Whether an object is one of them."""
        return any(other is one for other in self._objects.values())

    def take(self) -> dict[str, Any]:
        """Returns their states now, as a checkpoint keeps them.

        Raises:
            InputError: a state contains something that cannot be saved.
        """
        return {_EXTRA: {name: _extra(name, one.state()) for name, one in self._objects.items()}}

    def put(self, read: Snapshot, model: keras.Model) -> None:
        """Restores their states from a checkpoint.

        Raises:
            InputError: the checkpoint lacks the state of one of them.
        """
        states, where = read.memory.get(_EXTRA, {}), read.position.directory
        for name in states.keys() - self._objects.keys():
            _log.warning("%s has the state of %r, which this run does not have: add it to `remember`.", where, name)
        for name, one in self._objects.items():
            if name not in states:
                raise InputError(
                    f"{where} was saved without {name!r} in `remember`, so its state is missing. Received: "
                    f"{sorted(self._objects)}; the checkpoint has {sorted(states)}. Use another directory, or remove "
                    f"{name!r} from `remember`."
                )
            one.put(states[name], model)


def _named(callbacks: list):
    """Names each callback by its class and number, such as `EarlyStopping/0`."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        if getattr(callback, "has_memory", True) and not isinstance(callback, keras.callbacks.ProgbarLogger):
            yield f"{kind}/{counts.setdefault(kind, 0)}", callback
            counts[kind] += 1


def _settings_of(cls: type) -> set[str]:
    """Attributes that are not state: the arguments of Keras's own classes, and what `fit` sets."""
    stock = [base for base in cls.__mro__ if base.__module__.startswith("keras.")]
    return SET_BY_FIT.union(*(inspect.signature(base.__init__).parameters for base in stock))


def _large(callback) -> dict[str, Any]:
    """Attributes that are too large to copy, such as data; they are settings unless they are replaced."""
    return {name: value for name, value in vars(callback).items() if _bytes_of(value) > _LARGE}


def _bytes_of(value, depth: int = 0) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes_of(part, depth + 1) for part in parts) if depth <= _DEEPEST else 0


def plain(value, *, depth: int = 0):
    """Copies a value that consists of None, bool, int, float, str, NumPy arrays and scalars, lists, tuples and dicts.

    Args:
        value: the value.
        depth: how many lists, tuples and dicts are around it.

    Raises:
        Unknown: it contains something else, a number that no file holds, or lists in lists without end.
    """
    is_short = type(value) is int and value.bit_length() <= _LONGEST_BITS
    if value is None or type(value) in (bool, float, str) or is_short:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and _is_stored(value.dtype):
        return value.copy() if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return plain(np.array(value.numpy()))
    if depth < _DEEPEST and type(value) in (list, tuple):
        return type(value)(plain(item, depth=depth + 1) for item in value)
    if depth < _DEEPEST and type(value) is dict and all(type(key) in (str, int, float, bool) for key in value):
        return {key: plain(item, depth=depth + 1) for key, item in value.items()}
    kind = type(value).__name__
    raise Unknown(f"{kind} of {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else kind)


def _is_stored(dtype: np.dtype) -> bool:
    """Whether checkpoints hold such numbers: not complex ones, records, or floats of 128 bits."""
    if dtype.kind not in "biufV":  # V: bfloat16 and similar
        return False
    try:
        tf.as_dtype(dtype)
    except TypeError:
        return False
    return True


def _equal(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


def _extra(name: str, state: Any) -> Any:
    try:
        return plain(state)
    except Unknown as error:
        raise InputError(
            f"The state of {name!r} contains a value of type `{error}`, which cannot be saved. Give numbers, text, "
            "arrays, lists or dicts."
        ) from None

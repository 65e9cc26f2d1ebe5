"""The settings that code uses, as a key that is cheap enough to take before each step: it changes when they do.

They are plain values that the code finds by a name: of its object, closure, defaults, module and class, and of the
user's objects, functions and modules that it uses. Large structures, arrays and what libraries hold are left to
`trial_cache.code_digest`, which reads all, and takes longer.
"""

import types
from collections.abc import Collection

import keras
import numpy as np

from tfgpu.compat import attributes
from tfgpu.core.row_mixing import held_values

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
        for name, value in held_values.of(each, _given(each))[:_PER_THING]:
            if name in changing:
                continue
            whole = f"{path}.{name}"
            if isinstance(value, np.generic):
                value = value.item()
            if isinstance(value, held_values.PLAIN):
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


def _given(thing: object) -> Collection[str]:
    """The attributes that Keras gives a layer or a metric."""
    if isinstance(thing, keras.layers.Layer):
        return attributes.of_layer(isinstance(thing, keras.Model))
    return attributes.of_metric() if isinstance(thing, keras.metrics.Metric) else ()

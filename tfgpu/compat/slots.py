"""State that tfgpu keeps on objects of Keras and TensorFlow: all of it under one attribute, `_tfgpu`.

    slots.of(strategy).reduce_dtype = tf.bfloat16
    slots.get(strategy, "reduce_dtype")            # None if unset

The state lives as long as the object, and is not copied, saved or compared with it. `replaced` changes the objects' own
attributes for a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

_NAME = "_tfgpu"


def of(owner: object) -> SimpleNamespace:
    """The namespace of tfgpu's state on an object; created on first use.

    Example:
        >>> import types
        >>> model = types.SimpleNamespace()
        >>> of(model).seen = 3
        >>> get(model, "seen"), get(model, "other", 0)
        (3, 0)
    """
    held = _held(owner)
    if held is None:
        held = SimpleNamespace()
        put = type.__setattr__ if isinstance(owner, type) else object.__setattr__  # bypasses Keras's tracking
        put(owner, _NAME, held)
    return held


def get(owner: object, name: str, default: object = None) -> object:
    """One value of an object's state, or `default`; creates no namespace."""
    return getattr(_held(owner), name, default)


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Inside the block, an object's attributes have other values; Keras does not track them."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(owner, name, value)


def _held(owner: object) -> SimpleNamespace | None:
    if not hasattr(owner, "__dict__"):  # TensorFlow's graphs have attributes, but no __dict__
        return getattr(owner, _NAME, None)
    return owner.__dict__.get(_NAME)  # its own, not its class's

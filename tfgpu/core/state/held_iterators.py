"""Iterators that code holds: while it is tried, who takes an element from one is refused.

An element that a trial takes would be missing later, and each replica would take others than one device does: of a data
set of its own, a generator function, an `itertools.cycle`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.errors import InputError

Held = tuple[str, object, Callable[[object], None]]


class TakesElements(InputError):
    """Code takes elements from an iterator that it holds."""

    def __init__(self, name: str):
        super().__init__(
            f"The code takes elements from an iterator that it holds ({name}), and each replica would take others than "
            "one device. Give `fit`, or the function of `strategy.run`, all data of a step, such as "
            "`tf.data.Dataset.zip((data, more))`; draw random numbers by `keras.random` with a "
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
def refused(of_data: Iterable[tf.data.Iterator], named: Iterable[Held]) -> Iterator[None]:
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

"""Picks of Python's `random` while a step is traced: one device makes them once, so replicas make them once together.

The first replica's trace picks, the others' take the same, in the same order. A second trace of the same step, as for
a loop around it, takes them too.
"""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable

from keras.src.layers.preprocessing.image_preprocessing import aug_mix

from tfgpu.compat.patch import wrap
from tfgpu.core import data_order

_here = threading.local()


@contextlib.contextmanager
def picking(made: list):
    """For the length of the block this thread takes the picks of `made`, in order, and adds those that it lacks."""
    before = getattr(_here, "picks", None)
    _here.picks = made, itertools.count()
    try:
        yield
    finally:
        _here.picks = before


def pick(make: Callable):
    """What `make()` returned to the first who came to this place of the step; outside a step, what it returns now."""
    found = getattr(_here, "picks", None)
    if found is None:
        return make()
    made, places = found
    at = next(places)
    if at == len(made):
        made.append(make())
    return made[at]


def pick_alike() -> None:
    """AugMix picks the same operations on all replicas.

    Stock Keras picks with Python's `random` as it traces, so each replica's graph has operations of its own. Workers
    agree where the script seeds Python's `random` on each, as `keras.utils.set_random_seed` does, or no seed at all.
    """

    wrap(aug_mix, "py_random")  # says so where this Keras picks in another way
    aug_mix.py_random = _Random()


class _Random:
    """What AugMix uses of the module `random`."""

    def choice(self, options: list):
        return pick(lambda: (data_order.agreed_random() or random).choice(options))

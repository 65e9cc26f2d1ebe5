"""The end of an iterator of tf.data, for which `fit`, `evaluate` and `predict` do not wait.

tf.data's tuning thread sleeps longer and longer, up to a minute, and often misses the call to end: who lets go of the
iterator then waits until that sleep is over, up to as long as the iterator has lived. With two epochs a second that is
some hundredths of a second at the end of each, with epochs of ten seconds now and then ten more.
"""

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgpu.keras_fixes.seam import wrap

NAME = "tfgpu-end-of-data"
_ALONE = 3  # references to what nobody else has: the list's, the loop's, the question's
_POLLS, _POLL_S = 100, 0.01


def end_data_elsewhere() -> None:
    """Lets a thread wait for the end of each iterator that `fit`, `evaluate` and `predict` make."""

    @wrap(keras_trainer.TFEpochIterator, "_get_iterator")
    def get_iterator(stock, self):
        return Data(stock(self))


class Data:
    """Data whose iterators end in a thread.

    Args:
        data: what Keras iterates over: a data set, or a strategy's distributed one.
    """

    def __init__(self, data: object):
        self._data = data

    def __iter__(self) -> Iterator:
        iterator = iter(self._data)
        held = resources(iterator)
        if held:
            # The iterator may go; what it is an iterator of stays until the thread lets go of it.
            weakref.finalize(iterator, _end, held).atexit = False
        return iterator


def resources(iterator: object) -> list[tf.Tensor]:
    """What TensorFlow knows an iterator by, those first that take from others; nothing for what is not tf.data's."""
    source = getattr(iterator, "source", iterator)  # of a `DealtIterator`
    own = getattr(source, "_iterator_resource", None)
    if own is not None:
        return [own]
    found = []
    for worker in getattr(source, "_iterators", ()):  # of a strategy's distributed data
        of_devices = getattr(worker, "_iterator", None)
        for each in getattr(of_devices, "_device_iterators", ()):
            found += resources(each)
        common = getattr(of_devices, "_multi_device_iterator_resource", None)
        found += [common] if common is not None else resources(of_devices)
    return found


def _end(held: list[tf.Tensor]) -> None:
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        threading.Thread(target=_let_go, args=(held,), name=NAME).start()


def _let_go(held: list[tf.Tensor]) -> None:
    for _ in range(_POLLS):  # The iterator itself lets go of it within a moment.
        time.sleep(_POLL_S)
        if all(sys.getrefcount(each) <= _ALONE for each in held):
            break
    while held:
        held.pop(0)

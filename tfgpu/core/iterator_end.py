"""The end of an iterator of tf.data, for which `fit`, `evaluate` and `predict` do not wait.

tf.data's tuning thread sleeps longer and longer, up to a minute, and often misses the call to end: who lets go of the
iterator then waits until that sleep is over, up to as long as the iterator has lived. With two epochs a second that is
some hundredths of a second at the end of each, with epochs of ten seconds now and then ten more.

Until it ends an iterator goes on reading ahead. So data that reaches out of itself (`reaches_out`) ends where it does
in stock Keras: a generator of the user's must not run once `fit` has returned, nor twice at a time.
"""

import os
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrap
from tfgpu.core.batch_sharding import ShardedDataset

NAME = "tfgpu-end-of-data"
_ALONE = 3  # references to what nobody else has: the list's, the loop's, the question's
_POLLS, _POLL_S = 100, 0.01
_REACHING = re.compile(r"\w*(Cache|DataService|Generator|Remote|Save|Snapshot|Variant)\w*Dataset(V\d)?")
"""Data sets whose iterators change files, or are part of a job; or of which nothing shows what they do."""
_CONTAINED = re.compile(
    r"\w*Dataset(V\d)?|DatasetToSingleElement|\w*(SeedGenerator|MemoryCache)(V\d)?"
    r"|Random\w+(V\d)?|(Parameterized)?TruncatedNormal|Multinomial|SampleDistortedBoundingBox(V2)?"
    r"|ReadVariableOp|VariableShape|VarHandleOp|ResourceGather(Nd)?|LookupTable(Find|Size)V2|\w*HashTable\w*"
    r"|Assert|CheckNumerics(V2)?|If|Case|While|StatefulPartitionedCall|TensorArray\w*|StatelessRandomGetAlg|Empty"
)
"""Operations that TensorFlow calls stateful, and that change nothing but what an iterator has to itself."""


def end_data_elsewhere() -> None:
    """Lets a thread wait for the end of each iterator that `fit`, `evaluate` and `predict` make."""

    @wrap("TFEpochIterator.get_iterator")
    def get_iterator(stock, self):
        return Data(stock(self))


class Data:
    """Data whose iterators end in a thread, unless the data reaches out of itself.

    Args:
        data: what Keras iterates over: a data set, or a strategy's distributed one.
    """

    def __init__(self, data: object):
        self._data = data

    def __iter__(self) -> Iterator:
        iterator = iter(self._data)
        held = [] if any(map(reaches_out, _sets(self._data))) else resources(iterator)
        if held:
            _waiting().watch(iterator, held)
        return iterator


def resources(iterator: object) -> list[tf.Tensor]:
    """What TensorFlow knows an iterator by, those first that take from others; nothing for what is not tf.data's."""
    return private.iterator_resources(getattr(iterator, "source", iterator))  # of a `ShardedIterator`


def reaches_out(data: object) -> bool:
    """Whether an iterator of a data set changes, or calls, what is not its own: Python, variables, files.

    `tf.numpy_function(stateful=False)` is taken at its word.
    """
    try:
        kept = slots.of(data)
    except (TypeError, AttributeError):
        return True
    if not hasattr(kept, "reaches_out"):
        kept.reaches_out = _reaches_out(data)
    return kept.reaches_out


def _reaches_out(data: object) -> bool:
    kind = type(data)
    if not isinstance(data, tf.data.Dataset) or not kind.__module__.startswith("tensorflow."):
        return True
    if private.is_cache(data):
        reaches = private.writes_cache(data)
    else:
        reaches = _REACHING.fullmatch(kind.__name__) is not None
    return (
        reaches
        or any(_function_reaches_out(wrapper.function.graph) for wrapper in private.functions_of(data))
        or any(map(reaches_out, private.sources_of(data)))
    )


def _function_reaches_out(graph: tf.Graph) -> bool:
    return any(map(_operation_reaches_out, private.operations_of(graph)))


def _operation_reaches_out(kind: str) -> bool:
    if not private.is_stateful(kind):
        return False
    return _CONTAINED.fullmatch(kind) is None or _REACHING.fullmatch(kind) is not None


def _sets(data: object) -> list:
    """The datasets that one of Keras's iterates over: itself, or what a strategy has made of others."""
    if isinstance(data, tf.data.Dataset):
        return [data]
    if isinstance(data, ShardedDataset):
        return [data.dataset]
    return private.distributed_from(data)


class _Watch(weakref.ref):
    """A reference to an iterator, with what it is an iterator of: that stays until a thread lets go of it."""

    __slots__ = ("held",)


class _Waiting:
    """The iterators that are watched, and a thread that starts one for each that has gone.

    An iterator may go at any moment, within garbage collection too. Then nothing runs that Python could interrupt, or
    that waits: what a callback raises is lost, Ctrl-C as well. `SimpleQueue.put` is made for that.
    """

    def __init__(self):
        self.process = os.getpid()
        self._watched, self._gone = {}, queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"{NAME}-watch", daemon=True).start()

    def watch(self, iterator: Iterator, held: list[tf.Tensor]) -> None:
        watch = _Watch(iterator, self._gone.put)
        watch.held = held
        self._watched[id(watch)] = watch

    def are_over(self) -> bool:
        """Whether every iterator that has gone has a thread, and every thread has ended."""
        watched = [watch for watch in list(self._watched.values()) if watch() is None]
        return not watched and not any(thread.name == NAME for thread in threading.enumerate())

    def _serve(self) -> None:
        while True:
            watch = self._gone.get()
            try:
                threading.Thread(target=_let_go, args=(watch.held,), name=NAME).start()
            except RuntimeError:  # no more threads
                _let_go(watch.held)
            del self._watched[id(watch)], watch


_lock = threading.Lock()
_here: list[_Waiting] = []


def _waiting() -> _Waiting:
    """This process's. A fork has none of its parent's threads; what the parent watches stays as it is."""
    with _lock:
        if not _here or _here[-1].process != os.getpid():
            _here.append(_Waiting())
        return _here[-1]


def wait(seconds: float = 60.0) -> bool:
    """Waits until all iterators that have gone have ended; returns whether they have."""
    until = time.monotonic() + seconds
    while _here and not _here[-1].are_over():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _let_go(held: list[tf.Tensor]) -> None:
    for _ in range(_POLLS):  # The iterator itself lets go of it within a moment.
        time.sleep(_POLL_S)
        if all(sys.getrefcount(each) <= _ALONE for each in held):
            break
    while held:
        held.pop(0)

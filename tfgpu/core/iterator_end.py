"""Destroys tf.data iterators in a thread, so that `fit`, `evaluate`, `predict` and loops over replicas do not block.

tf.data's autotuning thread sleeps for up to a minute at a time and often misses the call to stop. Destroying the
iterator then blocks until the sleep is over, for at most the iterator's lifetime: some hundredths of a second per epoch
at two epochs per second, and occasionally ten seconds with epochs of ten seconds. Data that a strategy distributes has
one iterator for each device, which TensorFlow destroys one after another.

Until it is destroyed, an iterator reads ahead. So an iterator with side effects (`reaches_out`) is destroyed when
stock Keras destroys it: a user's generator must not run after `fit` has returned, nor twice at a time.
"""

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrap
from tfgpu.core.feed.reach import reaches_out
from tfgpu.core.feed.read_ahead import ReadAhead
from tfgpu.core.feed.sharded_dataset import ShardedDataset, ShardedIterator

NAME = "tfgpu-end-of-data"
_ALONE = 3  # references to an otherwise unreferenced object: the list's, the loop's, and getrefcount's own
_POLLS, _POLL_S = 100, 0.01


def destroy_iterators_in_background() -> None:
    """Destroys the iterators of `fit`, `evaluate`, `predict` and of a strategy's distributed data in a thread."""

    @wrap("TFEpochIterator.get_iterator")
    def get_iterator(stock, self):
        return Data(stock(self))

    @wrap("DistributedDataset.__iter__")
    def of_dataset(stock, self):
        return _watched(self, stock(self))

    @wrap("DistributedDatasetsFromFunction.__iter__")
    def of_function(stock, self):
        return _watched(self, stock(self))


class Data:
    """Data whose iterators are destroyed in a thread, unless it has side effects.

    Args:
        data: what Keras iterates over: a dataset, or a strategy's distributed one.
    """

    def __init__(self, data: object):
        self._data = data

    def __iter__(self) -> Iterator:
        iterator = iter(self._data)
        is_watched = isinstance(iterator, tf.distribute.DistributedIterator)
        return iterator if is_watched else _watched(self._data, iterator)


def _watched(data: object, iterator: Iterator) -> Iterator:
    """An iterator that is destroyed in a thread, unless its data has side effects, or a graph makes it."""
    if tf.executing_eagerly() and not any(map(reaches_out, _sets(data))) and (held := resources(iterator)):
        _waiting().watch(iterator, held)
    return iterator


def resources(iterator: object) -> list[tf.Tensor]:
    """The handles of an iterator and of those that it reads from, in this order; empty unless it is tf.data's."""
    return private.iterator_resources(iterator.unread if isinstance(iterator, ShardedIterator) else iterator)


def _sets(data: object) -> list:
    """The datasets that Keras iterates over: the data itself, or those that a strategy has distributed."""
    if isinstance(data, tf.data.Dataset):
        return [data]
    if isinstance(data, ShardedDataset | ReadAhead):
        return [data.dataset]
    return private.distributed_from(data)


class _Watch(weakref.ref):
    """A weak reference to an iterator, with its handles, which live until a thread drops them."""

    __slots__ = ("held",)


class _Waiting:
    """The watched iterators, and a thread that starts another one for each iterator that was garbage-collected.

    An iterator may be collected at any moment. A weak reference's callback must not block, and an exception in it is
    lost, including Ctrl-C. `SimpleQueue.put` is made for this.
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
        """Whether the threads of all collected iterators have ended."""
        watched = [watch for watch in list(self._watched.values()) if watch() is None]
        return not watched and not any(thread.name == NAME for thread in threading.enumerate())

    def _serve(self) -> None:
        while True:
            watch = self._gone.get()
            try:
                # The interpreter waits for it: a thread that comes back from C++ after its end ends the process (134).
                threading.Thread(target=_release, args=(watch.held,), name=NAME, daemon=False).start()
            except RuntimeError:  # no more threads
                if threading.main_thread().is_alive():
                    _release(watch.held)
            del self._watched[id(watch)], watch


_lock = threading.Lock()


def _all_waiting() -> list[_Waiting]:
    """One per process, from the first ancestor to this process: a fork must not drop its parent's handles."""
    return vars(slots.of(private.runtime())).setdefault("iterator_ends", [])


def _waiting() -> _Waiting:
    """This process's, with its own thread: a fork has none of its parent's threads."""
    with _lock:
        found = _all_waiting()
        if not found or found[-1].process != os.getpid():
            found.append(_Waiting())
        return found[-1]


def wait(seconds: float = 60.0) -> bool:
    """Waits until all collected iterators are destroyed; returns whether they are."""
    until, found = time.monotonic() + seconds, _all_waiting()
    while found and not found[-1].are_over():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def _release(held: list[tf.Tensor]) -> None:
    for _ in range(_POLLS):  # The iterator itself soon drops them.
        time.sleep(_POLL_S)
        if all(sys.getrefcount(each) <= _ALONE for each in held):
            break
    threads = []
    for _ in range(len(held) - 1):  # The last one is what the others read from.
        threads.append(threading.Thread(target=held.pop, args=(0,), name=NAME))
        try:
            threads[-1].start()
        except RuntimeError:
            threads.pop()
            held.pop(0)
    for thread in threads:
        thread.join()
    held.clear()

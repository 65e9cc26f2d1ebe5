"""Variables of a layer whose calls run once on each device of a tensor-parallel group, with that device's shards.

The calls run the layer's own code. Where it reads a variable that is split, it finds a `LocalShard`, which is the shard
of the device that computes. Seeds are drawn once for all devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.core.randomness import rng
from tfgpu.core.state import sharded_variable
from tfgpu.parallel import compiled_calls
from tfgpu.parallel.tensor import collectives
from tfgpu.parallel.tensor.collectives import Placements

_now = step_context.Slot("tensor.computing")
"""The `_Computing` of this thread."""


@dataclass
class _Computing:
    """The device that computes: its number, the seeds that the first device drew, and how many it took of them."""

    at: int
    seeds: list
    taken: int = 0


@contextlib.contextmanager
def computing(at: int, count: int, axis: int, seeds: list) -> Iterator[None]:
    """Runs the block with the shards of one device.

    Args:
        at: the number of the device, of `count`.
        count: how many devices there are.
        axis: the axis of activations that is split, from the last.
        seeds: the first device adds the seeds that it draws; the others take them.
    """
    with _now.set_to(_Computing(at, seeds)), rng.sharding(rng.DrawShard(axis, at, count)):
        yield


def on_shards(compute: Callable, placements: Placements, values: Sequence[tf.Tensor]) -> list:
    """What each device, which has its shards, computes of its number and its value."""

    def own(at: int, value: tf.Tensor):
        with computing(at, len(placements), -1, []):
            return compute(at, value)

    return collectives.on_each(own, placements, range(len(placements)), values)


@contextlib.contextmanager
def computing_whole() -> Iterator[None]:
    """Runs the block with whole variables and draws, within `computing`."""
    with _now.set_to(None), step_context.scope(draw_shard=None):
        yield


@contextlib.contextmanager
def noted_seeds() -> Iterator[list]:
    """Yields a list that holds, after the block, the seeds that the computing device took in it."""
    now, found = _now.get(), []
    begin = now.taken
    yield found
    found += now.seeds[begin : now.taken]


def repeated_seeds(seeds: list) -> contextlib.AbstractContextManager:
    """Inside the block, seed generators give these seeds, which a device took when the code ran before."""
    return _now.set_to(_Computing(1, seeds))


def is_computing() -> bool:
    """Whether one device of a group computes."""
    return _now.get() is not None


def _computing_device() -> int | None:
    now = _now.get()
    return None if now is None else now.at


@contextlib.contextmanager
def attributes(layer: keras.layers.Layer, values: Mapping[str, object]) -> Iterator[None]:
    """In the block, the layer has other attributes."""
    before = {name: vars(layer)[name] for name in values if name in vars(layer)}
    for name, value in values.items():
        object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                object.__setattr__(layer, name, before[name])
            else:
                object.__delattr__(layer, name)


@functools.cache
def draw_seeds_once() -> None:
    """Makes all devices of a group take the same seeds from Keras's seed generators."""

    @wrap("SeedGenerator.next")
    def next_seed(stock, self, ordered=True):
        now = _now.get()
        if now is None:
            return stock(self, ordered)
        if now.at == 0:
            with compiled_calls.around():  # the other devices take it in functions of their own
                now.seeds.append(stock(self, ordered))
        now.taken += 1
        return now.seeds[now.taken - 1]


class LocalShard(sharded_variable.ShardedVariable):
    """A layer's split variable: in `computing` the shard of the device that computes, elsewhere the whole."""

    def __tf_tensor__(self, dtype=None, name=None):
        at = _computing_device()
        if at is None:
            return super().__tf_tensor__(dtype, name)
        value = tf.convert_to_tensor(self.shards[at])
        return tf.cast(value, dtype or value.dtype)

    def assign(self, value) -> None:
        at = _computing_device()
        if at is None:
            super().assign(value)
        else:
            self.shards[at].assign(value)


class FirstTermBias:
    """The bias of a layer whose devices compute terms of a sum: the first device adds it, the others add zeros."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable

    def __getattr__(self, name: str):
        return getattr(self._variable, name)

    def __tf_tensor__(self, dtype=None, name=None):
        if _computing_device():
            value = tf.zeros(self.shape, self._variable.value.dtype)
        else:
            value = tf.convert_to_tensor(self._variable)
        return tf.cast(value, dtype or value.dtype)

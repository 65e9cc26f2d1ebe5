"""A sharded variable: one variable in several shards, on servers, on devices along an axis of the mesh, or on replicas.

A shard is an ordinary Keras variable with its own optimizer slots. Files, checkpoints and `get_weights` see the shards
as one `ShardedVariable`, at the position of the variable that one device has.

`parallel/shard_patches.py` makes Keras do so, and clips by the norm of the full variable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError


class Sharding(Protocol):
    """How shards make the full variable."""

    over_replicas: bool
    """Each replica holds its own piece, so sums over the shards must be summed over replicas as well."""
    holder: int | None
    """The replica that alone holds the full variable, or None."""

    def shape(self, shards: Sequence) -> tuple[int, ...]:
        """The shape of the full variable."""

    def read(self, shards: Sequence) -> np.ndarray:
        """The current full value, outside replicas."""

    def write(self, shards: Sequence, value: np.ndarray | ArraySlices) -> None:
        """Gives each shard its part of a full value, outside replicas; of slices, it reads that part alone."""


@dataclass(frozen=True)
class ShardInfo:
    """What a shard knows of the full variable.

    Attributes:
        of: identifies the full variable; for an optimizer slot, followed by the slot's name.
        sharding: how the shards make the full variable.
        path: of the full variable.
        outer: the same for the full variable, if that is a shard itself.
    """

    of: tuple
    sharding: Sharding
    path: str
    outer: "ShardInfo | None" = None

    def slot(self, name: str) -> "ShardInfo":
        """The same for an optimizer slot of the shard."""
        outer = self.outer and self.outer.slot(name)
        return ShardInfo((*self.of, name), self.sharding, f"{self.path}/{name}", outer)


@dataclass(frozen=True)
class AxisSharding:
    """Shards that lie side by side along an axis."""

    axis: int
    over_replicas = False
    holder = None

    def shape(self, shards: Sequence) -> tuple[int, ...]:
        sizes = list(shards[0].shape)
        sizes[self.axis] = sum(shard.shape[self.axis] for shard in shards)
        return tuple(sizes)

    def read(self, shards: Sequence) -> np.ndarray:
        return np.concatenate([shard.numpy() for shard in shards], self.axis)

    def write(self, shards: Sequence, value: np.ndarray | ArraySlices) -> None:
        ends = np.cumsum([0, *(shard.shape[self.axis] for shard in shards)])
        before = (slice(None),) * self.axis
        for shard, start, stop in zip(shards, ends, ends[1:], strict=False):
            shard.assign(value[(*before, slice(int(start), int(stop)))])


class ShardedVariable:
    """The shards of a variable, or of one of its optimizer slots, as one variable.

    Args:
        shards: all shards, in order.
        info: what they know of the full variable; None takes it from the first shard.
    """

    _value = None  # as for a Keras variable without a value

    def __init__(self, shards: list, info: ShardInfo | None = None):
        info = info or shard_info(shards[0])
        self.shards, self.sharding, self.path = shards, info.sharding, info.path
        self.name = self.path.rpartition("/")[2]
        self.dtype, self.shape = shards[0].dtype, tf.TensorShape(info.sharding.shape(shards))
        if info.outer is not None:
            set_shard_info(self, info.outer)

    @property
    def is_over_replicas(self) -> bool:
        """Whether reading it is a collective on several workers."""
        return self.sharding.over_replicas or any(getattr(shard, "is_over_replicas", False) for shard in self.shards)

    @property
    def trainable(self) -> bool:
        return self.shards[0].trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        for shard in self.shards:
            shard.trainable = value

    @property
    def value(self) -> tf.Tensor:
        return tf.convert_to_tensor(self)

    def numpy(self) -> np.ndarray:
        return self.sharding.read(self.shards)

    def assign(self, value) -> None:
        """Gives each shard its part of `value`, an array or `ArraySlices`."""
        value = value if isinstance(value, ArraySlices) else np.asarray(value)
        if tuple(value.shape) != tuple(self.shape):
            raise InputError(f"The variable {self.path} has shape {self.shape}. Received: {tuple(value.shape)}.")
        self.sharding.write(self.shards, value)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def __getitem__(self, index) -> tf.Tensor:
        return tf.convert_to_tensor(self)[index]

    def __tf_tensor__(self, dtype=None, name=None):
        if isinstance(self.sharding, AxisSharding):
            found = tf.concat([tf.convert_to_tensor(shard) for shard in self.shards], self.sharding.axis)
        else:
            found = tf.convert_to_tensor(self.numpy())
        return tf.cast(found, dtype or found.dtype)


def shard_info(variable) -> ShardInfo | None:
    """What a shard knows of the full variable; None for any other variable."""
    return slots.get(variable, "shard_info")


def set_shard_info(variable, info: ShardInfo) -> None:
    """Makes a variable a shard of what `info` describes."""
    slots.of(variable).shard_info = info


def shard_of(variable):
    """What an optimizer updates in place of a variable: its shard (ZeRO), or else the variable itself."""
    return slots.get(variable, "updated_shard", variable)


def full_variable(variable):
    """The variable whose shard an optimizer updates, given the shard; any other variable itself."""
    return slots.get(variable, "full_variable", variable)


def read_variable(variable):
    """What a layer reads, given the shard that an optimizer updates (ZeRO); any other variable itself."""
    return slots.get(variable, "read_variable", variable)


def set_shard(variable, shard, *, holds_value: bool) -> None:
    """Makes an optimizer update `shard` in place of a variable.

    Args:
        variable: the variable.
        shard: its shard.
        holds_value: the variable holds the value between steps; otherwise the shard does.
    """
    slots.of(variable).updated_shard, slots.of(shard).read_variable = shard, variable
    if holds_value:
        slots.of(shard).full_variable = variable


def merged(found: Sequence) -> list:
    """The variables as on one device: shards are merged into a `ShardedVariable` at the position of the first."""
    found = list(found)
    while any(shard_info(variable) is not None for variable in found):
        groups: dict = {}
        for variable in found:
            info = shard_info(variable)
            groups.setdefault(id(variable) if info is None else info.of, []).append(variable)
        found = [group[0] if shard_info(group[0]) is None else ShardedVariable(group) for group in groups.values()]
    return found


def has_shards(found: Sequence) -> bool:
    """Whether some of the variables are shards."""
    return any(shard_info(variable) is not None for variable in found)

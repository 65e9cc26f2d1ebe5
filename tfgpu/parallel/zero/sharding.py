"""Shards of the sharded optimizer (ZeRO): of every variable, each replica updates one piece and holds its slots.

The shard of a variable is a flat Keras variable whose copy on a replica is that replica's piece. Keras's optimizer is
built on the shards and applied to them, unchanged. Around it, in each step:

1. the gradients are reduced: in stage 1 every replica gets their sum and takes its piece; in stage 2 it gets its piece
   alone (`reduction.py`);
2. each replica takes its piece of the variable, which holds the value between steps, so that assignments count;
3. what depends on all pieces is reduced: whether all numbers are finite, and the norms that clipping needs;
4. Keras unscales, accumulates, clips, decays, updates and averages the pieces;
5. the new pieces are gathered into the variable on every replica (`update.py`).

In stage 3 the shards are the model's variables, and steps 1, 2 and 5 fall away: see `gathered_variable.py`. An
optimizer that must see whole variables is built on dealt shards in place of the flat ones: see `dealing.py`.

In files, checkpoints and `get_weights` the slots are those of one device: the slots of shards are shards as well
(`sharded_variable.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots, variables
from tfgpu.core.state import replica_values, sharded_variable
from tfgpu.core.state.array_slices import ArraySlices, flat_part
from tfgpu.core.state.sharded_variable import full_variable, shard_of
from tfgpu.optim import narrow_state
from tfgpu.parallel import device_placement, shard_patches


@dataclass(frozen=True)
class FlatSharding:
    """A variable's numbers in a row, cut into one piece per replica; the last piece is padded with zeros.

    Attributes:
        sizes: the shape of the variable.
    """

    sizes: tuple[int, ...]
    over_replicas = True
    holder = None

    def shape(self, shards: Sequence) -> tuple[int, ...]:
        return self.sizes

    def read(self, shards: Sequence) -> np.ndarray:
        """The full value; on several workers every one must call this."""
        value = variables.held(shards[0])
        bits = replica_values.gather(value.distribute_strategy, value)
        flat = replica_values.from_bits(bits, np.dtype(tf.as_dtype(value.dtype).as_numpy_dtype)).reshape(-1)
        return flat[: int(np.prod(self.sizes))].reshape(self.sizes)

    def write(self, shards: Sequence, value: np.ndarray | ArraySlices) -> None:
        variable = variables.held(shards[0])
        count, dtype = int(variable.shape[0]), tf.as_dtype(variable.dtype).as_numpy_dtype

        def piece(replica: int) -> np.ndarray:
            return flat_part(value, replica * count, count).astype(dtype, copy=False)

        replica_values.assign_each(variable.distribute_strategy, variable, piece)


@dataclass(frozen=True)
class ZeroConfig:
    """How a model's variables are sharded.

    Attributes:
        stage: 1, 2 or 3.
        offload: pieces and slots are in the host's memory.
    """

    stage: int
    offload: bool


@dataclass(frozen=True)
class ShardState:
    """What a shard knows, in its slot `zero`.

    Attributes:
        config: how the model is sharded.
        placement: the devices on which the variable is used.
        variable: the layer's variable, which holds nothing in stage 3.
    """

    config: ZeroConfig
    placement: device_placement.DevicePlacement
    variable: keras.Variable


def create_shard(
    variable, placement: device_placement.DevicePlacement, strategy: tf.distribute.Strategy, config: ZeroConfig
) -> keras.Variable:
    """A shard of zeros for a variable that is used on these devices, for optimizers that are built from now on."""
    size = _piece_size(int(np.prod(variable.shape)), strategy.num_replicas_in_sync)
    if config.offload:
        device_placement.mark_placed(strategy)
    with strategy.scope(), device_placement.variable_scope(_hosts(placement) if config.offload else placement):
        shard = keras.Variable(np.zeros(size), dtype=variables.storage_dtype(variable), name=variable.name)
    variables.rename(shard, variable.path)
    outer = sharded_variable.shard_info(variable)
    shard_patches.mark_shards([shard], FlatSharding(tuple(variable.shape)), variable.path, outer)
    slots.of(shard).zero = ShardState(config, placement, variable)
    sharded_variable.set_shard(variable, shard, holds_value=config.stage < 3)
    return shard


def _piece_size(count: int, replicas: int) -> int:
    """The numbers of a piece: of large variables whole blocks, so that slots in few bits round as on one device."""
    size = -(-count // replicas)
    return narrow_state.blocks_of(size) * narrow_state.BLOCK if count >= narrow_state.SMALLEST else size


def _hosts(placement: device_placement.DevicePlacement) -> device_placement.DevicePlacement:
    """The CPU devices of the processes in which a placement's devices are."""
    found = map(tf.DeviceSpec.from_string, placement.devices)
    hosts = (device.replace(device_type="CPU", device_index=0).to_string() for device in found)
    return device_placement.on_devices(hosts)


def state_of(shard) -> ShardState:
    return slots.of(shard).zero


def is_sharded(variable) -> bool:
    """Whether a variable is a shard, or has one."""
    return slots.get(shard_of(variable), "zero") is not None


def is_fully_sharded(variable) -> bool:
    """Whether the model has the shard alone (stage 3). Its gradient is summed over replicas when it is computed."""
    shard = shard_of(variable)
    return is_sharded(shard) and full_variable(shard) is shard


def full_shape(shard) -> tuple[int, ...]:
    """The shape of the variable that a shard is of."""
    return sharded_variable.shard_info(shard).sharding.sizes


def device_of(shard) -> str:
    """The device on which this replica uses the variable."""
    return state_of(shard).placement.local_device

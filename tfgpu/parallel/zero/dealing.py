"""Whole variables dealt to replicas, for optimizers whose update of a number depends on the rest of the variable.

A variable that is dealt has an owner: the replica that holds its slots, updates it whole and sends the others what they
need of it. On the other replicas the copies of the slots hold nothing. Owners are chosen so that all hold about as
much; where a variable is larger than a replica's share, its owner holds more.

`optimizer_build.py` builds the optimizer on dealt shards, `owner_exchange.py` moves values to owners and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots, variables
from tfgpu.core import replication
from tfgpu.core.state import broadcast, replica_values, sharded_variable
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.core.state.sharded_variable import full_variable, shard_info, shard_of
from tfgpu.parallel import shard_patches
from tfgpu.parallel.zero.sharding import full_shape, is_fully_sharded, state_of


@dataclass(frozen=True)
class DealtSharding:
    """A variable that is whole on some replicas, and empty on the others.

    Attributes:
        sizes: the shape of the variable.
        owners: the numbers of the replicas that hold it; the first sends it to the others.
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    over_replicas = True

    @property
    def holder(self) -> int:
        return self.owners[0]

    def shape(self, shards: Sequence) -> tuple[int, ...]:
        return self.sizes

    def read(self, shards: Sequence) -> np.ndarray:
        """The full value; on several workers every one must call this."""
        value = variables.held(shards[0])
        strategy, copies = value.distribute_strategy, _by_replica(value)
        if not replication.spans_processes(strategy):
            return np.array(copies[self.holder].numpy())
        dtype = np.dtype(tf.as_dtype(value.dtype).as_numpy_dtype)
        mine = copies[self.holder].numpy() if self.holder in copies else np.zeros(self.sizes, dtype)
        found = broadcast.of_all_workers(strategy, replica_values.to_bits(mine))
        return replica_values.from_bits(found[self.holder // len(copies)], dtype)

    def write(self, shards: Sequence, value: np.ndarray | ArraySlices) -> None:
        value_of = variables.held(shards[0])
        own = [copy for replica, copy in _by_replica(value_of).items() if replica in self.owners]
        if own:
            value = np.asarray(value).astype(tf.as_dtype(value_of.dtype).as_numpy_dtype, copy=False)
        for copy in own:
            copy.assign(value)


def deal(sizes: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    """Deals variables to owners: the largest first, each to the replica that holds least.

    With fewer variables than replicas the others hold the smallest one as well, so that each has something to update
    and counts its steps.

    Args:
        sizes: how many numbers each variable has.
        replicas: how many there are.

    Returns:
        The owners of each variable.

    Example:
        >>> deal([5, 40, 10, 30], 2), deal([3, 4], 3)
        ([(0,), (0,), (1,), (1,)], [(1, 2), (0,)])
    """
    held, found = [0] * replicas, [()] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        owner = min(range(replicas), key=lambda replica: (held[replica], replica))
        held[owner] += max(1, sizes[at])
        found[at] = (owner,)
    smallest = min(range(len(sizes)), key=lambda at: (sizes[at], at))
    found[smallest] += tuple(replica for replica in range(replicas) if not held[replica])
    return found


def create(flat: keras.Variable, owners: tuple[int, ...]) -> keras.Variable:
    """The dealt shard of a variable; it takes the place of the flat one in the optimizer.

    Args:
        flat: the variable's flat shard. In stages 1 and 2 it holds nothing from now on.
        owners: which replicas hold the variable whole.
    """
    sizes, like = full_shape(flat), _held_by(flat)
    with like.distribute_strategy.scope():
        made = keras.Variable(np.zeros(1), dtype=variables.storage_dtype(flat), name=flat.name)
    variables.rename(made, flat.path)
    shard_patches.mark_shards([made], DealtSharding(sizes, owners), flat.path, shard_info(flat).outer)
    slots.of(made).zero, slots.of(made).flat, slots.of(flat).dealt = state_of(flat), flat, made
    slots.of(made).full_variable = flat if is_fully_sharded(flat) else full_variable(flat)
    hold_whole(made, like, owners, np.zeros(sizes, tf.as_dtype(made.dtype).as_numpy_dtype))
    if not is_fully_sharded(flat):
        variables.set_held(flat, None)
    return made


def hold_pieces(flat: keras.Variable) -> None:
    """Makes a flat shard the one that an optimizer updates, after another optimizer had it dealt."""
    if slots.get(flat, "dealt") is None:
        return
    like, dtype = _held_by(flat), tf.as_dtype(flat.dtype).as_numpy_dtype
    slots.of(flat).dealt = None
    if variables.held(flat) is None:
        hold_whole(flat, like, tuple(_by_replica(like)), np.zeros(flat.shape, dtype))


def strategy_of(shard: keras.Variable) -> tf.distribute.Strategy:
    """The replicas of a shard, flat or dealt."""
    return _held_by(flat_of(shard)).distribute_strategy


def _held_by(flat: keras.Variable):
    """The TensorFlow variable of a flat shard or, where that holds nothing, of the dealt one."""
    found = variables.held(flat)
    return variables.held(slots.of(flat).dealt) if found is None else found


def hold_whole(variable: keras.Variable, like, owners: tuple[int, ...], value: np.ndarray) -> None:
    """Sets a variable's copies again: the value on its owners, nothing on the others.

    Args:
        variable: what it held is freed.
        like: a variable with copies on the same devices, of the same strategy.
        owners: the numbers of the replicas that hold the value.
        value: of the variable's dtype.
    """
    none = np.zeros([0] * max(1, value.ndim), value.dtype)
    copies = [
        distribute.plain_variable(value if replica in owners else none, copy.device, variable.name)
        for replica, copy in _by_replica(like).items()
    ]
    variables.set_held(variable, distribute.with_copies(like, copies))
    variables.set_shape(variable, value.shape)


def make_slot(slot: keras.Variable, dealt: keras.Variable, name: str, value: np.ndarray) -> None:
    """Makes a variable a slot of a dealt shard: it lies where the shard does.

    Args:
        slot: a variable of the optimizer; its shape may be another one.
        dealt: the shard.
        name: of the slot, unique for the shard.
        value: what it starts with.
    """
    info = shard_info(dealt)
    hold_whole(slot, variables.held(dealt), info.sharding.owners, value)
    sharding = DealtSharding(tuple(value.shape), info.sharding.owners)
    found = sharded_variable.ShardInfo((*info.of, name), sharding, f"{info.path}/{name}", None)
    sharded_variable.set_shard_info(slot, found)


def target_of(variable):
    """What an optimizer updates in place of a model's variable: its dealt shard, its flat one, or itself."""
    flat = shard_of(variable)
    dealt = slots.get(flat, "dealt")
    return flat if dealt is None else dealt


def flat_of(target):
    """The flat shard of a variable that has a dealt one; any other shard itself."""
    return slots.get(target, "flat", target)


def is_dealt(target) -> bool:
    """Whether an optimizer's variable is a dealt shard."""
    return slots.get(target, "flat") is not None


def owners_of(dealt) -> tuple[int, ...]:
    return shard_info(dealt).sharding.owners


def _by_replica(value) -> dict[int, tf.Variable]:
    """This process's copies of a variable, by the numbers of their replicas."""
    own, strategy = value.values, value.distribute_strategy
    is_part = replication.spans_processes(strategy)
    first = distribute.worker_index(strategy) * len(own) if is_part else 0
    return dict(enumerate(own, first))

"""The sharded optimizer: each replica updates a piece of every variable, and holds the slots of that piece alone.

A sharded variable has a shard: a flat Keras variable whose copy on a replica is that replica's piece. Keras's optimizer
is built on the shards and applied to them, unchanged. Around it, in each step:

1. the gradients meet: in stage 1 every replica gets their sum and takes its piece, in stage 2 it gets its piece alone;
2. each replica takes its piece of the variable, which between steps is the truth: what anybody assigned counts;
3. what depends on all pieces is brought together: whether all numbers are finite, and the norms that clipping needs;
4. Keras unscales, accumulates, clips, decays, updates and averages the pieces;
5. the new pieces are gathered into the variable on every replica.

In stage 3 the shards are the model's variables: steps 1, 2 and 5 fall away, see `gathering.py`.

To files, checkpoints and `get_weights` the slots are those of one device: a shard's slot is a `parts.Part`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfgpu.core import broadcast, collectives, gradient_weights, layer_state, replication, step_context, traffic
from tfgpu.parallel import device_placement, sharded_variable
from tfgpu.parallel.zero import shard_collectives

BUCKET_BYTES = 32 << 20
"""Of gradients that travel in one collective, so that the first can leave while others are computed."""


@dataclass(frozen=True)
class FlatSharding:
    """A variable's numbers in a row, cut into a piece for each replica; the last is filled up with zeros."""

    sizes: tuple[int, ...]
    over_replicas = True

    def shape(self, found: Sequence) -> tuple[int, ...]:
        return self.sizes

    def read(self, found: Sequence) -> np.ndarray:
        """The whole; on several workers every one must call this."""
        value = found[0]._value
        bits = broadcast.parts(value.distribute_strategy, value)
        flat = broadcast.from_bits(bits, tf.as_dtype(value.dtype).as_numpy_dtype().dtype).reshape(-1)
        return flat[: int(np.prod(self.sizes))].reshape(self.sizes)

    def write(self, found: Sequence, value: np.ndarray) -> None:
        variable = found[0]._value
        strategy = variable.distribute_strategy
        rows = np.zeros((strategy.num_replicas_in_sync, *variable.shape), value.dtype)
        rows.reshape(-1)[: value.size] = value.reshape(-1)
        broadcast.put_parts(strategy, variable, rows, "first")


@dataclass(frozen=True)
class ZeroConfig:
    """How a model's variables are sharded: stage 1, 2 or 3, and whether pieces and slots live in the host's memory."""

    stage: int
    offload: bool


def create_shards(variables: Sequence, strategy: tf.distribute.Strategy, how: ZeroConfig) -> None:
    """Gives each variable a shard, on the devices of its copies; optimizers that are built from now on use them."""
    for variable in variables:
        copies = variable._value.values
        shard = create_shard(variable, device_placement.on_devices(copy.device for copy in copies), strategy, how)
        shard._tfgpu_full, variable._tfgpu_shard = variable, shard


def create_shard(
    variable, place: device_placement.DevicePlacement, strategy: tf.distribute.Strategy, how: ZeroConfig
) -> keras.Variable:
    """A shard for a variable that is used at a place: zeros."""
    size = -(-int(np.prod(variable.shape)) // strategy.num_replicas_in_sync)
    if how.offload:
        strategy._tfgpu_has_homes = True
    kept_at = _hosts(place) if how.offload else place
    with strategy.scope(), device_placement.variable_scope(kept_at):
        shard = keras.Variable(np.zeros(size), dtype=variable._dtype, name=variable.name)
    shard._path = variable.path
    sharded_variable.mark_shards(
        [shard], FlatSharding(tuple(variable.shape)), variable.path, sharded_variable.shard_info(variable)
    )
    shard._tfgpu_sharding, shard._tfgpu_used_at = how, place
    return shard


def _hosts(place: device_placement.DevicePlacement) -> device_placement.DevicePlacement:
    """The hosts of a place's devices: those of connected processes have one each."""
    found = map(tf.DeviceSpec.from_string, place.devices)
    return device_placement.on_devices(
        device.replace(device_type="CPU", device_index=0).to_string() for device in found
    )


def full_variable(variable):
    """The variable whose shard this is; any other variable itself, and a shard that the model has in its place."""
    return getattr(variable, "_tfgpu_full", variable)


def shard_of(variable):
    """A sharded variable's shard; any other variable itself."""
    return getattr(variable, "_tfgpu_shard", variable)


def is_sharded(variable) -> bool:
    """Whether a variable is a shard, or has one."""
    return hasattr(shard_of(variable), "_tfgpu_sharding")


def is_fully_sharded(variable) -> bool:
    """Whether the model has the shard alone (stage 3), whose gradient comes summed over the replicas."""
    shard = shard_of(variable)
    return is_sharded(shard) and full_variable(shard) is shard


def full_shape(shard) -> tuple[int, ...]:
    """The shape of the whole."""
    return sharded_variable.shard_info(shard).sharding.sizes


def reduce_gradients(optimizer, grads: list, variables: Sequence) -> list:
    """This replica's pieces of the sums of gradients; None stays None.

    Args:
        optimizer: not a `LossScaleOptimizer`, but the one within it.
        grads: this replica's parts, as large as the variables; tensors or IndexedSlices.
        variables: sharded.
    """
    shards, found = [shard_of(variable) for variable in variables], list(grads)
    if optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor is not None:  # Keras makes tensors, too
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
    if all(map(is_fully_sharded, shards)):
        return found
    return reduce_pieces(found, shards, scatter=shards[0]._tfgpu_sharding.stage > 1)


def reduce_pieces(grads: list, shards: Sequence, scatter: bool) -> list:
    """This replica's pieces of the sums of gradients over all replicas; None stays None.

    Args:
        grads: as large as the variables; tensors or IndexedSlices.
        shards: a gradient's each.
        scatter: send each replica its own pieces alone; slices always meet whole.
    """
    found = list(grads)
    meets_whole = [g is not None and (not scatter or isinstance(g, tf.IndexedSlices)) for g in found]
    whole = [at for at, is_whole in enumerate(meets_whole) if is_whole]
    sent = [found[at] for at in whole]
    for at, total in zip(
        whole,
        collectives.from_reduce_dtype(collectives.all_reduce(collectives.to_reduce_dtype(sent)), sent),
        strict=True,
    ):
        found[at] = _piece(total, shards[at])
    rest = [at for at, g in enumerate(found) if g is not None and at not in set(whole)]
    for bucket in _buckets(rest[::-1], found, shards):  # the last layers' gradients are there first
        for at, piece in zip(bucket, _scattered(bucket, found, shards), strict=True):
            found[at] = piece
    return found


@contextlib.contextmanager
def sharded_update(optimizer, inner, pieces: list, variables: Sequence) -> Iterator[list]:
    """Around an optimizer's own update: gives the pieces of the gradients to be applied, and gathers what comes out."""
    shards = [shard_of(variable) for variable in variables]
    if not inner.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    for shard in inner._trainable_variables:
        if not is_fully_sharded(shard):
            with tf.device(_device(shard)):
                layer_state.own(shard).assign(local_piece(layer_state.own(full_variable(shard)), shard))
    pieces = [piece if piece is None else _at_home(piece, shard) for piece, shard in zip(pieces, shards, strict=True)]
    is_finite = None
    if isinstance(optimizer, LossScaleOptimizer):
        pieces, is_finite = _finite_for_all(pieces)
    given = [(piece, shard) for piece, shard in zip(pieces, shards, strict=True) if piece is not None]
    with sharded_variable.full_norm_clipping(
        inner, *zip(*given, strict=True), gradient_weights.loss_scale_of(optimizer)
    ):
        yield pieces
    changed = inner._trainable_variables if inner.use_ema else [shard for _, shard in given]
    if all(map(is_fully_sharded, changed)):
        pass
    elif inner.gradient_accumulation_steps and not (inner.use_ema and inner.ema_overwrite_frequency):
        _gather_at_update(inner, changed)
    else:
        _gather(changed)
    for shard in changed:
        _constrain(shard, is_finite)


def _piece(total, shard):
    """This replica's piece of a gradient that every replica has."""
    if not isinstance(total, tf.IndexedSlices):
        with tf.device(_device(shard)):
            return local_piece(total, shard)
    # Slices stay slices, of single numbers: Keras squares each before it adds those of one row.
    size, width = shard.shape[0], int(np.prod(full_shape(shard)[1:]))
    places = tf.cast(total.indices, tf.int64)[:, None] * width + tf.range(width, dtype=tf.int64)
    places = tf.reshape(places, [-1]) - tf.cast(shard_collectives.replica_id(), tf.int64) * size
    is_own, values = (places >= 0) & (places < size), tf.reshape(total.values, [-1])
    return tf.IndexedSlices(
        tf.where(is_own, values, tf.zeros_like(values)),
        tf.where(is_own, places, tf.zeros_like(places)),
        tf.constant([size], tf.int64),
    )


def _rows(value, shard) -> tf.Tensor:
    """A tensor as large as the variable, as the pieces of all replicas."""
    length, count = int(np.prod(full_shape(shard))), replication.replica_context().num_replicas_in_sync
    flat, size = tf.reshape(tf.convert_to_tensor(value), [length]), shard.shape[0]
    if count * size > length:
        flat = tf.pad(flat, [[0, count * size - length]])
    return tf.reshape(flat, [count, size])


def local_piece(value, shard) -> tf.Tensor:
    """This replica's piece of a tensor as large as the variable."""
    return _rows(value, shard)[shard_collectives.replica_id()]


def _device(shard) -> str:
    """Where this replica uses the variable."""
    return shard._tfgpu_used_at.local_device


def _at_home(piece, shard):
    with tf.device(layer_state.own(shard).device):
        return tf.nest.map_structure(tf.identity, piece, expand_composites=True)


def _buckets(places: Sequence[int], values: Sequence, shards: Sequence) -> list[list[int]]:
    """Places of what can travel together: of one dtype, on one device, up to a number of bytes."""
    found, open_ones, count = [], {}, replication.replica_context().num_replicas_in_sync
    for at in places:
        key = values[at].dtype, _device(shards[at])
        bucket, size = open_ones.get(key, (None, 0))
        more = values[at].dtype.size * shards[at].shape[0] * count
        if bucket is None or size + more > BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(at)
        open_ones[key] = bucket, size + more
    return found


def _scattered(bucket: Sequence[int], grads: Sequence, shards: Sequence) -> list[tf.Tensor]:
    """The sums of this replica's pieces."""
    with tf.device(_device(shards[bucket[0]])):
        packed = tf.concat([_rows(grads[at], shards[at]) for at in bucket], 1)
        (narrow,) = collectives.to_reduce_dtype([packed])
        (total,) = collectives.from_reduce_dtype([shard_collectives.reduce_scatter(narrow)], [packed])
        return tf.split(total, [shards[at].shape[0] for at in bucket])


def _gather(shards: Sequence) -> None:
    """Gives every replica's copy of the variables the pieces of all."""
    for shard, found in zip(shards, all_gather([layer_state.own(shard) for shard in shards], shards), strict=True):
        with tf.device(_device(shard)):
            layer_state.own(full_variable(shard)).assign(found)


def all_gather(pieces: Sequence, shards: Sequence) -> list[tf.Tensor]:
    """What the pieces of all replicas make, on each: tensors as large as the variables.

    Args:
        pieces: this replica's; tensors or variables of one number a place of the shard.
        shards: a piece's each.
    """
    wholes = {}
    for bucket in _buckets(range(len(shards)), pieces, shards):
        with tf.device(pieces[bucket[0]].device):
            packed = tf.concat([tf.convert_to_tensor(pieces[at]) for at in bucket], 0)
        device = _device(shards[bucket[0]])
        rows = shard_collectives.all_gather(packed, device)
        with tf.device(device):
            for at, found in zip(bucket, tf.split(rows, [shards[at].shape[0] for at in bucket], 1), strict=True):
                sizes = full_shape(shards[at])
                wholes[at] = tf.reshape(tf.reshape(found, [-1])[: int(np.prod(sizes))], sizes)
    return [wholes[at] for at in range(len(shards))]


def _gather_at_update(optimizer, shards: Sequence) -> None:
    """Gathers once in as many batches as make an update: a collective may stand in a condition between the replicas."""

    def across(strategy):
        def gather():
            strategy.extended.call_for_each_replica(_gather, args=(shards,))
            return 0

        is_update = optimizer._iterations.value % optimizer.gradient_accumulation_steps == 0  # counted already
        tf.cond(is_update, gather, lambda: 0)

    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        size = sum(shard.shape[0] for shard in shards if shard.dtype == dtype)
        traffic.note([tf.TensorSpec([size], dtype)], part=1 / optimizer.gradient_accumulation_steps)
    with step_context.outside_xla():
        replication.replica_context().merge_call(across)


def _finite_for_all(pieces: list) -> tuple[list, tf.Tensor]:
    """The pieces, one with infinities where any replica has some: what one saw, all skip."""
    values = [p.values if isinstance(p, tf.IndexedSlices) else p for p in pieces if p is not None]
    bad = tf.reduce_any(tf.stack([tf.reduce_any(~tf.math.is_finite(value)) for value in values]))
    (count,) = collectives.sum_small([tf.cast(bad, tf.float32)])
    first = next(at for at, piece in enumerate(pieces) if piece is not None)
    piece = pieces[first]
    more = tf.where(count < 0.5, tf.zeros([], piece.dtype), tf.constant(float("inf"), piece.dtype))
    if isinstance(piece, tf.IndexedSlices):
        pieces[first] = tf.IndexedSlices(piece.values + more, piece.indices, piece.dense_shape)
    else:
        pieces[first] = piece + more
    return pieces, count < 0.5


def _constrain(shard, is_finite: tf.Tensor | None) -> None:
    constraint = shard._tfgpu_constraint if is_fully_sharded(shard) else full_variable(shard).constraint
    if constraint is None:
        return
    copy = layer_state.own(full_variable(shard))
    with tf.device(_device(shard)):
        before = all_gather([copy], [shard])[0] if is_fully_sharded(shard) else tf.convert_to_tensor(copy)
        found = tf.cast(constraint(before), copy.dtype)
        found = local_piece(found, shard) if is_fully_sharded(shard) else found
        copy.assign(found if is_finite is None else tf.where(is_finite, found, copy))

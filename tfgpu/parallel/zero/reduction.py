"""Reduces gradients into shards, and gathers shards: packed into buckets of a few collectives."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgpu.core import collectives, replication, travel
from tfgpu.core.state.sharded_variable import shard_of
from tfgpu.parallel.zero import dealing, owner_exchange, shard_collectives
from tfgpu.parallel.zero.sharding import device_of, full_shape, is_fully_sharded, state_of


def reduce_gradients(optimizer, grads: list, variables: Sequence) -> list:
    """What this replica needs of the sums of gradients over all replicas: pieces, and the whole of what it owns.

    Args:
        optimizer: not a `LossScaleOptimizer`, but the optimizer within it; built.
        grads: this replica's parts, of the shapes of the variables: tensors or IndexedSlices.
        variables: sharded.

    Returns:
        None where there is no gradient, and where the variable is dealt to other replicas.
    """
    shards, found = [shard_of(variable) for variable in variables], list(grads)
    if optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor is not None:  # Keras makes tensors, too
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
    targets = [dealing.target_of(variable) for variable in variables]
    dealt = [at for at, g in enumerate(found) if g is not None and dealing.is_dealt(targets[at])]
    given, owned = [found[at] for at in dealt], [targets[at] for at in dealt]
    for at in dealt:
        found[at] = None
    has_pieces, scatter = is_fully_sharded(shards[0]), state_of(shards[0]).config.stage > 1
    if not has_pieces:
        found = reduce_pieces(found, shards, scatter)
    if dealt and has_pieces:
        wholes = owner_exchange.pieces_to_owners(given, owned)
    else:
        wholes = owner_exchange.sum_at_owners(given, owned, scatter=scatter) if dealt else []
    for at, whole in zip(dealt, wholes, strict=True):
        found[at] = whole
    return found


def reduce_pieces(grads: list, shards: Sequence, scatter: bool) -> list:
    """This replica's pieces of the sums of gradients over all replicas; None stays None.

    Args:
        grads: of the shapes of the variables: tensors or IndexedSlices.
        shards: one for each gradient.
        scatter: send each replica its own pieces alone (reduce-scatter); otherwise all-reduce. IndexedSlices are always
            all-reduced.
    """
    found = list(grads)
    is_whole = [g is not None and (not scatter or isinstance(g, tf.IndexedSlices)) for g in found]
    whole = [at for at, each in enumerate(is_whole) if each]
    sent = [found[at] for at in whole]
    for at, total in zip(whole, collectives.sum_gradients(sent), strict=True):
        found[at] = _local_gradient(total, shards[at])
    rest = [at for at, g in enumerate(found) if g is not None and not is_whole[at]]
    for bucket in _buckets(rest[::-1], found, shards):  # the last layers' gradients are computed first
        with tf.device(device_of(shards[bucket[0]])):
            packed = tf.concat([_rows(found[at], shards[at]) for at in bucket], 1)
            (narrow,) = travel.to_reduce_dtype([packed])
            (total,) = travel.from_reduce_dtype([shard_collectives.reduce_scatter(narrow)], [packed])
            pieces = tf.split(total, [shards[at].shape[0] for at in bucket])
        for at, piece in zip(bucket, pieces, strict=True):
            found[at] = piece
    return found


def local_piece(value, shard) -> tf.Tensor:
    """This replica's piece of a tensor of the variable's shape."""
    return _rows(value, shard)[shard_collectives.replica_id()]


def all_gather(pieces: Sequence, shards: Sequence) -> list[tf.Tensor]:
    """The full tensors of which each replica has a piece, of the shapes of the variables.

    Args:
        pieces: this replica's: tensors or variables of the shapes of the shards.
        shards: one for each piece.
    """
    full = {}
    for bucket in _buckets(range(len(shards)), pieces, shards):
        with tf.device(pieces[bucket[0]].device):
            packed = tf.concat([tf.convert_to_tensor(pieces[at]) for at in bucket], 0)
        device = device_of(shards[bucket[0]])
        rows = shard_collectives.all_gather(packed, device)
        with tf.device(device):
            for at, found in zip(bucket, tf.split(rows, [shards[at].shape[0] for at in bucket], 1), strict=True):
                sizes = full_shape(shards[at])
                full[at] = tf.reshape(tf.reshape(found, [-1])[: int(np.prod(sizes))], sizes)
    return [full[at] for at in range(len(shards))]


def _local_gradient(total, shard):
    """This replica's piece of a gradient that every replica has."""
    if not isinstance(total, tf.IndexedSlices):
        with tf.device(device_of(shard)):
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
    """A tensor of the variable's shape as the pieces of all replicas: [replicas, numbers of a piece]."""
    length, count = int(np.prod(full_shape(shard))), replication.replica_context().num_replicas_in_sync
    flat, size = tf.reshape(tf.convert_to_tensor(value), [length]), shard.shape[0]
    if count * size > length:
        flat = tf.pad(flat, [[0, count * size - length]])
    return tf.reshape(flat, [count, size])


def _buckets(places: Sequence[int], values: Sequence, shards: Sequence) -> list[list[int]]:
    """Groups the positions of values that go into one collective: of one dtype, on one device, up to a size."""
    found, open_buckets, count = [], {}, replication.replica_context().num_replicas_in_sync
    for at in places:
        key = values[at].dtype, device_of(shards[at])
        bucket, size = open_buckets.get(key, (None, 0))
        more = values[at].dtype.size * shards[at].shape[0] * count
        if bucket is None or size + more > collectives.PACK_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(at)
        open_buckets[key] = bucket, size + more
    return found

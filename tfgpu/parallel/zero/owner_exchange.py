"""Moves gradients and values between replicas and the owners of dealt variables, packed into buckets.

Each replica packs one row for each owner. In stages 1 and 2 a row holds whole gradients, which are summed on the way
(reduce-scatter), and each owner sends its variables to all (all-gather). In stage 3 a row holds this replica's pieces
of the owner's variables, and back go the owner's pieces for each replica (all-to-all).
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.core import collectives, replication, travel
from tfgpu.parallel.zero import shard_collectives
from tfgpu.parallel.zero.dealing import flat_of, owners_of
from tfgpu.parallel.zero.sharding import device_of, full_shape, state_of

Bucket = list[list[int]]
"""For each replica, positions of the variables of which its row holds something."""


def this_replica() -> int:
    """This replica's number among all, which is known when a step is traced."""
    return int(tf.get_static_value(shard_collectives.replica_id()))


def is_held(target) -> bool:
    """Whether this replica updates a dealt variable."""
    return this_replica() in owners_of(target)


def sum_at_owners(parts: Sequence, targets: Sequence, *, scatter: bool) -> list:
    """The sums of gradients over all replicas, each on the owners of its variable; None elsewhere.

    Args:
        parts: this replica's, of the shapes of the variables: tensors or IndexedSlices.
        targets: the dealt shards, one for each.
        scatter: send each owner its own alone; otherwise all-reduce. IndexedSlices are always all-reduced.
    """
    found: list = [None] * len(parts)
    is_whole = [not scatter or isinstance(part, tf.IndexedSlices) for part in parts]
    whole = [at for at, each in enumerate(is_whole) if each]
    for at, total in zip(whole, collectives.sum_gradients([parts[at] for at in whole]), strict=True):
        found[at] = total if is_held(targets[at]) else None
    rest = [at for at, each in enumerate(is_whole) if not each]
    for bucket, device, dtype in _buckets(rest, parts, targets, owners_of):
        with tf.device(device):
            rows = _rows(bucket, dtype, lambda at: tf.reshape(tf.convert_to_tensor(parts[at]), [-1]))
            (narrow,) = travel.to_reduce_dtype([rows])
            (total,) = travel.from_reduce_dtype([shard_collectives.reduce_scatter(narrow)], [rows])
            for at, value in _values_in(total, bucket[this_replica()], targets, _size):
                found[at] = tf.reshape(value, full_shape(targets[at]))
    return found


def send_from_owners(values: Sequence, targets: Sequence) -> list[tf.Tensor]:
    """The full values of dealt variables, on every replica.

    Args:
        values: on a variable's first owner its value; anything of the same dtype elsewhere.
        targets: the dealt shards, one for each.
    """
    found: list = [None] * len(values)
    for bucket, device, dtype in _buckets(range(len(values)), values, targets, _sender):
        with tf.device(device):
            own = [tf.reshape(tf.convert_to_tensor(values[at]), [-1]) for at in bucket[this_replica()]]
            row = _padded(own, max(sum(_size(targets[at]) for at in held) for held in bucket), dtype)
        rows = shard_collectives.all_gather(row, device)
        with tf.device(device):
            for replica, held in enumerate(bucket):
                for at, value in _values_in(rows[replica], held, targets, _size):
                    found[at] = tf.reshape(value, full_shape(targets[at]))
    return found


def pieces_to_owners(pieces: Sequence, targets: Sequence) -> list:
    """The full values of which each replica has a piece, each on the owners of its variable; None elsewhere.

    Args:
        pieces: this replica's: tensors or variables of the shapes of the flat shards, or IndexedSlices.
        targets: the dealt shards, one for each.
    """
    found: list = [None] * len(pieces)
    for at, piece in enumerate(pieces):
        if isinstance(piece, tf.IndexedSlices):
            total = _whole_slices(piece, targets[at])
            found[at] = total if is_held(targets[at]) else None
    dense = [at for at, piece in enumerate(pieces) if not isinstance(piece, tf.IndexedSlices)]
    for bucket, device, dtype in _buckets(dense, pieces, targets, owners_of):
        with tf.device(device):
            rows = _rows(bucket, dtype, lambda at: tf.convert_to_tensor(pieces[at]))
        rows = shard_collectives.all_to_all(rows, device)
        with tf.device(device):
            for at, value in _values_in(rows, bucket[this_replica()], targets, _piece_size):
                found[at] = tf.reshape(tf.reshape(value, [-1])[: _size(targets[at])], full_shape(targets[at]))
    return found


def pieces_from_owners(values: Sequence, targets: Sequence) -> list[tf.Tensor]:
    """This replica's pieces of dealt variables.

    Args:
        values: as for `send_from_owners`.
        targets: the dealt shards, one for each.
    """
    found: list = [None] * len(values)
    count = replication.replica_context().num_replicas_in_sync
    for bucket, device, dtype in _buckets(range(len(values)), values, targets, _sender):
        with tf.device(device):
            own = [_cut(values[at], targets[at], count) for at in bucket[this_replica()]]
            row = _padded(own, max(sum(_piece_size(targets[at]) for at in held) for held in bucket), dtype, [count])
        rows = shard_collectives.all_to_all(row, device)
        with tf.device(device):
            for replica, held in enumerate(bucket):
                for at, value in _values_in(rows[replica], held, targets, _piece_size):
                    found[at] = value
    return found


def _sender(target) -> tuple[int, ...]:
    return owners_of(target)[:1]


def _size(target) -> int:
    return int(np.prod(full_shape(target)))


def _piece_size(target) -> int:
    return flat_of(target).shape[0]


def _buckets(
    places: Sequence[int], values: Sequence, targets: Sequence, holders: Callable
) -> Iterator[tuple[Bucket, str, tf.DType]]:
    """Groups the positions of values that go into one collective, with this replica's device of them and their dtype.

    Each row of a bucket takes up to the size of its largest value, or a replica's part of `PACK_BYTES`, so that little
    is padded.
    """
    count = replication.replica_context().num_replicas_in_sync
    groups: dict = {}
    for at in places:
        groups.setdefault((values[at].dtype, state_of(targets[at]).placement.devices), []).append(at)
    for (dtype, _), group in groups.items():
        size_of = {at: dtype.size * _size(targets[at]) for at in group}
        by_size = sorted(group, key=lambda at: -size_of[at])
        left = [[at for at in by_size if replica in holders(targets[at])] for replica in range(count)]
        while any(left):
            most = max(collectives.PACK_BYTES // count, *(size_of[queue[0]] for queue in left if queue))
            yield [_take(queue, size_of, most) for queue in left], device_of(targets[group[0]]), dtype


def _take(queue: list[int], size_of: dict[int, int], most: int) -> list[int]:
    """Takes values from the front of a queue, up to a size together."""
    taken, total = [], 0
    while queue and total + size_of[queue[0]] <= most:
        total += size_of[queue[0]]
        taken.append(queue.pop(0))
    return taken


def _rows(bucket: Bucket, dtype: tf.DType, flat: Callable) -> tf.Tensor:
    """A row for each replica: [replicas, numbers]."""
    rows = [[flat(at) for at in held] for held in bucket]
    length = max(sum(value.shape[0] for value in row) for row in rows)
    return tf.stack([_padded(row, length, dtype) for row in rows])


def _padded(values: list, length: int, dtype: tf.DType, lead: Sequence[int] = ()) -> tf.Tensor:
    """Values side by side along their last axis, then zeros."""
    more = length - sum(value.shape[-1] for value in values)
    return tf.concat([*values, tf.zeros([*lead, more], dtype)], -1)


def _values_in(row: tf.Tensor, held: list[int], targets: Sequence, size_of: Callable) -> list[tuple[int, tf.Tensor]]:
    """The values of a row, along its last axis, with their positions."""
    ends = np.cumsum([0, *(size_of(targets[at]) for at in held)])
    return [(at, row[..., start:stop]) for at, start, stop in zip(held, ends, ends[1:], strict=False)]


def _cut(value, target, count: int) -> tf.Tensor:
    """A value as the pieces of all replicas: [replicas, numbers of a piece]."""
    size, length = _piece_size(target), _size(target)
    flat = tf.reshape(tf.convert_to_tensor(value), [length])
    return tf.reshape(tf.pad(flat, [[0, count * size - length]]), [count, size])


def _whole_slices(piece: tf.IndexedSlices, target) -> tf.IndexedSlices:
    """Slices of a variable, of which each replica has those numbers that lie in its piece, and zeros for the others.

    A number at the beginning of a piece that is 0 cannot be told from those that lie elsewhere. The place of its row is
    known from the row's other numbers; where a row has one number only, a slice of 0 changes nothing at any place.
    """
    sizes, size = full_shape(target), _piece_size(target)
    width, places = max(1, int(np.prod(sizes[1:]))), tf.cast(piece.indices, tf.int64)
    is_own = (places != 0) | (piece.values != 0)
    places = tf.where(is_own, places + this_replica() * size, tf.zeros_like(places))
    values, places = collectives.all_reduce([piece.values, places])
    rows = tf.reduce_max(tf.reshape(places, [-1, width]), 1) // width
    return tf.IndexedSlices(tf.reshape(values, [-1, *sizes[1:]]), rows, tf.constant(sizes, tf.int64))

"""Merges what one device has merged, and replicas hold apart, of the gradient of a table.

Keras's optimizers square each slice of a gradient before they add up those of one index. So how many slices there are
is part of the result: a lookup by position (`table(ops.arange(5))`) must end with one slice for each position, and one
by `tf.unique(ids)` with one for each number of the batch.
"""

import logging
from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core.sparse.index_origin import Origin
from tfgpu.core.sparse.lookups import Lookup, lookups_of, static_rows

_log = logging.getLogger(__name__)


def sum_merged(gradients: list, add: Callable[[list], list]) -> list:
    """Sums gradients over replicas: what lookups of one table have alike by index, the slices of rows as a list.

    Args:
        gradients: this replica's tensors, IndexedSlices or None.
        add: sums tensors over replicas, and lists the slices of all.
    """
    rows = static_rows()
    parts = [[_Tensor(each)] if not isinstance(each, tf.IndexedSlices) else _parts_of(each, rows) for each in gradients]
    sums = iter(add([part.sent for each in parts for part in each]))
    return [_together([part.received(next(sums)) for part in each]) for each in parts]


def of_parts(parts: list[tf.IndexedSlices], rows: list) -> tf.IndexedSlices:
    """The gradient of a batch from those of its parts, as micro-batches are: what is alike in all is summed by index.

    Args:
        parts: of one table.
        rows: of each part: an int, or what is not known before the step runs.
    """
    found = [_parts_of(each, held if isinstance(held, int) else None) for each, held in zip(parts, rows, strict=True)]
    if any([type(part) for part in each] != [type(part) for part in found[0]] for each in found):
        return _together(parts)
    columns = zip(*found, strict=True)
    return _together([column[0].received(_added([each.sent for each in column])) for column in columns])


def _added(values: list):
    return _together(values) if isinstance(values[0], tf.IndexedSlices) else tf.add_n(values)


class _Tensor:
    """A gradient that is summed as it is."""

    def __init__(self, sent):
        self.sent = sent

    def received(self, total):
        """What the sum, or the slices of all replicas, mean for the gradient."""
        return total


class _Alike(_Tensor):
    """Slices whose indices all replicas have: their values are summed."""

    def __init__(self, slices: tf.IndexedSlices):
        super().__init__(slices.values)
        self._slices = slices

    def received(self, total):
        return tf.IndexedSlices(total, self._slices.indices, self._slices.dense_shape)


class _Unique(_Tensor):
    """Slices of which a replica has one for each index."""

    def received(self, total):
        indices, places = tf.unique(total.indices)
        values = tf.math.unsorted_segment_sum(total.values, places, tf.size(indices))
        return tf.IndexedSlices(values, indices, total.dense_shape)


_WAYS = {Origin.ALIKE: _Alike, Origin.UNIQUE: _Unique, Origin.ROWS: _Tensor, Origin.UNKNOWN: _Tensor}


def _parts_of(slices: tf.IndexedSlices, rows: int | None) -> list[_Tensor]:
    """The parts in which a gradient is summed: the lookups that are alike, those by numbers of their own, the rest."""
    found = lookups_of(slices.indices, rows)
    _tell(slices, found)
    ways = [_WAYS[each.origin] for each in found]
    if len(found) == 1 or set(ways) == {_Tensor}:
        return [ways[0](slices)]
    pieces = list(zip(_split(slices.values, found), _indices(slices.indices, found), strict=True))
    by_way = {way: [at for at, each in enumerate(ways) if each is way] for way in (_Alike, _Tensor)}
    groups = [(way, places) for way, places in by_way.items() if places]
    groups += [(_Unique, [at]) for at, way in enumerate(ways) if way is _Unique]
    return [way(_joined([pieces[at] for at in places], slices.dense_shape)) for way, places in groups]


def _split(value: tf.Tensor, lookups: list[Lookup]) -> list[tf.Tensor]:
    counts = [each.count for each in lookups]
    are_known = all(isinstance(count, int) for count in counts)
    pieces = tf.split(value, counts if are_known else tf.stack(counts))
    sizes = [[count if isinstance(count, int) else None, *value.shape[1:]] for count in counts]
    return [tf.ensure_shape(piece, size) for piece, size in zip(pieces, sizes, strict=True)]


def _indices(vector: tf.Tensor, lookups: list[Lookup]) -> list[tf.Tensor]:
    """The lookups' indices; a split of the whole vector would be work on the host."""
    if any(each.indices is None for each in lookups):
        return _split(vector, lookups)
    return [each.indices for each in lookups]


def _joined(pieces: list[tuple], dense_shape) -> tf.IndexedSlices:
    columns = map(list, zip(*pieces, strict=True))
    values, indices = (column[0] if len(column) == 1 else tf.concat(column, 0) for column in columns)
    return tf.IndexedSlices(values, indices, dense_shape)


def _together(parts: list):
    if len(parts) == 1:
        return parts[0]
    return _joined([(each.values, each.indices) for each in parts], parts[0].dense_shape)


def _tell(slices: tf.IndexedSlices, lookups: list[Lookup]) -> None:
    """One line for a table of which it is not known whether it is looked up by rows."""
    shape = "x".join(map(str, slices.values.shape[1:])) or "single numbers"
    told = vars(slots.of(tf.distribute.get_strategy())).setdefault("lookups_told", set())
    for each in lookups:
        if (each.origin, shape) in told or (each.is_certain and each.origin is not Origin.UNKNOWN):
            continue
        told.add((each.origin, shape))
        _log.warning(_WORDS[each.origin] + " " + _OTHERWISE, shape)


_WORDS = {
    Origin.ALIKE: (
        "A table with rows of %s is looked up by constant indices, in batches of one row per replica. tfgpu assumes "
        "that all rows share these indices. If each row has its own, compute them from a row (`indices + 0 * ids`)."
    ),
    Origin.ROWS: (
        "A table with rows of %s is looked up by as many equal indices as a replica has rows. tfgpu assumes one index "
        "per row. If all rows share these indices, give them a first axis of 1 (`indices[None]`)."
    ),
    Origin.UNKNOWN: (
        "A table with rows of %s is looked up by indices that may depend on the rows of the batch; tfgpu assumes that "
        "they do. If they are positions, look them up outside conditions, loops and `run_eagerly`."
    ),
}
_OTHERWISE = "Otherwise optimizers that square gradients, such as Adam, give a different result than on one device."

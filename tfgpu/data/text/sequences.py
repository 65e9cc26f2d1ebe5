"""Batches of variable-length sequences: bucketed by length, or packed into rows of one length.

| | `bucket` | `pack` |
|---|---|---|
| a row | one sequence, padded to its bucket's length | several concatenated sequences |
| shapes | one per bucket | one |
| the model | must use `padding_mask` | must separate the sequences of a row (`segment_mask`) |

Both read each sequence once per epoch, in an order that depends only on `(seed, epoch)`.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.data.feed import Feed, by_rows, rows_of
from tfgpu.data.position import of_rows
from tfgpu.errors import InputError, unknown, whole_number

NEXT = "next"
IGNORED = -100
"""The target of an ignored token, as in `transformers`."""
PACKED = ("token_ids", "segment_ids", "positions")
_SHORTEST = 16  # the first of the default buckets


@dataclass(frozen=True)
class Sequences(position.Epochs):
    """Batches of sequences.

    Attributes:
        train: one iteration is one epoch; each new iteration starts the next epoch (see `seek`, `peek`). Batches are
            `(x, y)`, or `(x, y, sample_weight)` if y has a target per token: the weight of padding is 0.
        examples: the number of sequences in an epoch.
        rows: the number of rows that they fill.
        steps_per_epoch: batches in an epoch.
        filled: the share of all positions that hold a token.
    """

    train: tf.data.Dataset
    examples: int
    rows: int
    steps_per_epoch: int
    filled: float
    _counter: position.Counter = field(repr=False)


def bucket(
    sequences: Any,
    targets: Any,
    *,
    global_batch: int,
    boundaries: Sequence[int] | None = None,
    seed: int = 0,
    shuffle: bool = True,
    feed: Feed | None = None,
) -> Sequences:
    """Batches sequences of similar length and pads them to the bucket's length.

    Args:
        sequences: n sequences of token numbers: lists, arrays or a `tf.RaggedTensor`.
        targets: `"next"`: the next token of each; a sequence of the same length for each, in which -100 is a token that
            does not count; or [n], one target each.
        global_batch: sequences in a batch; the last one of each bucket may be smaller.
        boundaries: the largest length of each bucket, increasing. Default: 16, 32, 64 and so on.
        seed: determines the order of every epoch.
        shuffle: False keeps the sequences' order within a bucket, and the buckets' order.
        feed: how batches are prepared ahead of training.

    Returns:
        Batches whose x is `{"token_ids": int32 [batch, length], "padding_mask": bool [batch, length]}`.

    Raises:
        InputError: no sequences, empty ones, one longer than the last boundary, or targets that do not match.

    Example:
        >>> data = bucket([[1, 2, 3], [4], [5, 6], [7, 8, 9, 1]], [0, 1, 0, 1], global_batch=2, boundaries=[2, 4])
        >>> sorted(x["token_ids"].shape[1] for x, y in data.train), data.filled
        ([2, 4], 0.8333333333333334)
    """
    tokens = _Tokens(sequences, targets)
    whole_number("global_batch", global_batch)
    if boundaries is None:
        boundaries = doubling(int(tokens.lengths.max()))
    else:
        boundaries = increasing("boundaries", boundaries)
        tokens.check_longest(int(boundaries[-1]), "boundaries")
    which = np.searchsorted(boundaries, tokens.lengths)
    # The start of each batch among the sequences sorted by bucket; the same in all epochs.
    sizes = np.bincount(which, minlength=len(boundaries))
    batches = np.array(
        [
            (first + start, min(global_batch, size - start), length)
            for first, size, length in zip(np.cumsum(sizes) - sizes, sizes, boundaries, strict=True)
            for start in range(0, size, global_batch)
        ],
        np.int64,
    )
    steps, padded = len(batches), int((batches[:, 1] * batches[:, 2]).sum())
    places = batches[:, :1] + np.arange(min(global_batch, len(which)))[None, :]
    places = np.minimum(places, len(which) - 1)  # only the first `counts` of a row are used
    bucket_of, firsts, counts, lengths = map(position.on_cpu, (which, places, batches[:, 1], batches[:, 2]))

    def rows(epoch):
        drawn = tf.range(len(which), dtype=tf.int64)
        turns = tf.range(steps, dtype=tf.int64)
        if shuffle:
            drawn = position.order(drawn, seed=seed, epoch=epoch)
            turns = position.order(turns, seed=seed, epoch=epoch, of="batches")
        by_bucket = tf.gather(drawn, tf.argsort(tf.gather(bucket_of, drawn), stable=True))
        return tf.gather(by_bucket, tf.gather(firsts, turns)), tf.gather(counts, turns), tf.gather(lengths, turns)

    def fetch(row, count, length, own=None):
        x, mask, y, weight = tokens.padded(of_rows(row[:count], own), length)
        x = {"token_ids": x, "padding_mask": mask}
        return (x, y) if weight is None else (x, y, weight)

    facts = {"examples": len(which), "rows": len(which), "filled": len(tokens.values) / padded}
    return made(rows, fetch, lambda row, count, length: count, steps, feed, **facts)


def pack(
    sequences: Any,
    targets: Any = NEXT,
    *,
    length: int,
    global_batch: int,
    names: Sequence[str] = PACKED,
    seed: int = 0,
    shuffle: bool = True,
    feed: Feed | None = None,
) -> Sequences:
    """Packs several sequences into each row of one length, which minimizes padding.

    The packing is computed once (best fit decreasing); epochs differ in the order of the rows.

    Args:
        sequences: n sequences of token numbers: lists, arrays or a `tf.RaggedTensor`.
        targets: `"next"`: the next token of each (never another sequence's), or a sequence of the same length for each,
            in which -100 is a token that does not count.
        length: tokens in a row.
        global_batch: rows in a batch; the last one may be smaller.
        names: which of the three arrays x has.
        seed: determines the order of every epoch.
        shuffle: False keeps the order of the packing.
        feed: how batches are prepared ahead of training.

    Returns:
        Batches `(x, y, sample_weight)`. x has, all int32 [batch, length], `token_ids`; `segment_ids`, which number the
        sequences of a row from 1, with 0 for padding; and `positions`, from 0 in each sequence.

    Raises:
        InputError: no sequences, empty ones, one longer than `length`, or targets that do not match.

    Example:
        >>> data = pack([[1, 2, 3], [4, 5], [6]], length=6, global_batch=1)
        >>> x, y, weight = next(iter(data.train))
        >>> x["token_ids"].numpy().tolist(), x["segment_ids"].numpy().tolist()
        ([[1, 2, 3, 4, 5, 6]], [[1, 1, 1, 2, 2, 3]])
        >>> y.numpy().tolist(), weight.numpy().tolist()
        ([[2, 3, 0, 5, 0, 0]], [[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    """
    tokens = _Tokens(sequences, targets)
    if tokens.one_each:
        raise InputError("pack() needs a target per token. Received: one per sequence. Use bucket().")
    for name in names:
        if name not in PACKED:
            raise unknown("name of an array", name, PACKED)
    whole_number("global_batch", global_batch)
    tokens.check_longest(length, "length")
    row_of, offset, segment = _best_fit(tokens.lengths, length)
    count = int(row_of.max()) + 1
    packed = {name: np.zeros([count, length], np.int32) for name in (*PACKED, "y")}
    weight = np.zeros([count, length], np.float32)
    within = np.arange(len(tokens.values)) - np.repeat(tokens.starts, tokens.lengths)
    at = np.repeat(row_of, tokens.lengths), np.repeat(offset, tokens.lengths) + within
    packed["token_ids"][at], packed["positions"][at] = tokens.values, within
    packed["segment_ids"][at] = np.repeat(segment, tokens.lengths)
    packed["y"][at], weight[at] = tokens.targets, tokens.weights
    arrays, weights = {name: position.on_cpu(packed[name]) for name in (*names, "y")}, position.on_cpu(weight)

    def fetch(epoch, start, row, own=None):
        row = of_rows(row[: count - start], own)
        x = {name: tf.gather(array, row) for name, array in arrays.items()}
        return x, x.pop("y"), tf.gather(weights, row)

    rows, total = dealt(count, global_batch, seed, shuffle)
    facts = {"examples": len(tokens.lengths), "rows": count, "filled": len(tokens.values) / (count * length)}
    return made(rows, fetch, total, -(-count // global_batch), feed, **facts)


def segment_mask(segment_ids: tf.Tensor, *, causal: bool = False) -> tf.Tensor:
    """Masks attention between different sequences of a row.

    Args:
        segment_ids: int [batch, length], as returned by `pack`; 0 is padding, which attends only to itself, so that no
            row of the softmax is empty.
        causal: attend only to the same and earlier positions.

    Returns:
        bool [batch, length, length] for `keras.layers.MultiHeadAttention(...)(..., attention_mask=...)`.

    Example:
        >>> segment_mask(tf.constant([[1, 1, 2, 0]]), causal=True).numpy().astype(int).tolist()
        [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    """
    own, other = segment_ids[:, :, None], segment_ids[:, None, :]
    places = tf.range(tf.shape(segment_ids)[1])
    mask = ((own == other) & (own > 0)) | (places[:, None] == places[None, :])
    return mask & (places[:, None] >= places[None, :]) if causal else mask


class _Tokens:
    """All tokens concatenated, with their targets and the start of each sequence."""

    def __init__(self, sequences, targets):
        self.values, self.lengths = _flat(sequences, "sequences")
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.one_each = False
        self.weights = np.ones(len(self.values), np.float32)
        if isinstance(targets, str):
            if targets != NEXT:
                raise InputError(f"`targets` must be 'next' or arrays. Received: {targets!r}.")
            last = self.starts + self.lengths - 1
            self.targets = np.append(self.values[1:], 0)
            self.targets[last], self.weights[last] = 0, 0.0
        elif isinstance(targets, tf.RaggedTensor) or np.ndim(targets[0]):
            self.targets, lengths = _flat(targets, "targets")
            if len(lengths) != len(self.lengths) or (lengths != self.lengths).any():
                raise InputError("Each of `targets` must be as long as its sequence. Received: different lengths.")
            is_ignored = self.targets == IGNORED
            self.targets[is_ignored], self.weights[is_ignored] = 0, 0.0
        else:
            self.targets, self.one_each = np.asarray(targets), True
            if len(self.targets) != len(self.lengths):
                raise InputError(
                    f"`targets` must have one entry per sequence. Received: {len(self.targets)} for "
                    f"{len(self.lengths)} sequences."
                )
        names = ("values", "lengths", "starts", "targets", "weights")
        self._tensors = {name: position.on_cpu(getattr(self, name)) for name in names}

    def check_longest(self, length: int, name: str) -> None:
        longest = int(self.lengths.max())
        if whole_number(name, length) < longest:
            raise InputError(
                f"`{name}` must be at least the length of the longest sequence. Received: {length!r}, but sequence "
                f"{int(self.lengths.argmax())} has {longest} tokens. Increase it, or truncate the sequence."
            )

    def padded(self, index: tf.Tensor, length: tf.Tensor):
        """Returns the sequences' tokens, mask, targets and weights, padded to `length`; no weights if `one_each`."""
        own = {name: tf.gather(self._tensors[name], index) for name in ("starts", "lengths")}
        places = tf.range(length)[None, :]
        mask = places < own["lengths"][:, None]
        flat = tf.minimum(own["starts"][:, None] + places, len(self.values) - 1)

        def pick(name):
            found = tf.gather(self._tensors[name], flat)
            return tf.where(mask, found, tf.zeros_like(found))

        if self.one_each:
            return pick("values"), mask, tf.gather(self._tensors["targets"], index), None
        return pick("values"), mask, pick("targets"), pick("weights")


def _flat(sequences, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates sequences: int32 values, int64 lengths."""
    if isinstance(sequences, tf.RaggedTensor):
        sequences = sequences.to_list()
    parts = [np.asarray(part) for part in sequences]
    if not parts:
        raise InputError(f"`{name}` must have at least one sequence. Received: none.")
    for i, part in enumerate(parts):
        if part.ndim != 1 or not len(part) or part.dtype.kind not in "iu":
            raise InputError(
                f"`{name}` must be non-empty sequences of whole numbers. Received: {part.dtype} of shape "
                f"{part.shape} as sequence {i} (the first is 0)."
            )
    return np.concatenate(parts).astype(np.int32), np.array([len(part) for part in parts], np.int64)


def doubling(longest: int) -> np.ndarray:
    """Returns 16, 32, 64 and so on, up to the first that is at least `longest`."""
    return _SHORTEST * 2 ** np.arange(max(0, int(np.ceil(np.log2(longest / _SHORTEST)))) + 1)


def increasing(name: str, values: Sequence[int]) -> np.ndarray:
    """Returns an array of increasing whole numbers; raises `InputError` for anything else."""
    found = np.asarray(values)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu" or (np.diff(found) <= 0).any():
        raise InputError(f"`{name}` must be increasing whole numbers. Received: {values!r}. Try [32, 64, 128].")
    return found


def _best_fit(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places each sequence, the longest first, in the row with the least room that suffices.

    Returns:
        For each sequence its row, its offset in the row, and its number in the row, from 1.
    """
    row, offset, segment = (np.zeros(len(lengths), np.int64) for _ in range(3))
    by_room: dict[int, list[int]] = {}  # room -> rows with exactly that room
    rooms: list[int] = []  # the keys of `by_room`, increasing
    held: list[int] = []  # sequences in each row
    for i in np.argsort(-lengths, kind="stable"):
        size = int(lengths[i])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            number, room = len(held), length
            held.append(0)
        else:
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        held[number] += 1
        row[i], offset[i], segment[i] = number, length - room, held[number]
        left = room - size
        if left:
            if left not in by_room:
                bisect.insort(rooms, left)
            by_room.setdefault(left, []).append(number)
    return row, offset, segment


def dealt(count: int, global_batch: int, seed: int, shuffle: bool) -> tuple[Callable, Callable]:
    """`rows` and `total` of `feed.by_rows`, for batches of consecutive rows in an epoch's order."""

    def rows(epoch):
        drawn = tf.range(count, dtype=tf.int64)
        return rows_of(epoch, position.order(drawn, seed=seed, epoch=epoch) if shuffle else drawn, count, global_batch)

    def total(epoch, start, row):
        return tf.minimum(count - start, global_batch)

    return rows, total


def made(
    describe: Callable, fetch: Callable, total: Callable, steps: int, feed: Feed | None, **facts: Any
) -> Sequences:
    """Batches as `feed.by_rows` makes them, with a counter of their epochs."""
    counter = position.Counter()
    train = by_rows(counter, describe, fetch, total, steps, feed or Feed())
    return Sequences(train, steps_per_epoch=steps, _counter=counter, **facts)

"""Sequences of different lengths in batches: by buckets of similar lengths, or packed into rows of one length.

| | `bucket` | `pack` |
|---|---|---|
| a row | one sequence, padded to its bucket's length | several sequences one after the other |
| shapes | one for each bucket | one |
| the model | must know `padding_mask` | must keep the sequences of a row apart (`attention_mask`) |

Both read each sequence once an epoch, in an order of `(seed, epoch)` alone.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.data.feed import Feed, by_rows, rows_of
from tfgpu.errors import InputError

NEXT = "next"
_SHORTEST = 16  # the first of the buckets that are chosen for the user


@dataclass(frozen=True)
class Sequences(position.Epochs):
    """Batches of sequences.

    Attributes:
        train: one iteration is one epoch; each start of an iteration takes the next epoch (see `seek`, `peek`).
            Batches are `(x, y)`, or `(x, y, sample_weight)` where y has a target a token: 0 stands for padding.
        examples: how many sequences an epoch holds.
        rows: how many rows they take.
        steps_per_epoch: batches in an epoch.
        filled: the share of all places that hold a token.
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
    """Puts sequences of similar length into one batch and pads them to the bucket's length.

    Args:
        sequences: n sequences of token numbers: lists, arrays or a `tf.RaggedTensor`.
        targets: `"next"`: the next token of each; one sequence as long for each; or [n], one target each.
        global_batch: sequences in a batch; the last one of each bucket may be smaller.
        boundaries: the greatest length of each bucket, rising. Left out: 16, 32, 64 and so on.
        seed: decides the order of every epoch.
        shuffle: False keeps the sequences' order within a bucket, and the buckets' order.
        feed: how far ahead of the training batches are made.

    Returns:
        Batches whose x is `{"token_ids": int32 [batch, length], "padding_mask": bool [batch, length]}`.

    Raises:
        InputError: no sequences, empty ones, one longer than the last boundary, or targets that do not fit.

    Example:
        >>> data = bucket([[1, 2, 3], [4], [5, 6], [7, 8, 9, 1]], [0, 1, 0, 1], global_batch=2, boundaries=[2, 4])
        >>> sorted(x["token_ids"].shape[1] for x, y in data.train), data.filled
        ([2, 4], 0.8333333333333334)
    """
    tokens = _Tokens(sequences, targets)
    _check_batch(global_batch)
    boundaries = _boundaries(boundaries, tokens)
    which = np.searchsorted(boundaries, tokens.lengths)
    plan = _Plan(which, boundaries, global_batch)
    with tf.device("CPU:0"):
        bucket_of, firsts = tf.constant(which), tf.constant(plan.places)
        counts, lengths = tf.constant(plan.counts), tf.constant(plan.lengths)

    def rows(epoch):
        drawn = tf.range(len(which), dtype=tf.int64)
        turns = tf.range(plan.steps, dtype=tf.int64)
        if shuffle:
            drawn = position.order(drawn, seed=seed, epoch=epoch)
            turns = position.order(turns, seed=seed, epoch=epoch, of="batches")
        by_bucket = tf.gather(drawn, tf.argsort(tf.gather(bucket_of, drawn), stable=True))
        return tf.gather(by_bucket, tf.gather(firsts, turns)), tf.gather(counts, turns), tf.gather(lengths, turns)

    def fetch(row, count, length):
        x, mask, y, weight = tokens.padded(row[:count], length)
        x = {"token_ids": x, "padding_mask": mask}
        return (x, y) if weight is None else (x, y, weight)

    return _made(tokens, rows, fetch, plan.steps, len(which), plan.padded, feed)


def pack(
    sequences: Any,
    targets: Any = NEXT,
    *,
    length: int,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    feed: Feed | None = None,
) -> Sequences:
    """Puts several sequences into each row of one length, so that little is padded.

    Which sequences share a row is found once (best fit, the longest first); epochs differ in the rows' order.

    Args:
        sequences: n sequences of token numbers: lists, arrays or a `tf.RaggedTensor`.
        targets: `"next"`: the next token of each (never another sequence's), or one sequence as long for each.
        length: tokens in a row.
        global_batch: rows in a batch; the last one may be smaller.
        seed: decides the order of every epoch.
        shuffle: False keeps the order that the packing gave.
        feed: how far ahead of the training batches are made.

    Returns:
        Batches `(x, y, sample_weight)`. x holds, all int32 [batch, length], `token_ids`; `segment_ids`, which
        counts the sequences of a row from 1, 0 being padding; and `positions`, from 0 in each sequence.

    Raises:
        InputError: no sequences, empty ones, one longer than `length`, or targets that do not fit.

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
        raise InputError("pack() needs a target for each token. Received: one for each sequence. Use bucket().")
    _check_batch(global_batch)
    tokens.check_longest(length, "length")
    row_of, offset, segment = _best_fit(tokens.lengths, length)
    count = int(row_of.max()) + 1
    packed = {name: np.zeros([count, length], np.int32) for name in ("token_ids", "segment_ids", "positions", "y")}
    weight = np.zeros([count, length], np.float32)
    within = np.arange(len(tokens.values)) - np.repeat(tokens.starts, tokens.lengths)
    at = np.repeat(row_of, tokens.lengths), np.repeat(offset, tokens.lengths) + within
    packed["token_ids"][at], packed["positions"][at] = tokens.values, within
    packed["segment_ids"][at] = np.repeat(segment, tokens.lengths)
    packed["y"][at], weight[at] = tokens.targets, tokens.weights
    with tf.device("CPU:0"):
        arrays, weights = {name: tf.constant(a) for name, a in packed.items()}, tf.constant(weight)

    def rows(epoch):
        drawn = tf.range(count, dtype=tf.int64)
        drawn = position.order(drawn, seed=seed, epoch=epoch) if shuffle else drawn
        return rows_of(epoch, drawn, count, global_batch)

    def fetch(epoch, start, row):
        row = row[: count - start]
        x = {name: tf.gather(array, row) for name, array in arrays.items()}
        return x, x.pop("y"), tf.gather(weights, row)

    return _made(tokens, rows, fetch, -(-count // global_batch), count, count * length, feed)


def attention_mask(segment_ids: tf.Tensor, *, causal: bool = False) -> tf.Tensor:
    """Says which places may attend to which: those of the same sequence.

    Args:
        segment_ids: int [batch, length], as `pack` makes them; 0 is padding, which attends to itself alone, so
            that no row of the softmax is empty.
        causal: only to earlier places and oneself.

    Returns:
        bool [batch, length, length] for `keras.layers.MultiHeadAttention(...)(..., attention_mask=...)`.

    Example:
        >>> attention_mask(tf.constant([[1, 1, 2, 0]]), causal=True).numpy().astype(int).tolist()
        [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    """
    own, other = segment_ids[:, :, None], segment_ids[:, None, :]
    places = tf.range(tf.shape(segment_ids)[1])
    mask = ((own == other) & (own > 0)) | (places[:, None] == places[None, :])
    return mask & (places[:, None] >= places[None, :]) if causal else mask


class _Tokens:
    """All tokens one after the other, with their targets and where each sequence begins."""

    def __init__(self, sequences, targets):
        self.values, self.lengths = _flat(sequences, "sequences")
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.one_each = False
        self.weights = np.ones(len(self.values), np.float32)
        if isinstance(targets, str):
            if targets != NEXT:
                raise InputError(f"`targets` must be 'next' or targets. Received: {targets!r}.")
            last = self.starts + self.lengths - 1
            self.targets = np.append(self.values[1:], 0)
            self.targets[last], self.weights[last] = 0, 0.0
        elif isinstance(targets, tf.RaggedTensor) or np.ndim(targets[0]):
            self.targets, lengths = _flat(targets, "targets")
            if len(lengths) != len(self.lengths) or (lengths != self.lengths).any():
                raise InputError("`targets` must be as long as the sequences, each as its own. Received: others.")
        else:
            self.targets, self.one_each = np.asarray(targets), True
            if len(self.targets) != len(self.lengths):
                raise InputError(
                    f"`targets` must have one for each sequence. Received: {len(self.targets)} for {len(self.lengths)}."
                )
        with tf.device("CPU:0"):
            names = ("values", "lengths", "starts", "targets", "weights")
            self._tensors = {name: tf.constant(getattr(self, name)) for name in names}

    def check_longest(self, length: int, name: str) -> None:
        longest = int(self.lengths.max())
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < longest:
            raise InputError(
                f"`{name}` must be a whole number, at least the longest sequence's. Received: {length!r}, and sequence "
                f"{int(self.lengths.argmax())} of {longest} tokens. Raise it, or cut the sequence."
            )

    def padded(self, index: tf.Tensor, length: tf.Tensor):
        """Returns the sequences' tokens, mask, targets and weights (None: one target each), padded to `length`."""
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
    """Lays sequences end to end: int32 values, int64 lengths."""
    if isinstance(sequences, tf.RaggedTensor):
        sequences = sequences.to_list()
    parts = [np.asarray(part) for part in sequences]
    if not parts:
        raise InputError(f"`{name}` must hold at least one sequence. Received: none.")
    for i, part in enumerate(parts):
        if part.ndim != 1 or not len(part) or part.dtype.kind not in "iu":
            raise InputError(
                f"`{name}` must be sequences of whole numbers, at least one each. Received: {part.dtype} of shape "
                f"{part.shape} as sequence {i}."
            )
    return np.concatenate(parts).astype(np.int32), np.array([len(part) for part in parts], np.int64)


def _check_batch(global_batch) -> None:
    if isinstance(global_batch, bool) or not isinstance(global_batch, (int, np.integer)) or global_batch < 1:
        raise InputError(f"`global_batch` must be a whole number from 1. Received: {global_batch!r}. Try 64.")


def _boundaries(boundaries, tokens: _Tokens) -> np.ndarray:
    if boundaries is None:
        longest = int(tokens.lengths.max())
        return _SHORTEST * 2 ** np.arange(max(0, int(np.ceil(np.log2(longest / _SHORTEST)))) + 1)
    rising = np.asarray(boundaries)
    if rising.ndim != 1 or not len(rising) or rising.dtype.kind not in "iu" or (np.diff(rising) <= 0).any():
        raise InputError(f"`boundaries` must be rising whole numbers. Received: {boundaries!r}. Try [32, 64, 128].")
    tokens.check_longest(int(rising[-1]), "boundaries")
    return rising


class _Plan:
    """Where each batch begins among the sequences sorted by bucket; the same in all epochs."""

    def __init__(self, which: np.ndarray, boundaries: np.ndarray, global_batch: int):
        sizes = np.bincount(which, minlength=len(boundaries))
        firsts, counts, lengths = [], [], []
        for first, size, length in zip(np.cumsum(sizes) - sizes, sizes, boundaries, strict=True):
            for start in range(0, size, global_batch):
                firsts.append(first + start)
                counts.append(min(global_batch, size - start))
                lengths.append(length)
        self.steps, self.counts = len(firsts), np.array(counts, np.int64)
        self.lengths = np.array(lengths, np.int64)
        self.padded = int((self.counts * self.lengths).sum())
        places = np.array(firsts)[:, None] + np.arange(min(global_batch, len(which)))[None, :]
        self.places = np.minimum(places, len(which) - 1)  # `counts` says how many of a row are meant


def _best_fit(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places each sequence, the longest first, in the row with the least room that is enough.

    Returns:
        For each sequence its row, its first place in it, and its number in it, from 1.
    """
    row, offset, segment = (np.zeros(len(lengths), np.int64) for _ in range(3))
    by_room: dict[int, list[int]] = {}  # room -> rows that have just that
    rooms: list[int] = []  # the keys of `by_room`, rising
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


def _made(tokens: _Tokens, rows, fetch, steps: int, count: int, places: int, feed: Feed | None) -> Sequences:
    counter = position.Counter()
    return Sequences(
        train=by_rows(counter.epochs(), rows, fetch, steps, feed or Feed()),
        examples=len(tokens.lengths),
        rows=count,
        steps_per_epoch=steps,
        filled=len(tokens.values) / places,
        _counter=counter,
    )

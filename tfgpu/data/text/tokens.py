"""Batches of tokenized text from a `transformers` tokenizer or a Hugging Face dataset, padded as on one device.

A batch's length is that of its longest sequence, rounded up. It is computed for the global batch, before it is divided
among replicas, so each replica sees the shapes, and the numbers, of one device. Rounding keeps the number of traced
shapes small.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.data import position
from tfgpu.data.augmentation.rows import of_rows
from tfgpu.data.columns import LABELS, has_columns
from tfgpu.data.feed import Feed, by_rows, rows_of
from tfgpu.data.text.sequences import IGNORED, NEXT, Sequences, doubling, increasing
from tfgpu.errors import InputError, unknown, whole_number

IDS, MASK = "input_ids", "attention_mask"
_ROWS = 1000

_log = logging.getLogger(__name__)
Collate = Callable[[list[dict[str, object]]], Mapping[str, np.ndarray]]


def tokenized(
    dataset: object,
    *,
    global_batch: int,
    labels: str | None = None,
    lengths: Sequence[int] | int | None = None,
    pad_id: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    feed: Feed | None = None,
) -> Sequences:
    """Makes batches `({"input_ids": ..., "attention_mask": ...}, labels)` of tokenized text.

    Args:
        dataset: a Hugging Face dataset, map-style or iterable (which is read once), or a dict of lists, such as a
            tokenizer returns: `input_ids`, and other columns of the same lengths (`token_type_ids`). Columns that are
                not
            numeric are dropped with a log message. `attention_mask` is added if it is missing.
        global_batch: sequences in a batch; the last one may be smaller.
        labels: the column of labels, one per sequence or one per token; `"next"`: each token's label is the next token.
            Default: `labels`, `label`, `target` or `y`; without any of them batches have no labels.
        lengths: the lengths to pad batches to, increasing: a batch gets the smallest that fits its longest sequence; or
            one whole number to use multiples of. Default: 16, 32, 64 and so on.
        pad_id: padding of `input_ids`: `tokenizer.pad_token_id`.
        seed: determines the order of every epoch.
        shuffle: False keeps the dataset's order.
        feed: how batches are prepared ahead of training.

    Returns:
        Batches with integers as int32, or int64 if needed. Labels per token come with a `sample_weight`, which is 0
        (like the label) where the label is -100 or padding: use a loss with `reduction="mean_with_sample_weight"`.

    Raises:
        InputError: no `input_ids`, empty sequences, columns of different lengths, or a sequence longer than the last of
            `lengths`.

    Example:
        >>> texts = {"input_ids": [[5, 6, 7], [8]], "labels": [1, 0]}
        >>> x, y = tokenized(texts, global_batch=2, lengths=4, shuffle=False).peek()
        >>> x["input_ids"].numpy().tolist(), x["attention_mask"].numpy().tolist(), y.numpy().tolist()
        ([[5, 6, 7, 0], [8, 0, 0, 0]], [[1, 1, 1, 0], [1, 0, 0, 0]], [1, 0])

    Source: https://huggingface.co/docs/transformers/main_classes/data_collator
    """
    whole_number("global_batch", global_batch)
    table = _Table.of(_columns(dataset), labels, pad_id)
    count, steps = len(table.lengths), -(-len(table.lengths) // global_batch)
    rising = _lengths(lengths, int(table.lengths.max()))
    with tf.device("CPU:0"):
        stops = tf.constant(rising, tf.int64)
        tensors = {name: tf.constant(values) for name, values in (table.tokens | table.single).items()}
        starts, sizes = tf.constant(table.starts), tf.constant(table.lengths)

    def rows(epoch):
        drawn = tf.range(count, dtype=tf.int64)
        return rows_of(epoch, position.order(drawn, seed=seed, epoch=epoch) if shuffle else drawn, count, global_batch)

    def fetch(epoch, start, row, own=None):
        row = row[: count - start]
        longest = tf.reduce_max(tf.gather(sizes, row))  # of the whole batch
        row = of_rows(row, own)
        length = stops[tf.searchsorted(stops, [longest])[0]]
        places = tf.range(length)[None, :]
        inside = places < tf.gather(sizes, row)[:, None]
        flat = tf.minimum(tf.gather(starts, row)[:, None] + places, int(table.lengths.sum()) - 1)
        batch = {name: tf.gather(tensors[name], row) for name in table.single}
        for name in table.tokens:
            padding = tf.constant(table.padding.get(name, 0), tensors[name].dtype)
            batch[name] = tf.where(inside, tf.gather(tensors[name], flat), padding)
        return table.split(batch)

    def total(epoch, start, row):
        return tf.minimum(count - start, global_batch)

    counter = position.Counter()
    next_epoch = lambda: counter.next  # noqa: E731
    train = by_rows(counter.positions(), rows, fetch, steps, feed or Feed(), total=total, next_epoch=next_epoch)
    filled = float(table.lengths.mean()) / float(rising[np.searchsorted(rising, table.lengths)].mean())
    return Sequences(train, count, count, steps, filled, counter)


def collated(
    dataset: Sequence[dict[str, object]],
    collate: Collate,
    *,
    global_batch: int,
    labels: str = "labels",
    seed: int = 0,
    shuffle: bool = True,
    feed: Feed | None = None,
) -> Sequences:
    """Makes batches with a `transformers` collator: `DataCollatorWithPadding(tokenizer, return_tensors="np")`.

    It is called in Python with the rows of a whole global batch, one batch at a time. A random collator, such as
    `DataCollatorForLanguageModeling`, needs the same seed on every worker; a resumed run draws different numbers. Set
    `pad_to_multiple_of`, or every new length is traced again.

    Args:
        dataset: a map-style Hugging Face dataset or a list, whose items are dicts.
        collate: maps a list of such dicts to a dict of arrays with as many rows.
        global_batch: rows in a batch; the last one may be smaller.
        labels: the array to use as y; without it, batches have no labels. Labels per token become `(y, sample_weight)`
            as in `tokenized`.
        seed: determines the order of every epoch.
        shuffle: False keeps the dataset's order.
        feed: how batches are prepared ahead of training.

    Returns:
        The batches; `filled` is unknown (NaN).

    Raises:
        InputError: no rows, or a collator that does not return arrays.

    Example:
        >>> pairs = [{"a": 1, "labels": 0}, {"a": 2, "labels": 1}]
        >>> stack = lambda rows: {name: np.array([row[name] for row in rows]) for name in rows[0]}
        >>> x, y = collated(pairs, stack, global_batch=2, shuffle=False).peek()
        >>> x["a"].numpy().tolist(), y.numpy().tolist()
        ([1, 2], [0, 1])

    Source: https://huggingface.co/docs/transformers/main_classes/data_collator
    """
    whole_number("global_batch", global_batch)
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise InputError("`dataset` must have a length of at least 1. Received: none. Use tokenized().")
    count, steps = len(dataset), -(-len(dataset) // global_batch)
    first = _arrays(collate([dataset[0]]), 1)
    names = sorted(first)
    by_token = labels in first and first[labels].ndim > 1
    kinds = [_small(first[name]).dtype for name in names]

    def make(row):
        arrays = _arrays(collate([dataset[int(index)] for index in row]), len(row))
        return [arrays[name].astype(kind) for name, kind in zip(names, kinds, strict=True)]

    def rows(epoch):
        drawn = tf.range(count, dtype=tf.int64)
        return rows_of(epoch, position.order(drawn, seed=seed, epoch=epoch) if shuffle else drawn, count, global_batch)

    def fetch(epoch, start, row):
        batch = dict(zip(names, tf.numpy_function(make, [row[: count - start]], kinds), strict=True))
        for name in names:
            batch[name].set_shape([None] * first[name].ndim)
        return _with_labels(batch, labels if labels in names else None, by_token)

    if (cluster := Cluster.from_environment()).is_multi_worker and cluster.is_chief:
        _log.info("Every worker collates whole batches and keeps its rows: `collate` needs all rows of a batch.")
    alone = Feed(**{**vars(feed or Feed()), "parallel_calls": 1})  # a random collator draws in the batches' order
    counter = position.Counter()
    train = by_rows(counter.positions(), rows, fetch, steps, alone)
    return Sequences(train, count, count, steps, float("nan"), counter)


@dataclass(frozen=True)
class _Table:
    """Concatenated columns: those with a number per token, and those with a number per sequence."""

    tokens: dict[str, np.ndarray]
    single: dict[str, np.ndarray]
    lengths: np.ndarray
    labels: str | None
    padding: dict[str, int]

    @classmethod
    def of(cls, columns: Mapping[str, Sequence], labels: str | None, pad_id: int) -> "_Table":
        if IDS not in columns:
            raise InputError(f"The data must have a column {IDS!r}. Received: {', '.join(columns) or 'none'}.")
        lengths = np.array([len(ids) for ids in columns[IDS]], np.int64)
        if not len(lengths) or not lengths.all():
            which = f"sequence {int(lengths.argmin())} (the first is 0) is empty" if len(lengths) else "no sequences"
            raise InputError(f"The data must be sequences of at least one token. Received: {which}.")
        tokens, single, left_out = {}, {}, []
        for name, values in columns.items():
            kept = _flat(name, values, lengths)
            if kept is None:
                left_out.append(name)
            else:
                (tokens if kept[1] else single)[name] = kept[0]
        if left_out:
            _log.info("Dropping columns that are not numeric: %s.", ", ".join(left_out))
        tokens.setdefault(MASK, np.ones(int(lengths.sum()), np.int32))
        if labels is None:
            labels = next((name for name in LABELS if name in columns and name not in left_out), None)
        elif labels == NEXT:
            tokens[NEXT] = np.append(tokens[IDS][1:], IGNORED)
            tokens[NEXT][np.cumsum(lengths) - 1] = IGNORED
        elif labels not in tokens and labels not in single:
            raise unknown("numeric column for `labels`", labels, [NEXT, *single, *tokens])
        return cls(tokens, single, lengths, labels, {IDS: pad_id, labels: IGNORED})

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def split(self, batch: dict[str, tf.Tensor]):
        return _with_labels(batch, self.labels, self.labels in self.tokens)


def _with_labels(batch: dict[str, tf.Tensor], labels: str | None, by_token: bool):
    if labels is None:
        return batch
    y = batch.pop(labels)
    if not by_token:
        return batch, y
    counts = y != IGNORED
    return batch, tf.where(counts, y, tf.zeros_like(y)), tf.cast(counts, tf.float32)


def _columns(dataset: object) -> Mapping[str, Sequence]:
    if has_columns(dataset):
        found: dict[str, list] = {}
        for part in dataset.with_format(None).iter(_ROWS):
            for name, values in part.items():
                found.setdefault(name, []).extend(values)
        return found
    if isinstance(dataset, Mapping) or hasattr(dataset, "data") and isinstance(dataset.data, Mapping):
        return dict(dataset)
    raise InputError(f"`dataset` must be a Hugging Face dataset or a dict of lists. Received: {type(dataset)}.")


def _flat(name: str, values: Sequence, lengths: np.ndarray) -> tuple[np.ndarray, bool] | None:
    """Returns a column's concatenated numbers and whether it has one per token; None if it is not numeric."""
    if len(values) != len(lengths):
        raise InputError(f"Column {name!r} must have {len(lengths)} rows, as {IDS!r} has. Received: {len(values)}.")
    parts = [np.asarray(value) for value in values]
    if any(part.dtype.kind not in "biuf" for part in parts):
        return None
    if all(part.ndim == 0 for part in parts):
        return _small(np.stack(parts)), False
    for row, part in enumerate(parts):
        if part.shape != (lengths[row],):
            raise InputError(
                f"Column {name!r} must have one number per token or per sequence. Received: shape {part.shape} in row "
                f"{row}, which has {lengths[row]} tokens."
            )
    return _small(np.concatenate(parts)), True


def _small(values: np.ndarray) -> np.ndarray:
    """Converts to int32 if the values fit, and floats to float32."""
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    limits = np.iinfo(np.int32)
    fits = values.size == 0 or (limits.min <= values.min() and values.max() <= limits.max)
    return values.astype(np.int32 if fits else np.int64)


def _arrays(made: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    if not hasattr(made, "items"):
        raise InputError(f"`collate` must return a dict of arrays. Received: {type(made)}.")
    arrays = {name: np.asarray(value) for name, value in made.items()}
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != rows or array.dtype.kind not in "biuf":
            raise InputError(
                f"`collate` must return arrays of numbers with {rows} row(s). Received: {name!r} of {array.dtype} and "
                f'shape {array.shape}. Collators of transformers need return_tensors="np".'
            )
    return arrays


def _lengths(lengths: Sequence[int] | int | None, longest: int) -> np.ndarray:
    """Returns all lengths that a batch may have."""
    if lengths is None:
        return doubling(longest)
    if np.ndim(lengths) == 0:
        step = whole_number("lengths", lengths)
        return step * np.arange(1, -(-longest // step) + 1)
    found = increasing("lengths", lengths)
    if found[-1] < longest:
        raise InputError(
            f"`lengths` must reach the longest sequence. Received: {found[-1]}, and one of {longest} tokens. Increase "
            "it, or tokenize with truncation=True, max_length=..."
        )
    return found

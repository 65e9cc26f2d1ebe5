"""Batches of tokenized text from a `transformers` tokenizer or a Hugging Face dataset, padded as on one device.

A batch's length is that of its longest sequence, rounded up. It is computed for the global batch, before it is divided
among replicas, so each replica sees the shapes, and the numbers, of one device. Rounding keeps the number of traced
shapes small.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.data.columns import LABELS, has_columns
from tfgpu.data.feed import Feed
from tfgpu.data.position import of_rows, on_cpu
from tfgpu.data.text.sequences import IGNORED, NEXT, Sequences, dealt, doubling, increasing, made
from tfgpu.errors import InputError, unknown, whole_number

IDS, MASK = "input_ids", "attention_mask"
_ROWS = 1000

_log = logging.getLogger(__name__)


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
            not numeric are dropped with a log message. `attention_mask` is added if it is missing.
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
    table = _Table(_columns(dataset), labels, pad_id)
    count = len(table.lengths)
    rising = _lengths(lengths, int(table.lengths.max()))
    stops, starts, sizes = on_cpu(rising, tf.int64), on_cpu(table.starts), on_cpu(table.lengths)
    tensors = {name: on_cpu(values) for name, values in (table.tokens | table.single).items()}

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

    filled = float(table.lengths.mean()) / float(rising[np.searchsorted(rising, table.lengths)].mean())
    rows, total = dealt(count, global_batch, seed, shuffle)
    steps = -(-count // global_batch)
    return made(rows, fetch, total, steps, feed, examples=count, rows=count, filled=filled)


class _Table:
    """Concatenated columns: `tokens`, with a number per token, and `single`, with a number per sequence."""

    def __init__(self, columns: Mapping[str, Sequence], labels: str | None, pad_id: int):
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
        self.tokens, self.single, self.lengths, self.labels = tokens, single, lengths, labels
        self.starts, self.padding = np.cumsum(lengths) - lengths, {IDS: pad_id, labels: IGNORED}

    def split(self, batch: dict[str, tf.Tensor]):
        if self.labels is None:
            return batch
        y = batch.pop(self.labels)
        if self.labels not in self.tokens:
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
            f"`lengths` must reach the longest sequence. Received: {found[-1]}, but one has {longest} tokens. Increase "
            "it, or tokenize with truncation=True, max_length=..."
        )
    return found

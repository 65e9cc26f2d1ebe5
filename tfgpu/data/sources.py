"""Opens a source of examples by name, or arrays and datasets that are passed directly."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfgpu import named
from tfgpu.data import columns, folders, prepared, records, spool, tables
from tfgpu.data.decoding import Reading, check_unsized
from tfgpu.data.examples import Examples, from_arrays
from tfgpu.data.mixture import Mixture, joined
from tfgpu.data.names import SourceName, parse_source
from tfgpu.data.splits import PARTS
from tfgpu.data.storage import remote_records
from tfgpu.data.storage.remote_files import Remote, is_url
from tfgpu.data.structure import pictures
from tfgpu.data.structure.opening import is_structured, open_npz, open_structured, stacked
from tfgpu.data.text import corpus
from tfgpu.errors import InputError, unknown

_CHUNK = 256


def digits() -> Examples:
    """Reads scikit-learn's handwritten digits: 1,797 real images of 8 x 8, ten classes, no download.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.

    Returns:
        Examples of shape (8, 8, 1), float32 in [0, 1] (the original 0-16 counts over 16).

    Example:
        >>> digits().array.shape
        (1797, 8, 8, 1)
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return from_arrays(bunch.images[..., None] / 16.0, bunch.target, name="digits")


def open_source(source, reading: Reading | None = None) -> Examples:
    """Opens any source that `load` accepts.

    Args:
        source: a name (see `names.parse_source`), `Remote`, a `Mixture`, arrays `(x, y)`, a `tf.data.Dataset` of
            `(x, y)` examples, a function that yields them, a Hugging Face dataset, or a dict of these with the keys
            `train`, `validation`, `test`. A stream of examples must end; it is read once.
        reading: how to read files: image size, corrupt files, how much to keep in memory.

    Returns:
        The examples, in memory or read on demand.

    Raises:
        InputError: the source does not exist, is corrupt or cannot be used.

    Example:
        >>> open_source((np.zeros([4, 2]), [0, 1, 0, 1])).shape
        (2,)
    """
    reading = reading or Reading()
    if isinstance(source, Path):
        source = str(source)
    if isinstance(source, Remote) or is_url(source):
        corpus.check_no_length("remote sources", reading)
        return remote_records.open_remote(source, reading)
    if isinstance(source, Mixture):
        return joined(source, [open_source(each, reading) for each in source.sources])
    if not isinstance(source, str):
        corpus.check_no_length("arrays and streams", reading)
        return _from_values(source, name=_name(source), reading=reading)
    name = parse_source(source)
    if name.kind != "corpus":
        corpus.check_no_length(source, reading)
    if name.kind in ("corpus", "digits"):
        check_unsized(source, reading.image_size)
    examples = _OPENERS[name.kind](name, reading)
    if name.kind in _MAY_HAVE_ONE_CLASS and examples.has_classes:
        present = np.unique(examples.labels[examples.own["train"]])
        if len(present) < 2:
            raise InputError(
                f"{examples.name!r} must contain at least two classes with training examples. Received: "
                f"{', '.join(examples.class_names[i] for i in present) or 'none'}. Add examples of another class."
            )
    return examples


_OPENERS: dict[str, Callable[[SourceName, Reading], Examples]] = {
    "corpus": lambda name, reading: corpus.open_corpus(name.value, reading),
    "digits": lambda name, reading: digits(),
    "folder": lambda name, reading: folders.open_folder(name.value, reading),
    "records": lambda name, reading: records.open_records(name.value, reading),
    "tfds": lambda name, reading: prepared.open_tfds(name.value, reading),
    "remote": lambda name, reading: remote_records.open_remote(name.value, reading),
    "npz": lambda name, reading: open_npz(name.value, reading),
    **dict.fromkeys(("csv", "parquet"), tables.open_tables),
    "images": pictures.open_listed,
    "coco": pictures.open_coco,
    "masks": pictures.open_masks,
    "function": lambda name, reading: _from_values(_call(name.value), name=name.value, reading=reading),
}
"""By the kind of a source's name."""
_MAY_HAVE_ONE_CLASS = ("csv", "parquet", "images", "coco", "masks", "npz", "function")


def _call(text: str):
    """Imports `module:function`, also from the working directory, and calls it."""
    function = named.function(text, "The data source")
    try:
        return function()
    except (Exception, SystemExit) as error:  # sys.exit would end the training with a success code
        message = " ".join(str(error).split())
        raise InputError(
            f"The data source {text!r} raised {type(error).__name__}: {message}. It is called without arguments."
        ) from error


def _from_values(values, *, name: str, reading: Reading) -> Examples:
    has_splits = isinstance(values, Mapping)
    splits = dict(values) if has_splits else {"train": values}
    for split in splits:
        if split not in PARTS:
            raise unknown(f"split of {name}", split, PARTS)
    if "train" not in splits:
        raise InputError(f"{name}: the dict of splits needs 'train'. Received: {', '.join(splits) or 'nothing'}.")

    def converted(by: Callable[[object, str], object]) -> dict:
        return {split: by(each, f"{name}, {split}" if has_splits else name) for split, each in splits.items()}

    kinds = set(converted(_kind).values())
    if kinds == {"columns"}:
        return columns.open_columns(splits, name=name, reading=reading)
    check_unsized(name, reading.image_size)
    if kinds == {"stream"}:
        splits, are_structured = converted(_examples), False
        for part, elements in splits.items():
            first = list(itertools.islice(elements, 1))
            are_structured = are_structured or (bool(first) and is_structured(first[0]))
            splits[part] = itertools.chain(first, elements)
        if are_structured:
            splits = converted(lambda each, _: stacked(each, name=name, reading=reading))
            kinds = {"structured"}
    if kinds == {"structured"}:
        return open_structured(splits, name=name, reading=reading)
    if kinds == {"arrays"}:
        pairs = converted(_arrays)
        if has_splits:
            return _joined(pairs, name, reading)
        return from_arrays(*pairs["train"], name=name, task=reading.task)
    if "structured" in kinds:
        raise InputError(f"{name}: all splits must have the same structure, with or without names and sample weights.")
    if "columns" in kinds:
        mixed = f"{name}: all splits or none must be Hugging Face datasets."
        raise InputError(f"{mixed} Received: {', '.join(splits)}.")
    return spool.keep_rows(converted(_chunks), name=name, reading=reading)


def _name(value) -> str:
    """Names a source that was passed directly."""
    if columns.has_columns(value):
        return getattr(getattr(value, "info", None), "dataset_name", None) or "data"
    return getattr(value, "__name__", "function") if callable(value) else "arrays"


def _kind(value, name: str) -> str:
    """Returns what was passed: arrays, a stream of examples, or named columns."""
    if columns.has_columns(value):
        return "columns"
    if is_structured(value):
        return "structured"
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return "arrays"
    if isinstance(value, (tf.data.Dataset, Iterator)) or callable(value):
        return "stream"
    raise InputError(
        f"{name}: data must be (x, y) or (x, y, sample_weight) of arrays or dicts of arrays, a tf.data.Dataset of such "
        f"examples, a Hugging Face dataset, a function that yields such examples, or a dict of these, one per split. "
        f"Received: {type(value).__name__}."
    )


def _arrays(value, name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        return np.asarray(value[0]), np.asarray(value[1])
    except ValueError as error:
        raise InputError(
            f"{name}: all rows of x, and all rows of y, must have one shape. Received: rows of different shapes."
        ) from error


def _joined(parts: Mapping[str, tuple[np.ndarray, np.ndarray]], name: str, reading: Reading) -> Examples:
    parts = {part: xy for part, xy in parts.items() if part == "train" or len(xy[0])}
    own, start = {}, 0
    for part, (x, y) in parts.items():
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise InputError(
                f"{name}, {part}: x and y must have one row per example. Received: shapes {x.shape}, {y.shape}."
            )
        own[part] = np.arange(start, start + len(x))
        start += len(x)
    shapes = {part: (x.shape[1:], y.shape[1:]) for part, (x, y) in parts.items()}
    if len(set(shapes.values())) > 1:
        raise InputError(f"{name}: all splits must have examples of one shape. Received: {shapes}.")
    x, y = (np.concatenate([xy[i] for xy in parts.values()]) for i in (0, 1))
    return from_arrays(x, y, name=name, own=own, task=reading.task)


def _chunks(value, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a stream's examples in chunks of rows."""
    if _kind(value, name) == "arrays":
        yield _arrays(value, name)
        return
    examples = iter(_examples(value, name))
    while pairs := list(itertools.islice(examples, _CHUNK)):
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InputError(f"{name}: each example must be a pair (x, y). Received: {type(pair).__name__}.")
        xs, ys = ([np.asarray(pair[at]) for pair in pairs] for at in (0, 1))
        for values in (xs, ys):
            shapes = {value.shape for value in values}
            if len(shapes) > 1:
                raise InputError(f"{name}: all examples must have one shape. Received: {sorted(shapes)[:5]}.")
        yield np.stack(xs), np.stack(ys)


def _examples(value, name: str) -> Iterator:
    if isinstance(value, tf.data.Dataset):
        spec = value.element_spec
        is_row = isinstance(spec, tuple) and len(spec) in (2, 3)
        if not is_row or not all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(spec)):
            raise InputError(f"{name}: the dataset must yield (x, y) examples. Received: elements {spec}.")
        labels = tf.nest.flatten(spec[1])[0].shape
        if labels.rank and labels[0] is None:
            raise InputError(f"{name}: the dataset must yield single examples, not batches. Use dataset.unbatch().")
        if value.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise InputError(f"{name}: the dataset is infinite. Remove repeat(), or add take(n).")
        return value.as_numpy_iterator()
    found = value() if not isinstance(value, Iterator) else value
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
        raise InputError(f"{name}: the function must yield (x, y) examples. It returned {type(found).__name__}.")
    return iter(found)

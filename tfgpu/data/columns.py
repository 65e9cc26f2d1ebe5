"""Hugging Face `datasets`: map-style or iterable, one dataset or a dict of splits. The library is not imported here.

The label is the only `ClassLabel` column, or the one called `label`, `labels`, `target` or `y`. The example is the only
image column, or else all other columns, which must be numeric.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tfgpu.data.decoding import Reading, check_unsized
from tfgpu.data.examples import Examples
from tfgpu.data.spool import keep_images, keep_rows
from tfgpu.errors import InputError

LABELS = ("label", "labels", "target", "y")
_ROWS = 1024

_log = logging.getLogger(__name__)


def has_columns(value) -> bool:
    """Whether a value is a Hugging Face dataset, or an object that works like one."""
    return all(hasattr(value, name) for name in ("features", "with_format", "iter", "cast_column"))


def open_columns(parts: Mapping[str, object], *, name: str, reading: Reading) -> Examples:
    """Reads Hugging Face datasets once from start to end.

    Args:
        parts: a dataset for each split.
        name: what to call the source.
        reading: image size, memory.

    Returns:
        The examples. Encoded images are decoded when they are read; numbers are kept as they are.

    Raises:
        InputError: columns that cannot serve as example and label.
    """
    features = parts["train"].features
    if not features:
        raise InputError(f"{name}: the columns are unknown. Set the dataset's features.")
    for part, dataset in parts.items():
        if list(dataset.features or ()) != list(features):
            raise InputError(f"{name}: all splits must have the same columns. Those of {part} differ.")
    y = _label(features, name)
    class_names = tuple(getattr(features[y], "names", None) or ()) or None
    images = [column for column, kind in features.items() if type(kind).__name__ == "Image"]
    if len(images) == 1:
        unused = [column for column in features if column not in (y, images[0])]
        if unused:
            _log.info("%s: examples are %r, labels %r; unused: %s.", name, images[0], y, ", ".join(unused))
        pairs = {part: _images(dataset, images[0], y) for part, dataset in parts.items()}
        return keep_images(pairs, name=name, reading=reading, class_names=class_names)
    check_unsized(name, reading.image_size)
    xs = [column for column in features if column != y]
    if not xs:
        raise InputError(f"{name} has only a label column. Add the examples' columns.")
    others = {column: features[column] for column in xs if not _is_numbers(features[column])}
    if others:
        listed = ", ".join(f"{column!r} ({_type(kind)})" for column, kind in list(others.items())[:5])
        raise InputError(
            f"{name}: these columns are not numeric: {listed}. Encode text as numbers of one length with "
            "dataset.map(...), or remove columns with dataset.remove_columns([...])."
        )
    chunks = {part: _rows(dataset, xs, y, name) for part, dataset in parts.items()}
    return keep_rows(chunks, name=name, reading=reading, class_names=class_names)


def _label(features, name: str) -> str:
    classes = [column for column, kind in features.items() if type(kind).__name__ == "ClassLabel"]
    if len(classes) == 1:
        return classes[0]
    found = next((column for column in LABELS if column in features), None)
    if found is None:
        raise InputError(
            f"{name} has no label column. Received: {', '.join(features)}. "
            f"Rename it: dataset.rename_column({list(features)[-1]!r}, 'label')."
        )
    return found


def _is_numbers(kind) -> bool:
    """Whether a feature is a number, or an array or list of numbers."""
    inner = getattr(kind, "feature", None)
    if inner is not None:
        return _is_numbers(inner)
    return _type(kind).startswith(("int", "uint", "float", "bool"))


def _type(kind) -> str:
    return str(getattr(kind, "dtype", None) or type(kind).__name__)


def _rows(dataset, xs: list[str], y: str, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in dataset.with_format("numpy").iter(_ROWS):
        values = [np.asarray(batch[column]) for column in xs]
        if any(value.dtype == object for value in values):
            raise InputError(
                f"{name}: the lists in a column must have one length. Pad them with dataset.map(...). "
                "For tokenized text use tfgpu.data.tokenized."
            )
        if len(values) > 1:
            values = [value.reshape(len(value), -1).astype(np.float32) for value in values]
        yield values[0] if len(values) == 1 else np.concatenate(values, axis=1), np.asarray(batch[y])


def _images(dataset, x: str, y: str) -> Iterator[tuple[bytes, int]]:
    """Yields encoded images; TensorFlow decodes them in parallel later."""
    encoded = dataset.cast_column(x, type(dataset.features[x])(decode=False))
    for row in encoded:
        content = row[x]["bytes"]
        yield Path(row[x]["path"]).read_bytes() if content is None else content, row[y]

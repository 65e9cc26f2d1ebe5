"""Opens arrays and streams with named inputs or targets, several outputs, or sample weights."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import splits
from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples, features, from_arrays, labeled, labels_of
from tfgpu.data.structure.arrays import Structure, Task, has_numbers, numbers, task_of
from tfgpu.errors import InputError, unknown


def is_structured(value: object) -> bool:
    """Whether `(x, y)` or `(x, y, sample_weight)` has more than an array of examples and one of labels."""
    is_row = isinstance(value, (tuple, list)) and len(value) in (2, 3)
    return is_row and (len(value) == 3 or any(isinstance(each, Mapping) for each in value))


def open_structured(parts: Mapping[str, tuple], *, name: str, reading: Reading) -> Examples:
    """Opens `(x, y)` or `(x, y, sample_weight)` of arrays and dicts of arrays, for each split.

    Args:
        parts: by split; has `train`.
        name: the source's name.
        reading: with the task.

    Raises:
        InputError: arrays of different lengths, splits of different structures, values that are not finite.
    """
    ordered = sorted(parts, key=splits.PARTS.index)
    opened = [_rows(parts[part], name if len(parts) == 1 else f"{name}, {part}") for part in ordered]
    ends = np.cumsum([0, *(count for _, count in opened)])
    own = {part: np.arange(start, end) for part, start, end in zip(ordered, ends, ends[1:], strict=False)}
    try:
        arrays = opened[0][0].joined(*(structure for structure, _ in opened[1:]))
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: all splits must have the same structure: {error}.") from error
    return _examples(arrays, own, name, reading.task)


def stacked(elements: Iterable, *, name: str, reading: Reading) -> tuple:
    """The elements of a stream as arrays in the same structure.

    Raises:
        InputError: no elements, elements of different structures or shapes, or more than `memory_bytes`.
    """
    found, size = [], 0
    for element in elements:
        found.append(tf.nest.map_structure(np.asarray, tuple(element)))
        size += sum(each.nbytes for each in tf.nest.flatten(found[-1]))
        if size > reading.memory_bytes:
            raise InputError(
                f"{name}: streams with named arrays or sample weights are kept in memory, and this one does not fit in "
                f"memory_bytes={reading.memory_bytes}. Increase it."
            )
    if not found:
        raise InputError(f"{name} has no examples. Provide at least one example and its label.")
    try:
        return tf.nest.map_structure(lambda *rows: np.stack(rows), *found)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: all examples must have one structure and shape: {error}.") from error


def _rows(value: tuple, name: str) -> tuple[Structure, int]:
    """A split's arrays, checked, and its number of rows."""
    x, y, weights = (*value, None)[:3]
    x, y = (_arrays(each, f"{name}: {what}") for each, what in ((x, "x"), (y, "y")))
    flat = [*tf.nest.flatten(x), *tf.nest.flatten(y)]
    if weights is not None:
        weights = _weights(weights, name)
        flat.append(weights)
    counts = {len(each) if each.ndim else 0 for each in flat}
    if len(counts) != 1 or 0 in counts:
        raise InputError(f"{name}: x, y and sample weights must have one row per example. Received: {sorted(counts)}.")
    return Structure(x, y, weights), counts.pop()


def _weights(given: Any, name: str) -> np.ndarray:
    try:
        weights = np.asarray(given, np.float32)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: sample weights must be numbers. Received: {error}.") from error
    if weights.ndim != 1:
        raise InputError(f"{name}: sample weights must be one number per example. Received: shape {weights.shape}.")
    is_wrong = ~np.isfinite(weights) | (weights < 0)
    if is_wrong.any():
        raise InputError(f"{name}: sample weights must be at least 0 and finite. Received: {weights[is_wrong][0]}.")
    return weights


def _arrays(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _arrays(each, f"{name}[{key!r}]") for key, each in value.items()}
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InputError(f"{name}: all rows must have one shape. Pad them.") from error


def _examples(arrays: Structure, own: Mapping[str, np.ndarray], name: str, task: Task) -> Examples:
    x, y, copies = arrays.inputs, arrays.targets, None
    labels, class_names, targets, named = _learned(y, task, name)
    if isinstance(x, np.ndarray):
        one = from_arrays(x, np.zeros(len(x), np.int64), name=name)
        inputs, array, shape = None, one.array, one.shape
    else:
        digests: list[list[bytes]] = []
        inputs = tf.nest.map_structure(lambda each: _features(each, name, digests), x)
        shape = tf.nest.map_structure(lambda each: tuple(each.shape[1:]), inputs)
        copies = splits.same(map(b"".join, zip(*digests, strict=True)))
        array = np.zeros([len(labels), 0], np.float32)
    structure = Structure(inputs, targets, arrays.weights, named)
    return Examples(name, labels, shape, class_names, array=array, own=own, copies=copies, structure=structure)


def with_targets(examples: Examples, y: Any, weights: np.ndarray | None, *, task: Task) -> Examples:
    """Replaces labels that are row numbers by the labels and weights of those rows.

    Args:
        examples: read by place; some rows may be missing, such as those of corrupt files.
        y: the labels of all rows, or nested dicts of arrays.
        weights: a number from 0 for each row, or None.
        task: as for `load`.

    Raises:
        InputError: labels or weights that cannot be used.
    """
    rows, name = examples.labels, examples.name
    if isinstance(y, np.ndarray) or y:
        labels, class_names, targets, named = _learned(y, task, name)
    else:
        labels, class_names, targets, named = np.zeros(int(rows.max()) + 1, np.int64), (), {}, {}
    targets = None if targets is None else tf.nest.map_structure(lambda each: each[rows], targets)
    weights = None if weights is None else _weights(weights, name)[rows]
    structure = None if targets is None and weights is None else Structure(None, targets, weights, named)
    return replace(examples, labels=labels[rows], class_names=class_names, structure=structure)


def _features(values: np.ndarray, name: str, digests: list[list[bytes]]) -> np.ndarray:
    """Rows as the model sees them; appends a hash of each."""
    found = features(values, name=name)
    digests.append([splits.digest(row) for row in found])
    return found


def _learned(y: Any, task: Task, name: str) -> tuple[np.ndarray, tuple[str, ...], Any, dict[str, tuple[str, ...]]]:
    """Labels (all 0 if there are targets), their classes' names, targets, and their classes' names."""
    if isinstance(y, Mapping):
        targets, named = _named(y, task, name)
        return np.zeros(len(tf.nest.flatten(y)[0]), np.int64), (), targets, named
    labels, class_names, structure = labeled(y, name=name, task=task)
    return labels, class_names, None if structure is None else structure.targets, {}


def _named(y: Mapping[str, Any], task: Task, name: str) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Named targets as numbers, and the names of the classes where labels were texts."""
    if isinstance(task, Mapping):
        for each in task:
            if each not in y:
                raise unknown(f"target of {name}", each, y)
    found, class_names = {}, {}
    for target, value in y.items():
        said, where = task_of(task, target), f"{name}: y[{target!r}]"
        is_array = isinstance(value, np.ndarray)
        if is_array and value.dtype.kind in "USO" and not has_numbers(value, said, where):
            found[target], class_names[target] = labels_of(value, name=where)
        elif is_array and said == "classification" and value.ndim == 1:
            found[target], _ = labels_of(value, name=where)
        else:
            found[target] = tf.nest.map_structure(functools.partial(numbers, task=said, name=where), value)
    return found, class_names

"""Opens arrays and streams with named inputs or targets, several outputs, or sample weights, and NumPy's files.

The arrays of an `.npz` file:

    x, y                         examples and labels
    x/left, x/ids                named inputs
    y/kind, y/price              named targets; y/bounding_boxes/boxes is nested
    sample_weight                a number from 0 per example
    x_train, y_train, x_test     the same for splits, in one file; or files named train..., test...

They are read into memory, and must fit in `memory_bytes`.
"""

import functools
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import splits
from tfgpu.data.decoding import Reading, check_unsized
from tfgpu.data.examples import Examples, features, from_arrays, labeled, labels_of
from tfgpu.data.records import find, parts_of
from tfgpu.data.structure.arrays import Structure, Task, has_numbers, numbers
from tfgpu.errors import InputError, unknown

_NAMES = re.compile(rf"(x|y|sample_weight)(?:_({'|'.join(splits.PARTS)}))?((?:/[^/]+)*)")
_KNOWN = "x, y, x/NAME, y/NAME, sample_weight, each also with _train, _validation or _test"


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
    x, y, copies = arrays.inputs, arrays.targets, None
    labels, class_names, targets, named = _learned(y, reading.task, name)
    if isinstance(x, np.ndarray):
        one = from_arrays(x, np.zeros(len(x), np.int64), name=name)
        inputs, array, shape = None, one.array, one.shape
    else:
        inputs = tf.nest.map_structure(lambda each: features(each, name=name), x)
        shape = tf.nest.map_structure(lambda each: tuple(each.shape[1:]), inputs)
        digests = [map(splits.digest, each) for each in tf.nest.flatten(inputs)]
        copies = splits.same(map(b"".join, zip(*digests, strict=True)))
        array = np.zeros([len(labels), 0], np.float32)
    structure = Structure(inputs, targets, arrays.weights, named)
    return Examples(name, labels, shape, class_names, array=array, own=own, copies=copies, structure=structure)


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


def _learned(y: Any, task: Task, name: str) -> tuple[np.ndarray, tuple[str, ...], Any, dict[str, tuple[str, ...]]]:
    """Labels (all 0 if there are targets), their classes' names, targets, and the names of the classes of texts."""
    if not isinstance(y, Mapping):
        labels, class_names, structure = labeled(y, name=name, task=task)
        return labels, class_names, None if structure is None else structure.targets, {}
    for each in task if isinstance(task, Mapping) else ():
        if each not in y:
            raise unknown(f"target of {name}", each, y)
    found, named = {}, {}
    for target, value in y.items():
        said = task.get(target) if isinstance(task, Mapping) else task
        where = f"{name}: y[{target!r}]"
        is_array = isinstance(value, np.ndarray)
        if is_array and value.dtype.kind in "USO" and not has_numbers(value, said, where):
            found[target], named[target] = labels_of(value, name=where)
        elif is_array and said == "classification" and value.ndim == 1:
            found[target], _ = labels_of(value, name=where)
        else:
            found[target] = tf.nest.map_structure(functools.partial(numbers, task=said, name=where), value)
    return np.zeros(len(tf.nest.flatten(y)[0]), np.int64), (), found, named


def open_npz(path: str, reading: Reading) -> Examples:
    """Opens a file, a folder or a glob of `.npz` files.

    Args:
        path: where they are.
        reading: how much to keep in memory, and the task.

    Raises:
        InputError: no file, arrays of other names or of Python objects, or more than fit in memory.
    """
    paths = find(path, end=".npz")
    name = Path(path).name
    check_unsized(name, reading.image_size)
    members = [_read_npz(each) for each in paths]
    if sum(each.nbytes for file in members for each in file.values()) > reading.memory_bytes:
        raise InputError(
            f"{name} does not fit in memory_bytes={reading.memory_bytes}. Increase it (--memory-bytes), or write "
            "shards: tfgpu data write."
        )
    parts: dict[str, list[dict[str, np.ndarray]]] = {}
    for part, which in parts_of(paths).items():
        for at in which:
            found: dict[str, dict[str, np.ndarray]] = {}  # by split, named `x`, `y/price` and so on
            for key, array in members[at].items():
                match = _NAMES.fullmatch(key)
                if match is None:
                    raise InputError(
                        f"{paths[at]} has an array {key!r}. Expected the names {_KNOWN}. Rename or remove it."
                    )
                found.setdefault(match[2] or part, {})[match[1] + match[3]] = array
            for own, arrays in found.items():
                parts.setdefault(own, []).append(arrays)
    whole = {part: _joined(files, name) for part, files in parts.items()}
    if "train" not in whole:
        raise InputError(f"{name} has no training examples. Received: arrays for {', '.join(sorted(whole))}.")
    return open_structured({part: _nested(arrays, name) for part, arrays in whole.items()}, name=name, reading=reading)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as loaded:
            return dict(loaded)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = "it holds Python objects, which are not unpickled" if "pickle" in str(error) else str(error)
        raise InputError(f"Cannot read {path} as npz: {reason}. Write arrays of numbers with numpy.savez.") from error


def _joined(files: list[dict[str, np.ndarray]], name: str) -> dict[str, np.ndarray]:
    """The arrays of one split's files, one after another."""
    first, *others = files
    if any(each.keys() != first.keys() for each in others):
        raise InputError(f"{name}: all files of a split must hold arrays of the same names.")
    try:
        return {key: np.concatenate([each[key] for each in files]) for key in first}
    except ValueError as error:
        raise InputError(f"{name}: all files must hold examples of one shape: {error}.") from error


def _nested(arrays: Mapping[str, Any], name: str) -> tuple:
    """`(x, y)` or `(x, y, sample_weight)` of arrays and nested dicts."""
    tops: dict[str, Any] = {}
    for key, array in arrays.items():
        top, *inner = key.split("/")
        if not inner:
            if top in tops:
                raise InputError(f"{name} holds {top!r} and {top}/NAME. Keep one of them.")
            tops[top] = array
            continue
        place = tops.setdefault(top, {})
        for word in inner[:-1]:
            place = place.setdefault(word, {}) if isinstance(place, dict) else place
        if not isinstance(place, dict) or inner[-1] in place:
            raise InputError(f"{name} holds {key!r} and an array within or above it. Keep one of them.")
        place[inner[-1]] = array
    for top in ("x", "y"):
        if top not in tops:
            raise InputError(f"{name} has no array {top!r}. Received: {', '.join(arrays)}. Expected {_KNOWN}.")
    return tuple(tops[top] for top in ("x", "y", "sample_weight") if top in tops)

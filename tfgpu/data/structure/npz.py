"""NumPy's `.npz` files with named arrays.

    x, y                         examples and labels
    x/left, x/ids                named inputs
    y/kind, y/price              named targets; y/bounding_boxes/boxes is nested
    sample_weight                a number from 0 per example
    x_train, y_train, x_test     the same for splits, in one file; or files named train..., test...

They are read into memory, and must fit in `memory_bytes`.
"""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfgpu.data.decoding import Reading, check_unsized
from tfgpu.data.examples import Examples
from tfgpu.data.records import find, parts_of
from tfgpu.data.splits import PARTS
from tfgpu.data.structure.opening import open_structured
from tfgpu.errors import InputError

_NAMES = re.compile(rf"(x|y|sample_weight)(?:_({'|'.join(PARTS)}))?((?:/[^/]+)*)")
_KNOWN = "x, y, x/NAME, y/NAME, sample_weight, each also with _train, _validation or _test"


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
    members = [_read(each) for each in paths]
    if sum(each.nbytes for file in members for each in file.values()) > reading.memory_bytes:
        raise InputError(
            f"{name} does not fit in memory_bytes={reading.memory_bytes}. Increase it (--memory-bytes), or write "
            "shards: tfgpu data write."
        )
    parts: dict[str, list[dict[str, np.ndarray]]] = {}
    for part, numbers in parts_of(paths).items():
        for at in numbers:
            for own, arrays in _by_part(paths[at], members[at], part).items():
                parts.setdefault(own, []).append(arrays)
    whole = {part: _joined(files, name) for part, files in parts.items()}
    if "train" not in whole:
        raise InputError(f"{name} has no training examples. Received: arrays for {', '.join(sorted(whole))}.")
    return open_structured(
        {part: _structure(arrays, name) for part, arrays in whole.items()}, name=name, reading=reading
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as loaded:
            return dict(loaded)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = "it holds Python objects, which are not unpickled" if "pickle" in str(error) else str(error)
        raise InputError(f"Cannot read {path} as npz: {reason}. Write arrays of numbers with numpy.savez.") from error


def _by_part(path: Path, arrays: Mapping[str, np.ndarray], part: str) -> dict[str, dict[str, np.ndarray]]:
    """A file's arrays by split, named `x`, `y/price` and so on."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        match = _NAMES.fullmatch(key)
        if match is None:
            raise InputError(f"{path} has an array {key!r}. Expected the names {_KNOWN}. Rename or remove it.")
        found.setdefault(match[2] or part, {})[match[1] + match[3]] = array
    return found


def _joined(files: list[dict[str, np.ndarray]], name: str) -> dict[str, np.ndarray]:
    """The arrays of one split's files, one after another."""
    first, *others = files
    if any(each.keys() != first.keys() for each in others):
        raise InputError(f"{name}: all files of a split must hold arrays of the same names.")
    try:
        return {key: np.concatenate([each[key] for each in files]) for key in first}
    except ValueError as error:
        raise InputError(f"{name}: all files must hold examples of one shape: {error}.") from error


def _structure(arrays: Mapping[str, Any], name: str) -> tuple:
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

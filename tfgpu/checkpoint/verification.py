"""Finds where two runs part: the first checkpoint and the first array that differ."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from tfgpu.checkpoint import storage
from tfgpu.errors import InputError, is_number

_FILES = (".keras", ".h5")
_IN_RUN = "checkpoints"
_WEIGHTS = "model.weights.h5"


@dataclass(frozen=True)
class Parting:
    """The first difference.

    Attributes:
        where: the name of the checkpoint; None between two files.
        variable: the array's name, with the variable's path where the checkpoint has it.
        reason: what differs.
    """

    where: str | None
    variable: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """What a comparison has found.

    Attributes:
        compared: the names of the checkpoints that both have, in order; empty between two files.
        arrays: compared, up to the first difference.
        only_one: names of checkpoints that only one of the two has.
        parting: the first difference, or None.
    """

    compared: tuple[str, ...]
    arrays: int
    only_one: tuple[str, ...]
    parting: Parting | None


def verify(one: str | Path, other: str | Path, *, rtol: float = 0.0, atol: float = 0.0) -> Verdict:
    """Compares two runs, two checkpoints, or two files of weights.

    Args:
        one, other: each a run directory or a folder of checkpoints; a checkpoint; or a `.keras` or `.weights.h5` file.
            Runs are compared in the checkpoints that both have, the oldest first.
        rtol, atol: floats may differ by `atol + rtol * |other|`; with 0 and 0 arrays are compared bit by bit.

    Raises:
        InputError: a path is none of these, cannot be read, or the two have nothing to compare.

    Example:
        >>> verify("runs/a", "runs/b").parting  # doctest: +SKIP
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not is_number(value) or not value >= 0:
            raise InputError(f"`{name}` must be a number of at least 0. Received: {value!r}.")
    one, other = Path(one), Path(other)
    if one.suffix in _FILES or other.suffix in _FILES:
        count, parting = _compare(None, _of_file(one), _of_file(other), {}, rtol, atol)
        return Verdict((), count, (), parting)
    mine, others = _checkpoints(one), _checkpoints(other)
    common = sorted(mine.keys() & others.keys(), key=lambda name: storage.place_of(Path(name)))
    only_one = tuple(sorted(mine.keys() ^ others.keys()))
    if not common:
        raise InputError(
            f"{one} and {other} have no checkpoint of the same name. The first has {_listed(mine)}, the second "
            f"{_listed(others)}. Save both at the same steps (`every_steps`), and keep enough of them (`keep`)."
        )
    count = 0
    for name in common:
        read, against = _read(mine[name]), _read(others[name])
        paths = read.memory.get("paths", {}) if isinstance(read.memory, dict) else {}
        more, parting = _compare(name, read.arrays, against.arrays, paths, rtol, atol)
        count += more
        if parting is not None:
            return Verdict(tuple(common), count, only_one, parting)
    return Verdict(tuple(common), count, only_one, None)


def _compare(where, one: dict, other: dict, paths: dict, rtol: float, atol: float) -> tuple[int, Parting | None]:
    """The number of arrays compared, and the first that differ; the optimizer's come before the weights."""
    count = 0
    for name in sorted(one.keys() | other.keys()):
        path = paths.get(name.partition("@")[0])
        variable = f"{name} ({path})" if path else name
        if name not in one or name not in other:
            return count, Parting(where, variable, f"only the {'first' if name in one else 'second'} has it")
        count += 1
        reason = _difference(np.asarray(one[name]), np.asarray(other[name]), rtol, atol)
        if reason is not None:
            return count, Parting(where, variable, reason)
    return count, None


def _difference(one: np.ndarray, other: np.ndarray, rtol: float, atol: float) -> str | None:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {one.shape} in the first, {other.dtype} {other.shape} in the second"
    if one.tobytes() == other.tobytes():
        return None
    is_number = one.dtype.kind in "fiu"
    width = f"u{one.itemsize}" if one.itemsize in (1, 2, 4, 8) else None
    if (rtol or atol) and one.dtype.kind == "f":
        differ = ~np.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
    else:
        differ = one.view(width) != other.view(width) if is_number and width and one.ndim else one != other
    if not np.any(differ):
        return None
    at = np.unravel_index(int(np.argmax(differ)), one.shape) if one.ndim else ()
    place = f" at {tuple(map(int, at))}" if one.ndim else ""
    return f"{np.sum(differ)} of {one.size} numbers differ, the first{place}: {one[at]!s} and {other[at]!s}"


def _checkpoints(path: Path) -> dict[str, Path]:
    """The checkpoints at a path by name: those of a run or folder, or the path itself."""
    if (path / storage.FACTS).is_file() and storage.place_of(path):
        return {path.name: path}
    found = storage.found(path) or storage.found(path / _IN_RUN)
    if not found:
        raise InputError(
            f"{path} has no checkpoints. Give a run directory, a folder of checkpoints, a checkpoint, or a .keras or "
            ".weights.h5 file."
        )
    return {each.name: each for each in found}


def _read(path: Path) -> storage.Snapshot:
    try:
        return storage.read(path)
    except storage.Damaged as error:
        raise InputError(f"{path} is damaged: {error}. Compare others, or remove it.") from error


def _of_file(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a `.keras` or `.weights.h5` file by their place in it."""
    if path.suffix not in _FILES:
        raise InputError(f"{path} is not a .keras or .weights.h5 file, but the other is. Compare two of the same kind.")
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive, archive.open(_WEIGHTS) as file:
                return _of_hdf5(file)
        return _of_hdf5(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read: {error}. Give a file that Keras has saved.") from error


def _of_hdf5(source: object) -> dict[str, np.ndarray]:
    with h5py.File(source, "r") as file:
        return dict(_arrays(file))


def _arrays(group: h5py.Group) -> Iterator[tuple[str, np.ndarray]]:
    for key in group:
        if isinstance(group[key], h5py.Group):
            yield from _arrays(group[key])
        else:
            yield group[key].name.strip("/"), np.asarray(group[key])


def _listed(found: dict[str, Path]) -> str:
    names = sorted(found)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

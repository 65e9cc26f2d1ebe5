"""Train, validation and test splits without leakage: stratified, disjoint, exact copies in one split."""

import hashlib
from collections.abc import Iterable

import numpy as np

from tfgpu.errors import InputError, is_number

PARTS = ("train", "validation", "test")


def check_fractions(validation: float, test: float) -> None:
    """Raises `InputError` unless both are numbers of at least 0 and below 1."""
    for name, value in (("validation", validation), ("test", test)):
        if not is_number(value) or not 0 <= value < 1:
            raise InputError(
                f"`{name}` is the fraction of the examples to set aside, at least 0 and below 1. "
                f"Received: {value!r}. Try 0.1."
            )


def split(labels: np.ndarray, *, validation: float, test: float, seed: int = 0, groups: np.ndarray | None = None):
    """Divides examples into three disjoint splits with the same class proportions.

    Each class is shuffled by the seed and divided separately. Rounding errors carry over to the next class, so each
    split has the requested size to within one example. A class with enough examples is in every split.

    Args:
        labels: int [n], the class of each example.
        validation, test: fractions of n; 0 leaves that split empty. Their sum is below 1.
        seed: selects one of the possible splits.
        groups: int [n]; examples of the same group stay together (exact copies). Default: no groups.

    Returns:
        A dict from `train`, `validation` and `test` to sorted int64 indices.

    Raises:
        InputError: a fraction out of range, or too few examples for the requested splits.

    Example:
        >>> parts = split(np.array([0, 1] * 10), validation=0.2, test=0.2, seed=3)
        >>> {name: len(indices) for name, indices in parts.items()}
        {'train': 12, 'validation': 4, 'test': 4}
    """
    check_fractions(validation, test)
    if validation + test >= 1:
        raise InputError(
            f"`validation` and `test` leave no training examples. Received: {validation} + {test}. "
            "Their sum must be below 1."
        )
    labels = np.asarray(labels)
    groups = np.arange(len(labels)) if groups is None else np.asarray(groups)
    asked = {name: value for name, value in (("test", test), ("validation", validation)) if value > 0}
    taken: dict[str, list[np.ndarray]] = {name: [] for name in PARTS}
    debt = dict.fromkeys(asked, 0.0)
    # Each class's groups of indices in random order; a group belongs to the class of its first example.
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    members = np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1])
    label_of_group, rng = labels[first], np.random.default_rng(seed)
    for label in np.unique(label_of_group):
        drawn = rng.permutation(np.flatnonzero(label_of_group == label))
        _cut_class([members[i] for i in drawn], asked, debt, taken)
    parts = {name: np.sort(np.concatenate([np.empty(0, np.int64), *taken[name]])) for name in PARTS}
    empty = [name for name in ("train", *asked) if not len(parts[name])]
    if empty:
        raise InputError(
            f"{len(labels)} examples are too few for the requested splits: {' and '.join(empty)} would be empty. "
            "Add examples, or set `validation` or `test` to 0."
        )
    return parts


def copies(array: np.ndarray) -> np.ndarray:
    """Numbers the examples so that exact copies (the same bytes) share a number.

    Args:
        array: [n, ...].

    Returns:
        int64 [n]: for each example, the index of the first that equals it.

    Example:
        >>> copies(np.array([[1, 2], [3, 4], [1, 2]])).tolist()
        [0, 1, 0]
    """
    return same(digest(row) for row in array)


def digest(example: np.ndarray) -> bytes:
    """Returns a 16-byte hash of an example's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(example).tobytes(), digest_size=16).digest()


def same(digests: Iterable[bytes]) -> np.ndarray:
    """Numbers examples by their hashes, as `copies` does."""
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(each, i) for i, each in enumerate(digests)], np.int64)


def first_of(numbers: np.ndarray) -> np.ndarray:
    """Returns the first position of each number: `copies` of a subset, from those of the whole.

    Example:
        >>> first_of(np.array([7, 5, 7])).tolist()
        [0, 1, 0]
    """
    _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
    return first[which]


def _cut_class(sets, asked, debt, taken) -> None:
    total = sum(len(s) for s in sets)
    left = list(sets)
    for name, fraction in asked.items():
        exact = fraction * total + debt[name]
        waiting = len(asked) - list(asked).index(name)  # splits still to fill, including this one and train
        wanted = max(round(exact), 1) if len(left) > waiting else round(exact)
        got, left = _take(left, wanted, keep=waiting if len(left) > waiting else 1)
        debt[name] = exact - sum(len(s) for s in got)
        taken[name] += got
    taken["train"] += left


def _take(groups: list, wanted: int, *, keep: int) -> tuple[list, list]:
    """Divides `groups`: at most `wanted` examples, and the rest, which keeps at least `keep` groups."""
    got, rest, size, room = [], [], 0, len(groups) - keep
    for group in groups:
        if len(got) < room and size + len(group) <= wanted:
            got.append(group)
            size += len(group)
        else:
            rest.append(group)
    if not got and wanted >= 1 and room > 0:  # every group is larger than the share: take the smallest
        smallest = min(range(len(rest)), key=lambda i: len(rest[i]))
        got.append(rest.pop(smallest))
    return got, rest

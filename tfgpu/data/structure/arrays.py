"""Arrays beside the classes of examples: numbers to predict, named inputs and targets, sample weights.

They lie in memory and are gathered by index when a batch is made, so order, splits, balancing and each worker's own
rows are those of every source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError, unknown

TASKS = ("classification", "regression")


@dataclass(frozen=True)
class Structure:
    """Arrays of one row per example.

    Attributes:
        inputs: nested dicts of arrays; None: the examples themselves.
        targets: the same for what the model learns; None: the classes.
        weights: float32 [n], or None.

    Example:
        >>> structure = Structure(targets=np.array([0.5, 1.5, 2.5]))
        >>> structure.gatherer()(tf.constant([2, 0]))[1].numpy().tolist()
        [2.5, 0.5]
    """

    inputs: Any = None
    targets: Any = None
    weights: np.ndarray | None = None

    def gatherer(self) -> Callable[[tf.Tensor], tuple[Any, Any, Any]]:
        """Returns a function from indices to inputs, targets and weights; None for what there is not."""
        with tf.device("CPU:0"):
            tensors = [None if each is None else tf.nest.map_structure(tf.constant, each) for each in self.all()]

        def gather(index: tf.Tensor) -> tuple[Any, Any, Any]:
            return tuple(
                None if each is None else tf.nest.map_structure(lambda value: tf.gather(value, index), each)
                for each in tensors
            )

        return gather

    def joined(self, *others: "Structure") -> "Structure":
        """This structure's rows, and then those of others; raises `ValueError` or `TypeError` if they do not match."""
        found = []
        for each in zip(*(one.all() for one in (self, *others)), strict=True):
            if any(one is None for one in each) and not all(one is None for one in each):
                raise ValueError("some have inputs, targets or weights that others do not have")
            if each[0] is None:
                found.append(None)
            else:
                found.append(tf.nest.map_structure(lambda *rows: np.concatenate(rows), *each))
        return Structure(*found)

    def all(self) -> tuple[Any, Any, Any]:
        """Inputs, targets and weights."""
        return self.inputs, self.targets, self.weights


def check_task(task: str | None) -> None:
    """Raises `InputError` for an unknown task."""
    if task is not None and task not in TASKS:
        raise unknown("task", task, TASKS)


def has_numbers(y: np.ndarray, task: str | None, name: str) -> bool:
    """Whether labels are numbers to predict, not classes.

    Args:
        y: the labels.
        task: what the user said; None finds out: floats that are not all whole, or several a row.
        name: the source's name, for errors.

    Raises:
        InputError: rows that look like one-hot classes, where nothing was said; no numbers for regression.

    Example:
        >>> has_numbers(np.array([1.0, 2.0]), None, "a"), has_numbers(np.array([1.0, 2.5]), None, "a")
        (False, True)
    """
    if task == "regression":
        if y.dtype.kind not in "fiub":
            raise InputError(f"{name}: task='regression' needs numbers as labels. Received: {y.dtype}.")
        return True
    if task == "classification" or y.dtype.kind != "f" or y.ndim == 0 or not len(y):
        return False
    if y.size == len(y):
        return not np.all(y == np.floor(y))
    if y.ndim == 2 and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        raise InputError(
            f"{name}: labels must be whole numbers from 0 to classes-1, or strings. Received: {y.dtype} of shape "
            f"{y.shape}, which look like one-hot classes. Use y.argmax(-1), or task='regression' to keep the numbers."
        )
    return True


def numbers(y: np.ndarray, task: str | None, name: str) -> np.ndarray:
    """Numbers to predict: float32 of any float, or for regression of all; int64 of integers; uint8 masks as they are.

    Raises:
        InputError: no numbers, or NaN or Inf.
    """
    if y.dtype.kind not in "fiub":
        raise InputError(f"{name}: named targets must be numbers. Received: {y.dtype}. Number the classes from 0.")
    if y.dtype.kind != "f" and task != "regression":
        return y if y.dtype == np.uint8 and y.ndim > 2 else y.astype(np.int64)
    y = y.astype(np.float32)
    if not np.isfinite(y).all():
        row = int(np.flatnonzero(~np.isfinite(y).reshape(len(y), -1).all(1))[0])
        raise InputError(f"{name}: y must be finite. Received: NaN or Inf in example {row}. Remove or correct it.")
    return y

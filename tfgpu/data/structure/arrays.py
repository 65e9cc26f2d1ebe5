"""Arrays beside the classes of examples: numbers to predict, named inputs and targets, sample weights.

They are kept in memory and gathered by index when a batch is made, so order, splits and each worker's rows are the same
as for any other source.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data.augmentation.targets import MASKS
from tfgpu.data.names import TASKS
from tfgpu.data.position import on_cpu
from tfgpu.errors import InputError, unknown


@dataclass(frozen=True)
class Structure:
    """Arrays of one row per example.

    Attributes:
        inputs: nested dicts of arrays; None: the examples themselves.
        targets: the same for what the model learns; None: the classes.
        weights: float32 [n], or None.
        class_names: the names of a target's classes, by the target's name, where labels were texts.
        planes: how many of an image's last channels are masks, which become the target `segmentation_masks`.

    Example:
        >>> structure = Structure(targets=np.array([0.5, 1.5, 2.5]))
        >>> structure.gatherer()(tf.constant([2, 0]))[1].numpy().tolist()
        [2.5, 0.5]
    """

    inputs: Any = None
    targets: Any = None
    weights: np.ndarray | None = None
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    planes: int = 0

    def gatherer(self) -> Callable[[tf.Tensor], tuple[Any, Any, Any]]:
        """Returns a function from indices to inputs, targets and weights; None for what is missing."""

        def reader(values: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
            tensor = on_cpu(values)
            return lambda index: tf.gather(tensor, index)

        readers = [None if each is None else tf.nest.map_structure(reader, each) for each in self.all()]

        def gather(index: tf.Tensor) -> tuple[Any, Any, Any]:
            return tuple(
                None if each is None else tf.nest.map_structure(lambda read: read(index), each) for each in readers
            )

        return gather

    def joined(self, *others: "Structure") -> "Structure":
        """This structure's rows, followed by the others'; raises `ValueError` or `TypeError` if they do not match."""
        found = []
        for each in zip(*(one.all() for one in (self, *others)), strict=True):
            if any(one is None for one in each) and not all(one is None for one in each):
                raise ValueError("some have inputs, targets or weights that others do not have")
            found.append(None if each[0] is None else tf.nest.map_structure(lambda *rows: np.concatenate(rows), *each))
        return Structure(*found)

    def all(self) -> tuple[Any, Any, Any]:
        """Inputs, targets and weights."""
        return self.inputs, self.targets, self.weights


Task = str | Mapping[str, str] | None


def check_task(task: Task) -> None:
    """Raises `InputError` for an unknown task, of all labels or of one target."""
    for each in task.values() if isinstance(task, Mapping) else (task,):
        if each is not None and each not in TASKS:
            raise unknown("task", each, TASKS)


def has_numbers(y: np.ndarray, task: Task, name: str) -> bool:
    """Whether labels are numbers to predict, not classes.

    Args:
        y: the labels.
        task: what the user gave; None decides by the labels: floats that are not all whole, or several per row.
        name: the source's name, for errors.

    Raises:
        InputError: rows that look like one-hot classes, without a task; labels that are not numbers, for regression;
            texts among numbers.

    Example:
        >>> has_numbers(np.array([1.0, 2.0]), None, "a"), has_numbers(np.array([1.0, 2.5]), None, "a")
        (False, True)
    """
    if isinstance(task, Mapping):
        raise InputError(
            f"{name}: a task by name needs named targets. Received: {', '.join(task)}, for one unnamed array of labels."
        )
    if y.dtype.kind in "USO" and task != "classification" and y.ndim:
        _check_texts(y, task, name)
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


def _check_texts(y: np.ndarray, task: str | None, name: str) -> None:
    """Refuses texts as numbers, and a few texts among numbers that are not whole, which would become classes."""
    parsed = np.array([number_of(text) for text in y.ravel().tolist()])
    is_text = np.isnan(parsed)
    among = ~is_text & (parsed != np.floor(parsed))
    if is_text.any() and (task == "regression" or among.any() and is_text.sum() * 2 < is_text.size):
        row = int(np.flatnonzero(is_text)[0])
        raise InputError(
            f"{name}: regression needs numbers as labels. Received: {str(y.ravel()[row])!r} in example "
            f"{row // (y.size // len(y))}, of {is_text.sum()} text(s) among {y.size} labels. Correct or remove these "
            "rows, or use task='classification' (--task classification) if the texts are classes."
        )


def number_of(text: Any) -> float:
    """The number that a text spells, else NaN.

    Example:
        >>> number_of("2.5"), number_of("cheap")
        (2.5, nan)
    """
    try:
        return float(text)
    except (TypeError, ValueError):
        return float("nan")


def numbers(y: np.ndarray, task: str | None, name: str) -> np.ndarray:
    """Numbers to predict: float32 for floats and for regression; int64 for other integers; uint8 masks as they are.

    Args:
        y: rows of numbers.
        task: the task that the user gave for them.
        name: the source's name, for errors.

    Raises:
        InputError: values that are not numbers, or NaN or Inf.
    """
    if y.dtype.kind not in "fiub":
        raise InputError(f"{name}: named targets must be numbers. Received: {y.dtype}. Number the classes from 0.")
    if y.dtype.kind != "f" and task != "regression":
        return y if y.dtype == np.uint8 and y.ndim > 2 else y.astype(np.int64)
    y = y.astype(np.float32)
    check_finite(f"{name}: y", y)
    return y


def check_finite(what: str, rows: np.ndarray, first: int = 0) -> None:
    """Raises `InputError` for NaN or Inf; `first` is the number of the first row."""
    is_finite = np.isfinite(rows).reshape(len(rows), -1).all(1)
    if not is_finite.all():
        raise InputError(
            f"{what} must be finite. Received: NaN or Inf in example {first + int(is_finite.argmin())} (the first is "
            "0). Remove or correct it."
        )


@dataclass(frozen=True)
class Target:
    """What a model learns under one name.

    Attributes:
        kind: `"class"`, one per example; `"places"`, a class at each place of a sequence or a mask; `"numbers"`; or
            `"other"`, such as boxes.
        shape: for one example; () for a class and for one number.
        classes: the number of classes, also of boxes if their labels are known; 0 for masks in files, which are not all
            read to count them.
        class_names: one name for each of them.
    """

    kind: str
    shape: tuple[int, ...] = ()
    classes: int = 0
    class_names: tuple[str, ...] = ()


def targets_of(structure: Structure | None, shape: Any = ()) -> Target | Mapping[str, Target] | None:
    """The target, or the targets by name; None where the model learns classes or tokens alone.

    Args:
        structure: of the examples.
        shape: of one example's inputs.

    Example:
        >>> targets_of(Structure(targets=np.array([[0.5, 1.5]], "float32")))
        Target(kind='numbers', shape=(2,), classes=0, class_names=())
    """
    if structure is None or structure.targets is None:
        return None
    if not isinstance(structure.targets, Mapping):
        return _target(structure.targets, ())
    found = {name: _target(each, structure.class_names.get(name, ())) for name, each in structure.targets.items()}
    return found | {MASKS: Target("places", tuple(shape[:2]))} if structure.planes else found


def _target(values: Any, class_names: tuple[str, ...]) -> Target:
    if isinstance(values, Mapping):
        labels = values.get("labels")
        found = int(labels.max()) + 1 if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" else 0
        return Target("other", (), len(class_names) or max(found, 0), class_names)
    if values.dtype.kind == "f":
        return Target("numbers", values.shape[1:])
    if values.min() < 0:
        return Target("other", values.shape[1:])
    classes = int(values.max()) + 1
    if values.ndim > 1:
        return Target("places", values.shape[1:], classes)
    return Target("class", (), classes, class_names or tuple(map(str, range(classes))))

"""Accuracy and forgetting over a sequence of tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfgpu.errors import InputError


@dataclass(frozen=True)
class Accuracies:
    """The accuracy on each task after training on each task.

    Attributes:
        matrix: float [tasks, tasks]: row i, column j is the accuracy on task j after training on task i.

    Example:
        >>> found = Accuracies(np.array([[0.9, 0.1], [0.5, 0.8]]))
        >>> found.average, found.forgetting, found.backward_transfer
        (0.65, 0.4, -0.4)

    Sources: D. Lopez-Paz and M. Ranzato, "Gradient Episodic Memory", 2017, arXiv:1706.08840 (average, transfer);
    A. Chaudhry et al., "Riemannian Walk", 2018, arXiv:1801.10112 (forgetting).
    """

    matrix: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", np.asarray(self.matrix, float))
        shape = self.matrix.shape
        if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
            raise InputError(f"`matrix` must have one row and one column per task. Received: shape {shape}.")

    @property
    def average(self) -> float:
        """The mean accuracy on all tasks after the last one."""
        return float(np.mean(self.matrix[-1]))

    @property
    def averages(self) -> list[float]:
        """The mean accuracy on the tasks seen so far, after each task."""
        return [float(np.mean(self.matrix[at, : at + 1])) for at in range(len(self.matrix))]

    @property
    def forgetting(self) -> float:
        """The best earlier accuracy minus the last one, averaged over all tasks but the last; 0 for a single task."""
        best = [np.max(self.matrix[at:-1, at]) for at in range(len(self.matrix) - 1)]
        return float(np.mean(best - self.matrix[-1, :-1])) if best else 0.0

    @property
    def backward_transfer(self) -> float:
        """The last accuracy minus that right after the task; negative if it was forgotten; 0 for a single task."""
        change = self.matrix[-1, :-1] - np.diag(self.matrix)[:-1]
        return float(np.mean(change)) if len(change) else 0.0


def accuracies(
    model: keras.Model,
    tasks: Sequence[tuple[Any, ...]],
    *,
    classes: Sequence[Sequence[int]] | None = None,
    batch_size: int = 256,
) -> list[float]:
    """Measures the accuracy on each task: a row of `Accuracies`.

    Args:
        model: a classifier, whose outputs are logits or probabilities.
        tasks: `(x, y)` per task, with class indices or one column per class. Examples of classes that the model lacks
            count as wrong.
        classes: None (the default) lets the model choose among all its classes (class-incremental: the task of an
            example is unknown); or the classes of each task to choose from (task-incremental).
        batch_size: of `predict`.

    Raises:
        InputError: the model has several outputs or a single column, a task has no rows, or labels do not match.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Identity()])
        >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
        >>> accuracies(model, [(x, [0, 1]), (x, [0, 0])])
        [1.0, 0.5]
    """
    if classes is not None and len(classes) != len(tasks):
        raise InputError(f"`classes` must have one entry per task. Received: {len(classes)} for {len(tasks)} tasks.")
    found = []
    for at, (x, y) in enumerate(tasks):
        labels = np.asarray(y)
        if not labels.size:
            raise InputError(f"Task {at} has no rows. Remove it.")
        outputs = model.predict(x, batch_size=batch_size, verbose=0)
        labels = _fitted(at, labels, outputs)
        if classes is not None:
            allowed = [c for c in classes[at] if c < outputs.shape[-1]]
            others = np.setdiff1d(np.arange(outputs.shape[-1]), allowed)
            outputs[..., others] = -np.inf
        found.append(float(np.mean(outputs.argmax(-1) == labels)))
    return found


def _fitted(at: int, labels: np.ndarray, outputs: Any) -> np.ndarray:
    """Returns class indices, one per prediction."""
    if not isinstance(outputs, np.ndarray):
        raise InputError(f"The model must have one output. Received: {len(outputs)}. Use a model with one of them.")
    if outputs.shape[-1] < 2:
        raise InputError("The model has one output column. It needs one per class, also for two classes.")
    if labels.ndim == outputs.ndim:  # one column per class, or a single one
        labels = labels[..., 0] if labels.shape[-1] == 1 else labels.argmax(-1)
    if labels.shape != outputs.shape[:-1]:
        raise InputError(
            f"Task {at} has labels {labels.shape} for outputs {outputs.shape}. Use one label per prediction."
        )
    return labels

"""The results of a study, and their form on a terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrialResult:
    """One trial.

    Attributes:
        number: from 0; its run directory is `trials/NNNN`.
        status: "complete", "pruned", "diverged", "out of memory", "timed out", "failed", or "running".
        settings: the drawn settings, by name.
        value: the minimized value, for the final weights of the run; None unless it is complete.
        val_loss: the validation loss of the same weights.
        epochs: the value after each epoch, by the epoch's number, from 1.
        reason: why it is not complete.
        time_s: its duration, including the start of its process.
        test_accuracy: test accuracy of the final weights; None if it is not complete, or not in the journal.
    """

    number: int
    status: str
    settings: Mapping[str, Any]
    value: float | None = None
    val_loss: float | None = None
    epochs: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""
    time_s: float = 0.0
    test_accuracy: float | None = None

    @property
    def folder(self) -> str:
        """Its run directory, relative to the study's folder.

        Example:
            >>> TrialResult(7, "complete", {}).folder
            'trials/0007'
        """
        return f"trials/{self.number:04d}"


@dataclass(frozen=True)
class StudyResult:
    """The result of a study.

    Attributes:
        folder: the folder of the study.
        monitor: the minimized value, such as "val_error".
        trials: all trials, in order.
        best: the complete trial with the lowest value; among equals, the one with the lowest validation loss.
        own: the trial with the recipe's own settings; None if the search space excludes them.
        recipe_file: `best.yaml`, for `tfgpu train`.
        test_accuracy: test accuracy of the best trial; the test data was not used for the selection.
        own_test_accuracy: test accuracy of the recipe's own settings.
    """

    folder: Path
    monitor: str
    trials: tuple[TrialResult, ...]
    best: TrialResult
    own: TrialResult | None
    recipe_file: Path
    test_accuracy: float | None
    own_test_accuracy: float | None


def best_of(trials: tuple[TrialResult, ...]) -> TrialResult | None:
    """The complete trial with the lowest value; ties are resolved by the validation loss, then by the number.

    Example:
        >>> best_of((TrialResult(0, "complete", {}, 0.1, 0.5), TrialResult(1, "complete", {}, 0.1, 0.4))).number
        1
    """
    return next((trial for trial in by_value(trials) if trial.status == "complete" and trial.value is not None), None)


def by_value(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Sorts trials, the best first and incomplete ones last.

    Example:
        >>> trials = [TrialResult(0, "failed", {}), TrialResult(1, "complete", {}, 0.2)]
        >>> [trial.number for trial in by_value(trials)]
        [1, 0]
    """

    def rank(trial: TrialResult) -> tuple[float, ...]:
        return (*(math.inf if each is None else each for each in (trial.value, trial.val_loss)), trial.number)

    return sorted(trials, key=rank)


def text_of(value: float | None, monitor: str) -> str:
    """Formats a value; errors in percent.

    Example:
        >>> text_of(0.0278, "val_error"), text_of(0.0278, "val_loss")
        ('2.78%', '0.0278')
    """
    if value is None:
        return ""
    return f"{value:.2%}" if monitor == "val_error" else f"{value:.4g}"


def setting_text(value: Any) -> str:
    """Formats a setting's value with few digits.

    Example:
        >>> setting_text(0.00123456), setting_text("adam")
        ('0.00123', 'adam')
    """
    return f"{value:.3g}" if isinstance(value, float) else str(value)

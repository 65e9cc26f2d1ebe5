"""What a study came to, as facts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMED = 5
"""Folders that are named where many are gone."""


@dataclass(frozen=True)
class TrialResult:
    """One trial.

    Attributes:
        number: from 0; its run directory is `trials/NNNN`.
        status: "complete", "pruned", "diverged", "out of memory", "timed out", "failed", or "running".
        settings: what was drawn, by name.
        value: what the study minimises, of the weights that the run ended with; None unless it is complete.
        val_loss: of the same weights.
        epochs: the value after each epoch, by the epoch's number, from 1.
        reason: why it is not complete.
        time_s: how long it took, the start of its process included.
        test_accuracy: of the weights that the run ended with; None where it is not complete, or not in the journal.
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
        """Of its run directory, in the study's.

        Example:
            >>> TrialResult(7, "complete", {}).folder
            'trials/0007'
        """
        return f"trials/{self.number:04d}"


@dataclass(frozen=True)
class StudyResult:
    """What a study came to.

    Attributes:
        folder: the study's.
        monitor: what was minimised, such as "val_error".
        trials: all of them, in order.
        best: the complete trial with the least value; among equals, the one with the least validation loss.
        own: the trial with the recipe's own settings; None where the search leaves them out.
        recipe_file: `best.yaml`, which `tfgpu train` takes.
        test_accuracy: of the best trial; the test part was used for nothing else. None where a study of an earlier
            version lost the trial's folder, and with it the number.
        own_test_accuracy: of the recipe's own settings.
        importances: the share of the spread of the values that each setting explains.
        missing: numbers of the trials, complete or pruned, whose folders are gone.
    """

    folder: Path
    monitor: str
    trials: tuple[TrialResult, ...]
    best: TrialResult
    own: TrialResult | None
    recipe_file: Path
    test_accuracy: float | None
    own_test_accuracy: float | None
    importances: Mapping[str, float]
    missing: tuple[int, ...] = ()

    @property
    def missing_text(self) -> str:
        """What is gone and what that means, in a sentence; empty where nothing is."""
        if not self.missing:
            return ""
        whose = ", ".join(f"trials/{number:04d}" for number in self.missing[:_NAMED])
        more = len(self.missing) - _NAMED
        whose += f" and {more} more" if more > 0 else ""
        gone = "is gone: its" if len(self.missing) == 1 else "are gone: their"
        text = f"{whose} {gone} weights and reports are lost; settings and values are from the journal."
        return text if self.test_accuracy is not None else f"{text} The best trial's test error is lost too."


def best_of(trials: tuple[TrialResult, ...]) -> TrialResult | None:
    """The complete trial with the least value; among equals the least validation loss, then the earliest.

    Example:
        >>> best_of((TrialResult(0, "complete", {}, 0.1, 0.5), TrialResult(1, "complete", {}, 0.1, 0.4))).number
        1
    """
    complete = [trial for trial in trials if trial.status == "complete" and trial.value is not None]
    if not complete:
        return None
    return min(complete, key=lambda t: (t.value, t.val_loss if t.val_loss is not None else float("inf"), t.number))

"""The best epoch, by an entry of the logs."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfgpu.checkpoint.manifest import Position
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)

_RISING = ("acc", "accuracy", "auc", "f1_score", "fbeta_score", "precision", "recall", "iou", "r2_score")
_DEFAULT = "val_loss"


class Best:
    """Compares epochs.

    Args:
        name: the entry of the logs; None compares nothing.
        mode: `"min"`, `"max"`, or `"auto"`: `"max"` if the name ends like that of an accuracy, AUC, F score,
            precision, recall, IoU or R2, else `"min"`.

    Raises:
        InputError: the mode is unknown.

    Example:
        >>> Best("val_accuracy").place([{"val_accuracy": 0.5}, {"val_accuracy": 0.9}, {"loss": 1.0}])
        1
    """

    def __init__(self, name: str | None = _DEFAULT, mode: str = "auto"):
        if mode not in ("auto", "min", "max"):
            raise InputError(f'`mode` must be "auto", "min" or "max". Received: {mode!r}.')
        self._name = name
        rises = mode == "max" or (mode == "auto" and str(name).endswith(_RISING))
        self._sign = -1 if rises else 1
        self._is_warned = name in (None, _DEFAULT)

    def place(self, rows: Sequence[Mapping[str, Any]]) -> int | None:
        """The index of the first best row; None if no row has a finite value of the entry."""
        values = {at: row[self._name] for at, row in enumerate(rows) if self._name in row}
        if rows and not values and not self._is_warned:
            self._is_warned = True
            names = [*rows[-1]]
            _log.warning("best=%r is not in the logs, so no best checkpoint is kept. They have %s.", self._name, names)
        finite = {at: value for at, value in values.items() if math.isfinite(value)}
        return min(finite, key=lambda at: self._sign * finite[at], default=None)

    def epoch(self, position: Position) -> int | None:
        """The number of epochs done at the end of the best one; None if no row has a finite value of the entry."""
        at = self.place(position.history)
        return None if at is None else position.epoch - len(position.history) + at + 1

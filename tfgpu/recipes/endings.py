"""How a run ends: when it stops, and with which weights. The callbacks of `early_stopping` and `weight_average`."""

from collections.abc import Sequence
from typing import Any

import keras

from tfgpu.callbacks.averages import EvaluateAverages, StochasticWeightAverage
from tfgpu.recipes import agreement
from tfgpu.recipes.recipe import Recipe


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's, which keeps the best epoch's averages where averages are what is validated.

    Args:
        averages: the callback that validates them, or None.

    The other arguments are Keras's.
    """

    def __init__(self, averages: EvaluateAverages | None = None, **settings: Any):
        super().__init__(**settings)
        self._averages = averages

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        before = self.best_weights
        super().on_epoch_end(epoch, logs)
        if self._averages is not None and self.best_weights is not before:
            self.best_weights = self._averages.averaged()


def callbacks(what: Recipe, data) -> tuple[keras.callbacks.Callback, ...]:
    """The callbacks that a recipe's `early_stopping` and `weight_average` ask for, in their order.

    Args:
        what: the recipe.
        data: the run's data, whose training part averaged weights need for BatchNormalization.
    """
    average, stopping = agreement.weight_average(what), agreement.early_stopping(what)
    found: list[keras.callbacks.Callback] = []
    averages = EvaluateAverages() if isinstance(average, agreement.MovingAverage) else None
    if averages is not None:
        found.append(averages)
    if stopping is not None:
        found.append(
            EarlyStopping(
                averages,
                monitor=stopping.monitor,
                mode=_mode(stopping),
                min_delta=stopping.min_delta,
                patience=what.early_stopping,
                start_from_epoch=stopping.start_epoch - 1,
                restore_best_weights=stopping.restore_best,
            )
        )
    if isinstance(average, agreement.LastEpochs):
        found.append(StochasticWeightAverage(average.first(what.epochs), every=average.every, data=data))
    return tuple(found)


def ends_with(made: Sequence[keras.callbacks.Callback]) -> str:
    """Says which weights a finished run has, by its callbacks."""
    mean = next((one for one in made if isinstance(one, StochasticWeightAverage)), None)
    if mean is not None and mean.averaged:
        return f"the mean of {mean.averaged} epoch{'s' if mean.averaged > 1 else ''}"
    which = "moving averages" if any(isinstance(one, EvaluateAverages) for one in made) else "weights"
    stopping = next((one for one in made if isinstance(one, EarlyStopping)), None)
    if stopping is not None and stopping.restore_best_weights and stopping.best_weights is not None:
        return f"the {which} of the best epoch, {stopping.best_epoch + 1}"
    return f"the {which} of the last epoch"


def _mode(stopping: agreement.EarlyStopping) -> str:
    if stopping.mode != "auto":
        return stopping.mode
    return "max" if stopping.monitor.endswith("accuracy") else "min"

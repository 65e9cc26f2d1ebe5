"""The callbacks of `early_stopping` and `weight_average`: when a run stops, and its final weights."""

from collections.abc import Sequence
from typing import Any

import keras

from tfgpu.callbacks.averages import EvaluateAverages
from tfgpu.recipes import agreement
from tfgpu.recipes.recipe import Recipe

BEGINNING = 0.1
"""A moving average with a larger share of the first step's weights has seen too few steps."""


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's EarlyStopping, which restores averaged weights if these are validated.

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


def callbacks(what: Recipe) -> tuple[keras.callbacks.Callback, ...]:
    """Creates the callbacks of a recipe's `weight_average` and `early_stopping`, in their order."""
    stopping = agreement.early_stopping(what)
    averages = EvaluateAverages() if agreement.weight_average(what) is not None else None
    found: list[keras.callbacks.Callback] = [averages] if averages is not None else []
    if stopping is not None:
        found.append(
            EarlyStopping(
                averages,
                monitor=stopping.monitor,
                mode=stopping.direction,
                min_delta=stopping.min_delta,
                patience=what.early_stopping,
                start_from_epoch=stopping.start_epoch - 1,
                restore_best_weights=stopping.restore_best,
            )
        )
    return tuple(found)


def ends_with(made: Sequence[keras.callbacks.Callback]) -> str:
    """Describes a finished run's final weights, by its callbacks."""
    which = "moving averages" if any(isinstance(one, EvaluateAverages) for one in made) else "weights"
    stopping = next((one for one in made if isinstance(one, EarlyStopping)), None)
    if stopping is not None and stopping.restore_best_weights and stopping.best_weights is not None:
        return f"the {which} of the best epoch, {stopping.best_epoch + 1}"
    return f"the {which} of the last epoch"


def about_average(what: Recipe, optimizer: keras.optimizers.Optimizer, *, steps_per_epoch: int) -> str | None:
    """Returns a warning if a moving average will be dominated by the initial weights.

    Keras starts an average with the weights after the first step, and keeps `ema_momentum` of it at each later one.

    Args:
        what: the recipe.
        optimizer: the compiled one.
        steps_per_epoch: of the training.

    Returns:
        A sentence with the share and what to do; None without such an average, or if it has enough steps.

    Example:
        >>> made = keras.optimizers.SGD(use_ema=True, ema_momentum=0.99)
        >>> about_average(Recipe(epochs=20), made, steps_per_epoch=40) is None
        True
        >>> "46.1%" in about_average(Recipe(epochs=2), made, steps_per_epoch=39)  # 0.99 ** 77
        True
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    later = what.epochs * steps_per_epoch - 1
    if not inner.use_ema or inner.ema_overwrite_frequency or later < 1:
        return None
    share = inner.ema_momentum**later
    if share <= BEGINNING:
        return None
    return (
        f"This run ends with a moving average in which the weights of the first step have a share of {share:.1%}. More "
        f"than {BEGINNING:.0%} makes poor weights. Lower the momentum, or train for more epochs."
    )

"""Recipe settings that depend on each other: early stopping, weight averages, weight decay. Imports no TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tfgpu.errors import InputError, is_number, unknown, whole_number


@dataclass(frozen=True)
class EarlyStopping:
    """When a run stops early.

    Attributes:
        monitor: the metric in the logs.
        mode: "min", "max", or "auto": "max" for accuracies.
        min_delta: the smallest change that counts as an improvement.
        start_epoch: the first epoch, from 1, that counts.
        restore_best: end with the weights of the best epoch.
    """

    monitor: str = "val_loss"
    mode: str = "auto"
    min_delta: float = 0.0
    start_epoch: int = 1
    restore_best: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or not self.monitor:
            raise ValueError(f"`monitor` must be a metric's name such as 'val_loss'. Received: {self.monitor!r}")
        if self.mode not in ("auto", "min", "max"):
            raise ValueError(_plain(unknown("mode", self.mode, ("auto", "min", "max"))))
        _check_number("min_delta", self.min_delta, is_number(self.min_delta) and self.min_delta >= 0)
        whole_number("start_epoch", self.start_epoch)
        if not isinstance(self.restore_best, bool):
            raise ValueError(f"`restore_best` must be true or false. Received: {self.restore_best!r}")


@dataclass(frozen=True)
class MovingAverage:
    """`weight_average: ema`: `momentum` is the share of the average that each update keeps."""

    momentum: float = 0.99

    def __post_init__(self) -> None:
        _check_number("momentum", self.momentum, is_number(self.momentum) and 0 < self.momentum < 1)


@dataclass(frozen=True)
class LastEpochs:
    """`weight_average: swa`: the first epoch to average, from 1 (None: after three quarters), and the interval."""

    start_epoch: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.start_epoch is not None:
            whole_number("start_epoch", self.start_epoch)
        whole_number("every", self.every)

    def first(self, epochs: int) -> int:
        """The first epoch to average, from 0.

        Example:
            >>> LastEpochs().first(8), LastEpochs(start_epoch=3).first(8)
            (6, 2)
        """
        return epochs * 3 // 4 if self.start_epoch is None else self.start_epoch - 1


_AVERAGES = {"ema": MovingAverage, "swa": LastEpochs}


def early_stopping(what: Any) -> EarlyStopping | None:
    """Returns when a recipe's run stops early; None: never.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    options = what.early_stopping_options
    if what.early_stopping is None:
        _check_unused("early_stopping", options)
        return None
    return _made(EarlyStopping, options, "early_stopping")


def weight_average(what: Any) -> MovingAverage | LastEpochs | None:
    """Returns which average of weights a recipe's run ends with; None: the last weights.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    if what.weight_average == "none":
        _check_unused("weight_average", what.weight_average_options)
        return None
    return _made(_AVERAGES[what.weight_average], what.weight_average_options, f"weight_average {what.weight_average}")


def check(what: Any) -> None:
    """Rejects settings that contradict each other.

    Args:
        what: a recipe.

    Raises:
        ValueError: names the settings and the fix.
    """
    for name in ("initializer", "normalization", "dropout"):
        if getattr(what, name) is not None and name in what.model_options:
            raise ValueError(f"`{name}` and {name!r} in `model_options` are the same setting. Keep one of them")
    stopping, average = early_stopping(what), weight_average(what)
    if isinstance(average, MovingAverage) and (given := {"use_ema", "ema_momentum"} & what.optimizer_options.keys()):
        raise ValueError(
            f"`weight_average: ema` sets the optimizer's averages. Received: {sorted(given)[0]!r} in "
            "`optimizer_options` too. Remove it, and use `weight_average_options`"
        )
    if isinstance(average, LastEpochs):
        if stopping is not None and stopping.restore_best:
            raise ValueError(
                "`early_stopping` would replace the mean of `weight_average: swa` with the best weights. Add "
                "`restore_best: false` to `early_stopping_options`, or use `weight_average: ema`"
            )
        if average.first(what.epochs) >= what.epochs:
            raise ValueError(
                f"`weight_average: swa` must start before the training ends. Received: start_epoch="
                f"{average.start_epoch} of {what.epochs} epochs. Start earlier, or train longer"
            )
    if what.decay == "all" and what.optimizer.lower() == "lars":
        raise ValueError("LARS never decays biases and normalization scales. Received: decay='all'. Use `decay: auto`")


def _made(kind: type, options: Mapping[str, Any], where: str):
    names = [field.name for field in fields(kind)]
    for name in options:
        if name not in names:
            raise ValueError(_plain(unknown(f"option of {where}", name, names)))
    try:
        return kind(**options)
    except InputError as error:
        raise ValueError(_plain(error)) from None


def _check_unused(name: str, options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"`{name}_options` need `{name}`. Received: {dict(options)}. Set it, or remove the options")


def _check_number(name: str, value: Any, is_right: bool) -> None:
    bounds = {"min_delta": "a number of at least 0", "momentum": "a number above 0 and below 1"}
    if not is_right:
        raise ValueError(f"`{name}` must be {bounds[name]}. Received: {name}={value!r}")


def _plain(error: InputError) -> str:
    """Returns the message without its period, which the schema adds."""
    return str(error).removesuffix(".")

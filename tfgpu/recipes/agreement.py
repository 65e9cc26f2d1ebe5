"""Recipe settings that depend on each other: early stopping, weight averages, weight decay. Imports no TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tfgpu.errors import InputError, is_number, unknown, whole_number
from tfgpu.recipes.wording import is_rising


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
        if not (is_number(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"`min_delta` must be a number of at least 0. Received: min_delta={self.min_delta!r}")
        whole_number("start_epoch", self.start_epoch)
        if not isinstance(self.restore_best, bool):
            raise ValueError(f"`restore_best` must be true or false. Received: {self.restore_best!r}")

    @property
    def direction(self) -> str:
        """`"max"` if more of the metric is better, else `"min"`."""
        if self.mode != "auto":
            return self.mode
        return "max" if is_rising(self.monitor) else "min"


@dataclass(frozen=True)
class MovingAverage:
    """`weight_average: ema`: `momentum` is the share of the average that each update keeps."""

    momentum: float = 0.99

    def __post_init__(self) -> None:
        if not (is_number(self.momentum) and 0 < self.momentum < 1):
            raise ValueError(f"`momentum` must be a number above 0 and below 1. Received: momentum={self.momentum!r}")


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


def weight_average(what: Any) -> MovingAverage | None:
    """Returns the average of weights that a recipe's run ends with; None: the last weights.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    if what.weight_average == "none":
        _check_unused("weight_average", what.weight_average_options)
        return None
    return _made(MovingAverage, what.weight_average_options, "weight_average ema")


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
    early_stopping(what)
    if weight_average(what) is not None and (given := {"use_ema", "ema_momentum"} & what.optimizer_options.keys()):
        raise ValueError(
            f"`weight_average: ema` sets the optimizer's averages. Received: {sorted(given)[0]!r} in "
            "`optimizer_options` too. Remove it, and use `weight_average_options`"
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


def _plain(error: InputError) -> str:
    """Returns the message without its period, which the schema adds."""
    return str(error).removesuffix(".")

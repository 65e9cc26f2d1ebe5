"""How metrics and settings are written for readers. Imports no TensorFlow."""

from collections.abc import Mapping
from typing import Any

_RISING = ("accuracy", "r2_score")
_WORDS = {"mae": "MAE", "rmse": "RMSE", "r2_score": "R²"}


def title(name: str) -> str:
    """A metric's name in words.

    Example:
        >>> title("val_price_mae"), title("test_accuracy")
        ('validation price MAE', 'test accuracy')
    """
    for ending, words in _WORDS.items():
        if name == ending or name.endswith(f"_{ending}"):
            name = f"{name[: -len(ending)]}{words}"
    return name.replace("val_", "validation ").replace("_", " ")


def is_rising(name: str) -> bool:
    """Whether more of a metric is better.

    Example:
        >>> is_rising("val_price_r2_score"), is_rising("val_loss")
        (True, False)
    """
    return name.endswith(_RISING)


def value(name: str, number: float) -> str:
    """A metric's value, by the metric's name.

    Example:
        >>> value("accuracy", 0.981), value("perplexity", 12.345), value("price_mae", 0.123456)
        ('98.1%', '12.35', '0.1235')
    """
    if name.endswith("accuracy"):
        return f"{number:.1%}"
    return f"{number:.2f}" if name.endswith("perplexity") else f"{number:.4g}"


def plain(value: Any, between: str = ", ") -> str:
    """A setting or fact as text, with `between` between the items of a list.

    Example:
        >>> plain({"rates": [0.1, 0.2], "jit": True}), plain(None)
        ('rates=0.1, 0.2, jit=yes', '-')
    """
    if value is None or value in ({}, (), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={plain(item, between)}" for key, item in value.items())
    return between.join(plain(item, between) for item in value) if isinstance(value, list | tuple) else str(value)


def seconds(value: float) -> str:
    """A duration, in minutes from two on.

    Example:
        >>> seconds(119.5), seconds(120)
        ('119.5 s', '2.0 min')
    """
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def score(name: str, number: float) -> str:
    """A metric's name and value.

    Example:
        >>> score("test_rmse", 2.5)
        'test RMSE: 2.5'
    """
    return f"{title(name)}: {value(name, number)}"

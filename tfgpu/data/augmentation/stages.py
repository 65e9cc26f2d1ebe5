"""The names and options of augmentation stages. Imports no TensorFlow, so a wrong name or value fails at once."""

from collections.abc import Iterable, Mapping
from typing import Any

from tfgpu.errors import InputError, unknown

#: Every augmentation stage with its options and their defaults; `tfgpu.data.augmentation.augment` says what they do.
STAGES: Mapping[str, Mapping[str, object]] = {
    "flip": {"horizontal": True, "vertical": False},
    "crop": {"padding": 4, "fill": "constant"},
    "shift": {"fraction": 0.1, "fill": "constant"},
    "rotate": {"degrees": 10.0, "fill": "constant"},
    "zoom": {"fraction": 0.1, "fill": "constant"},
    "brightness": {"fraction": 0.2},
    "contrast": {"fraction": 0.2},
    "saturation": {"fraction": 0.2},
    "hue": {"fraction": 0.05},
    "noise": {"stddev": 0.05},
    "cutout": {"fraction": 0.25},
    "mixup": {"alpha": 0.2, "probability": 1.0},
    "cutmix": {"alpha": 1.0, "probability": 1.0},
}
FILLS = ("constant", "reflect", "nearest")
COLOR = ("saturation", "hue")  # need three color channels
MIXING = ("mixup", "cutmix")  # mix examples and their labels

_BOUNDS = {  # option -> (check, description)
    "padding": (lambda v: v % 1 == 0 and v >= 1, "a whole number of pixels from 1"),
    "fraction": (lambda v: 0 < v < 1, "between 0 and 1"),
    "degrees": (lambda v: 0 < v <= 180, "above 0 and at most 180"),
    "stddev": (lambda v: v > 0, "above 0"),
    "alpha": (lambda v: 0 < v < float("inf"), "above 0"),
    "probability": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
}


def parse_stages(augment: str | Iterable[Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Checks a list of augmentation stages and adds their default options.

    Args:
        augment: a stage's name, or a sequence of names and `(name, options)` pairs; `"none"` is the empty sequence.
            `"auto"` depends on the data and is not resolved here.

    Returns:
        A `(name, options)` pair per stage, with every option.

    Raises:
        InputError: an unknown stage or option, or a value out of range.

    Example:
        >>> parse_stages(["flip", ("rotate", {"degrees": 5})])[1]
        ('rotate', {'degrees': 5, 'fill': 'constant'})
    """
    items = [augment] if isinstance(augment, str) else list(augment or ())
    if items == ["none"]:
        return ()
    return tuple(_stage(item) for item in items)


def mixes(stages: Iterable[tuple[str, dict]]) -> bool:
    """Whether one of the stages mixes examples, so that labels become shares of the classes."""
    return any(name in MIXING for name, _ in stages)


def _stage(item) -> tuple[str, dict]:
    if isinstance(item, Mapping) and len(item) == 1:  # as YAML writes it: `- rotate: {degrees: 5}`
        item = next(iter(item.items()))
    item = (item, {}) if isinstance(item, str) else item
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], Mapping)):
        raise InputError(
            f"An augmentation stage is a name or a (name, options) pair. Received: {item!r}. "
            "Write 'flip' or ('rotate', {'degrees': 10})."
        )
    name, given = item
    if name not in STAGES:
        raise unknown("augmentation", name, STAGES)
    for key in given:
        if key not in STAGES[name]:
            raise unknown(f"option of augmentation {name!r}", key, STAGES[name])
    options = {**STAGES[name], **given}
    for key, value in options.items():
        _check_option(name, key, value, default=STAGES[name][key])
    return name, options


def _check_option(name: str, key: str, value: object, *, default: object) -> None:
    where = f"augmentation {name!r}, option {key!r}"
    if key == "fill":
        if value not in FILLS:
            raise unknown(f"fill of augmentation {name!r}", value, FILLS)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InputError(f"{where} must be true or false. Received: {value!r}.")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} must be a number. Received: {value!r}. The default is {default!r}.")
    else:
        is_within, bounds = _BOUNDS[key]
        if not is_within(value):
            raise InputError(f"{where} must be {bounds}. Received: {value!r}. The default is {default!r}.")

"""Converts settings as written in YAML or on the command line to the recipe's types."""

import re
from typing import Any

from tfgpu.data.names import TASKS
from tfgpu.errors import is_whole, unknown
from tfgpu.recipes.reading import parse_value


def stages(value: Any) -> Any:
    """Converts `"flip,rotate"` or `["flip", "rotate: {degrees: 5}"]` to a tuple; `"none"` is the empty one."""
    stages: list[Any] = []
    for part in value if isinstance(value, list | tuple) else [value]:
        if isinstance(part, str) and ":" not in part:
            stages += [name.strip() for name in part.split(",") if name.strip()]
        else:
            stages.append(parse_value(part) if isinstance(part, str) else part)
    if not isinstance(value, str | list | tuple) or not all(map(_is_stage, stages)):
        raise ValueError("should be a list of names, with options in braces, such as [flip, rotate: {degrees: 5}]")
    return () if stages == ["none"] else tuple(stages)


def _is_stage(stage: Any) -> bool:
    if isinstance(stage, dict):
        return len(stage) == 1 and all(isinstance(k, str) and isinstance(v, dict) for k, v in stage.items())
    return isinstance(stage, str)


def devices(value: Any) -> Any:
    """Converts `"2"` to 2 and `"GPU:0,GPU:1"` to two names."""
    if isinstance(value, str):
        value = int(value) if value.strip().isdigit() else value.split(",")
    if value is None or is_whole(value):
        return value
    parts = value if isinstance(value, list | tuple) else ()
    names = tuple(str(part).strip() for part in parts)
    if names and all(re.fullmatch(r"\S*[A-Za-z]+:\d+", name) for name in names):
        return names
    raise ValueError("should be a number of devices, at least 1, or names such as GPU:0,GPU:1")


def task(value: Any) -> Any:
    """Converts `"price=regression,kind=classification"` to a dict; a single task and None stay."""
    if isinstance(value, str) and "=" in value:
        value = dict(pair.strip().split("=", 1) for pair in value.split(",") if "=" in pair)
    given = value.values() if isinstance(value, dict) else [value]
    for each in given:
        if each not in (None, *TASKS):
            raise ValueError(str(unknown("task", each, TASKS)).removesuffix("."))
    return value


def size(value: Any) -> Any:
    """Converts `64`, `"64x48"` or `[64, 48]` to (height, width)."""
    if value is None:
        return None
    text = "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    match = re.fullmatch(r"([1-9]\d*)(?:[xX]([1-9]\d*))?", text)
    if not match:
        raise ValueError("should be a number of pixels, or HEIGHTxWIDTH such as 64x48")
    return int(match[1]), int(match[2] or match[1])

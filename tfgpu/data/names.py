"""What data sources and augmentation stages are called; no TensorFlow: a wrong name fails at once."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfgpu.errors import InputError, unknown

#: Every augmentation stage with its options and their defaults; `tfgpu.data.augment` says what they do.
STAGES: Mapping[str, Mapping[str, object]] = {
    "flip": {"horizontal": True, "vertical": False},
    "crop": {"padding": 4, "fill": "constant"},
    "shift": {"fraction": 0.1, "fill": "constant"},
    "rotate": {"degrees": 10.0, "fill": "constant"},
    "zoom": {"fraction": 0.1, "fill": "constant"},
    "contrast": {"fraction": 0.2},
    "noise": {"stddev": 0.05},
    "cutout": {"fraction": 0.25},
}
FILLS = ("constant", "reflect", "nearest")

_CHOICES = (
    *("digits", "tfds:NAME", "a folder of images by class", "a .tfrecord, .csv or .parquet file", "module:function"),
)
_TABLE = re.compile(r"(?:(csv|parquet):)?(.+?)(?:#([^#/]+))?")
_TABLE_ENDS = {".csv": "csv", ".csv.gz": "csv", ".parquet": "parquet"}
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class SourceName:
    """What `--data` means: `kind` is digits, tfds, function, records, csv, parquet or folder; `value` the rest.

    `label` is the column of a table that holds the label, where it is named.
    """

    kind: str
    value: str
    label: str | None = None


def parse_source(text: str) -> SourceName:
    """Says what kind of source a text names, looking at the disk but reading no data.

    Args:
        text: `"digits"`, `"tfds:NAME"`, `"module:function"`, a folder of images by class, or a file, glob or
            folder of files: `.tfrecord`, `.csv` or `.parquet`. `csv:` or `parquet:` before a name says what other
            endings hold; `#COLUMN` after it names a table's label.

    Returns:
        The kind and the value: a path, a tfds name, or `module:function`.

    Raises:
        InputError: the text is none of these; the message names the closest choice.

    Example:
        >>> parse_source("digits")
        SourceName(kind='digits', value='digits', label=None)
        >>> parse_source("my_project.data:load").kind
        'function'
        >>> parse_source("csv:flowers.txt#species")
        SourceName(kind='csv', value='flowers.txt', label='species')
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"The data source must be a name or a path. Received: {text!r}. Try 'digits'.")
    text = text.strip()
    if text == "digits":
        return SourceName("digits", text)
    if text.startswith("tfds:"):
        name = text.removeprefix("tfds:")
        if not re.fullmatch(r"[\w./:\-]+", name):
            raise InputError(f"'tfds:' needs a data set's name. Received: {text!r}. Try 'tfds:mnist'.")
        return SourceName("tfds", name)
    table = _table(text)
    if table is not None:
        return table
    path = Path(text).expanduser()
    if path.is_dir():
        return SourceName("records" if _holds(path, ".tfrecord") else "folder", str(path))
    if ".tfrecord" in path.name:
        return SourceName("records", str(path))
    if path.exists():
        raise InputError(
            f"Cannot read {text!r} as data: it is a single file and not a .tfrecord, .csv or "
            ".parquet. Give a folder of images by class, such files, or module:function."
        )
    if _FUNCTION.fullmatch(text):
        return SourceName("function", text)
    if "/" in text or "\\" in text:
        raise InputError(f"No such data folder or file: {text!r}. Check the path (it is relative to {Path.cwd()}).")
    raise unknown("data source", text, _CHOICES)


def parse_stages(augment: str | Iterable) -> tuple[tuple[str, dict], ...]:
    """Completes a list of augmentation stages with their default options and checks every name and value.

    Args:
        augment: a stage's name, or a sequence of names and `(name, options)` pairs. `"auto"` is not resolved
            here, because it depends on the data.

    Returns:
        One `(name, options)` pair a stage, every option present.

    Raises:
        InputError: an unknown stage or option, or a value out of range.

    Example:
        >>> parse_stages(["flip", ("rotate", {"degrees": 5})])[1]
        ('rotate', {'degrees': 5, 'fill': 'constant'})
    """
    items = [augment] if isinstance(augment, str) else list(augment or ())
    return tuple(_stage(item) for item in items)


def _stage(item) -> tuple[str, dict]:
    name, given = (item, {}) if isinstance(item, str) else _pair(item)
    if name not in STAGES:
        raise unknown("augmentation", name, STAGES)
    for key in given:
        if key not in STAGES[name]:
            raise unknown(f"option of augmentation {name!r}", key, STAGES[name])
    options = {**STAGES[name], **given}
    for key, value in options.items():
        _check_option(name, key, value, default=STAGES[name][key])
    return name, options


def _pair(item) -> tuple[str, Mapping]:
    if isinstance(item, Mapping) and len(item) == 1:  # as YAML writes it: `- rotate: {degrees: 5}`
        item = next(iter(item.items()))
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], Mapping)):
        raise InputError(
            f"An augmentation stage is a name or a (name, options) pair. Received: {item!r}. "
            "Write 'flip' or ('rotate', {'degrees': 10})."
        )
    return item[0], item[1]


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
    elif key == "padding" and (value != int(value) or value < 1):
        raise InputError(f"{where} must be a whole number of pixels from 1. Received: {value!r}.")
    elif key == "fraction" and not 0 < value < 1:
        raise InputError(f"{where} must be between 0 and 1. Received: {value!r}. The default is {default!r}.")
    elif key == "degrees" and not 0 < value <= 180:
        raise InputError(f"{where} must be above 0 and at most 180. Received: {value!r}.")
    elif key == "stddev" and value <= 0:
        raise InputError(f"{where} must be above 0. Received: {value!r}.")


def _table(text: str) -> SourceName | None:
    """Reads `[csv:|parquet:]PATH[#COLUMN]`; None where it is no table."""
    kind, value, label = _TABLE.fullmatch(text).groups()
    if label and Path(f"{value}#{label}").expanduser().exists():  # The name of a file may have a # in it.
        value, label = f"{value}#{label}", None
    path = Path(value).expanduser()
    if kind is None and path.is_dir():
        found = (kind for end, kind in _TABLE_ENDS.items() if _holds(path, end) and not _holds(path, ".tfrecord"))
        kind = next(found, None)
    elif kind is None:
        kind = next((kind for end, kind in _TABLE_ENDS.items() if path.name.lower().endswith(end)), None)
    return SourceName(kind, str(path), label) if kind else None


def _holds(path: Path, end: str) -> bool:
    return any(end in entry.name for entry in path.iterdir() if not entry.name.startswith("."))

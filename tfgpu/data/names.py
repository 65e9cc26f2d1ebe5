"""The names of data sources. Imports no TensorFlow, so a wrong name fails at once."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfgpu.errors import InputError, unknown

TASKS = ("classification", "regression")

_CHOICES = (
    *("digits", "tfds:NAME", "a folder of images by class", "a .tfrecord, .csv, .parquet or .npz file"),
    "module:function",
    *("images:TABLE.csv#COLUMN", "coco:FILE.json#FOLDER", "masks:FOLDER"),
    *("corpus:PATH", "s3://BUCKET/FOLDER/"),
)
_PICTURES = ("images", "coco", "masks")
_TABLE = re.compile(r"(?:(csv|parquet):)?(.+?)(?:#([^#/]+))?")
TABLE_ENDS = {".csv": "csv", ".csv.gz": "csv", ".parquet": "parquet"}
_TFDS = re.compile(r"\w+(?:/[\w.\-]+)?(?::(?:[\d*]+(?:\.[\d*]+)*|experimental_latest))?")
_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.\-]*://.")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class SourceName:
    """A parsed `--data` argument.

    Attributes:
        kind: digits, tfds, function, records, csv, parquet, npz, images, coco, masks, corpus, folder or remote.
        value: the path or the name.
        label: the text after the #, if any: the label columns of a table, or the folder of pictures.
    """

    kind: str
    value: str
    label: str | None = None


def parse_source(text: str) -> SourceName:
    """Finds out what kind of source a text names. Looks at the disk, but reads no data.

    Args:
        text: `"digits"`, `"tfds:NAME"`, `"corpus:PATH"` (plain text), `"images:TABLE.csv#COLUMN"`,
            `"coco:FILE.json#FOLDER"`, `"masks:FOLDER"`, `"module:function"`, a folder of images by class, or a file,
            glob or folder of `.tfrecord`, `.csv`, `.parquet` or `.npz` files, also a remote one
            (`"s3://BUCKET/FOLDER/"`). The prefix `csv:` or `parquet:` sets the format of files with other extensions;
            the suffix `#COLUMN` names a table's label, and `#COLUMN,COLUMN` several targets.

    Returns:
        The kind and the value: a path, a tfds name, or `module:function`.

    Raises:
        InputError: it is none of these; the message names the closest choice.

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
    kind, _, value = text.partition(":")
    if text.startswith("tfds:"):
        if not _TFDS.fullmatch(value):
            raise InputError(
                f"'tfds:' takes the name of a tensorflow-datasets dataset with an optional configuration and version, "
                f"but not `huggingface:NAME`, which would download code. Received: {text!r}. Try 'tfds:mnist'."
            )
        return SourceName("tfds", value)
    if _URL.match(text):
        return SourceName("remote", text)
    if kind in _PICTURES:
        return _pictures(kind, value, text)
    if kind == "corpus":
        path = Path(value).expanduser()
        if not value or not (path.exists() or any(path.parent.glob(path.name))):
            raise InputError(
                f"No such text: {text!r}. Use corpus:PATH with a file, folder or glob relative to {Path.cwd()}."
            )
        return SourceName("corpus", str(path))
    if (found := _table(text) or _files(text)) is not None:
        return found
    if _FUNCTION.fullmatch(text):
        return SourceName("function", text)
    if "/" in text or "\\" in text:
        raise InputError(f"No such data folder or file: {text!r}. Check the path, which is relative to {Path.cwd()}.")
    raise unknown("data source", text, _CHOICES)


def _files(text: str) -> SourceName | None:
    """The kind of files at a path; None if there is nothing."""
    path = Path(text).expanduser()
    if path.name.lower().endswith(".npz") or path.is_dir() and _holds(path, ".npz"):
        return SourceName("npz", str(path))
    if path.is_dir():
        return SourceName("records" if _holds(path, ".tfrecord") else "folder", str(path))
    if ".tfrecord" in path.name:
        return SourceName("records", str(path))
    if path.exists():
        raise InputError(
            f"Cannot read {text!r} as data: it is not a .tfrecord, .csv, .parquet or .npz file. "
            "Use one of these, a folder of images by class, or module:function."
        )
    return None


def check_encodable(paths: Iterable[Path]) -> None:
    """Rejects names of files and folders that are not UTF-8: reports, checkpoints and TensorFlow cannot store them.

    Raises:
        InputError: names the first one.
    """
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise InputError(f"The name {str(path)!r} is not valid UTF-8. Rename it.") from None


def _pictures(kind: str, value: str, text: str) -> SourceName:
    path, _, label = value.partition("#")
    place = Path(path).expanduser()
    if not path or not (place.exists() or any(place.parent.glob(place.name))):
        shown = {"images": "images:TABLE.csv#COLUMN", "coco": "coco:ANNOTATIONS.json#FOLDER", "masks": "masks:FOLDER"}
        raise InputError(f"There is nothing at {text!r}. Use {shown[kind]}, relative to {Path.cwd()}.")
    if kind == "masks" and (label or not place.is_dir()):
        raise InputError(f"`masks:` takes a folder that holds images/ and masks/. Received: {text!r}.")
    return SourceName(kind, str(place), label or None)


def _table(text: str) -> SourceName | None:
    """Parses `[csv:|parquet:]PATH[#COLUMN]`; None if it is not a table."""
    kind, value, label = _TABLE.fullmatch(text).groups()
    if label and Path(f"{value}#{label}").expanduser().exists():  # a file name may contain a #
        value, label = f"{value}#{label}", None
    path = Path(value).expanduser()
    if kind is None and path.is_dir():
        found = (kind for end, kind in TABLE_ENDS.items() if _holds(path, end) and not _holds(path, ".tfrecord"))
        kind = next(found, None)
    elif kind is None:
        kind = next((kind for end, kind in TABLE_ENDS.items() if path.name.lower().endswith(end)), None)
    return SourceName(kind, str(path), label) if kind else None


def _holds(path: Path, end: str) -> bool:
    return any(end in entry.name for entry in path.iterdir() if not entry.name.startswith("."))

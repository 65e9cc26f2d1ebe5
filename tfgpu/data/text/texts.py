"""Text as bytes: texts by class (`text:PATH`) and plain text for a language model (`corpus:PATH`).

A token is a byte of UTF-8, so the vocabulary always has the same 256 entries: there is no training, no unknown token,
and no vocabulary file to save. 0, which does not occur in text, marks padding and the end of a file.

    reviews/good/1.txt        reviews/train/good/1.txt         a table with a text and a label:
    reviews/bad/2.txt    or   reviews/test/bad/2.txt     or    reviews.csv, reviews.parquet#stars
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples, labels_of
from tfgpu.data.names import SourceName, check_encodable, parse_source
from tfgpu.data.records import find, parts_of
from tfgpu.data.splits import PARTS
from tfgpu.data.tables import label_column, place_of, read_columns
from tfgpu.errors import InputError

VOCABULARY = 256
LENGTH = 256  # default bytes per example
_COLUMNS = ("text", "sentence", "review", "content", "document")
_TOKEN_BYTES = 8  # of memory for each byte of a corpus: a token and its target, int32 each

_log = logging.getLogger(__name__)


def encode(text: str | bytes, length: int) -> np.ndarray:
    """Encodes the first bytes of a text as numbers, zero-padded to `length`: int32 [length].

    Example:
        >>> encode("tü", 4).tolist()
        [116, 195, 188, 0]
    """
    found = text.encode() if isinstance(text, str) else text
    return np.frombuffer(found[:length].ljust(length, b"\0"), np.uint8).astype(np.int32)


def decode(tokens: Sequence[int]) -> str:
    """Decodes numbers to text; invalid UTF-8 becomes a replacement character, and zeros are dropped.

    Example:
        >>> decode(encode("tü", 4))
        'tü'
    """
    return bytes(int(token) for token in tokens if token).decode(errors="replace")


def open_corpus(pattern: str, reading: Reading) -> Examples:
    """Reads plain text for a language model: sequences of one length, whose targets are the next bytes.

    The files are concatenated in the order of their names, with a 0 after each. Bytes at the end that do not fill a
    sequence are dropped.

    Args:
        pattern: a file, a glob, or a folder of `.txt` files. `train...`, `validation...` and `test...` in the names are
            the source's own splits.
        reading: the length of a sequence, and the memory limit.

    Returns:
        int32 [n, length] tokens and targets; 256 classes.

    Raises:
        InputError: no such files, files without text, less than one sequence, or too much for the memory limit.
    """
    length, name = reading.length or LENGTH, Path(pattern).name
    paths = _plain_files(pattern)
    size = sum(path.stat().st_size for path in paths)
    if size * _TOKEN_BYTES > reading.memory_bytes:
        raise InputError(
            f"corpus:{pattern} has {size:,} bytes and needs {size * _TOKEN_BYTES:,} bytes of memory. Received: "
            f"memory_bytes={reading.memory_bytes:,}. Increase it (--memory-bytes), or use fewer files."
        )
    pieces, own, count = [], {}, 0
    for part, numbers in parts_of(paths).items():
        text = b"".join(paths[i].read_bytes() + b"\0" for i in numbers)
        rows = (len(text) - 1) // length
        if not rows:
            raise InputError(
                f"corpus:{pattern} has {len(text)} bytes in the {part} split, too few for one sequence of "
                f"length={length}. Use a shorter length, or more text."
            )
        places = np.arange(rows)[:, None] * length + np.arange(length + 1)
        pieces.append(np.frombuffer(text, np.uint8)[places].astype(np.int32))
        own[part] = np.arange(count, count + rows)
        count += rows
    joined = np.concatenate(pieces)
    names = tuple(str(byte) for byte in range(VOCABULARY))
    return Examples(name, joined[:, 1:].copy(), (length,), names, array=joined[:, :-1].copy(), own=own)


def open_texts(value: str, reading: Reading) -> Examples:
    """Reads texts by class: `.txt` files in one folder per class, or the rows of `.csv` or `.parquet` files.

    Args:
        value: a folder, or a table as `names.parse_source` defines it (`#COLUMN` names the label). The text column of a
            table is `text`, `sentence`, `review`, `content` or `document`, or the only one besides the label.
        reading: the length; longer texts are truncated, shorter ones padded with zeros.

    Returns:
        int32 [n, length] tokens, and classes.

    Raises:
        InputError: no such texts or columns, or fewer than two classes.
    """
    length = reading.length or LENGTH
    folder = Path(value).expanduser()
    named = None if folder.is_dir() else parse_source(value)
    if named is None and _texts(folder):
        parts = _of_folder(folder)
    elif (named or parse_source(value)).kind in ("csv", "parquet"):
        parts = _of_tables(named or parse_source(value))
    else:
        raise InputError(
            f"No texts by class in {value!r}. Expected FOLDER/CLASS/*.txt, FOLDER/train/CLASS/*.txt, or .csv or "
            ".parquet files. For a language model's plain text use `corpus:PATH`."
        )
    texts = [text for found in parts.values() for text, _ in found]
    longer = sum(len(text) > length for text in texts)
    if longer:
        _log.info("%s: truncating %d of %d texts to %d bytes.", folder.name, longer, len(texts), length)
    labels, names = labels_of(np.array([y for found in parts.values() for _, y in found]), name=folder.name)
    ends = np.cumsum([0, *(len(found) for found in parts.values())])
    own = {part: np.arange(ends[i], ends[i + 1]) for i, part in enumerate(parts)}
    array = np.stack([encode(text, length) for text in texts])
    return Examples(folder.name, labels, (length,), names, array=array, own=own)


def check_no_length(name: str, reading: Reading) -> None:
    """Raises `InputError` if a length was given for examples that are not text."""
    if reading.length is not None:
        raise InputError(
            f"`length` applies to text: and corpus: only. Received: {reading.length} for {name}. Remove it."
        )


def _plain_files(pattern: str) -> list[Path]:
    folder = Path(pattern)
    found = _texts(folder) if folder.is_dir() else find(pattern, end=".txt")
    if not found:
        raise InputError(f"No .txt files in {pattern!r}. Use a file, a glob such as 'books/*.md', or another folder.")
    return found


def _texts(folder: Path) -> list[Path]:
    """Lists the `.txt` files below a folder that are not hidden, sorted."""
    found = (path for path in folder.rglob("*.txt") if path.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _of_folder(folder: Path) -> dict[str, list[tuple[bytes, str]]]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    has_parts = folders and all(path.name in PARTS for path in folders) and (folder / "train").is_dir()
    roots = {part: folder / part for part in PARTS if (folder / part).is_dir()} if has_parts else {"train": folder}
    parts = {}
    for part, root in roots.items():
        paths = [path for path in _texts(root) if path.parent != root]
        check_encodable(paths)
        parts[part] = [(path.read_bytes(), path.relative_to(root).parts[0]) for path in paths]
    classes = {label for _, label in parts["train"]}
    if len(classes) < 2:
        raise InputError(
            f"{str(folder)!r} must contain at least two classes of training texts. Received: "
            f"{', '.join(sorted(classes)) or 'none'}. Expected FOLDER/CLASS/*.txt or FOLDER/train/CLASS/*.txt."
        )
    for part, found in parts.items():
        extra = sorted({label for _, label in found} - classes)
        if extra:
            raise InputError(f"{folder / part} has classes without training texts: {', '.join(extra)}. Remove them.")
    return parts


def _of_tables(source: SourceName) -> dict[str, list[tuple[bytes, object]]]:
    paths = find(source.value, end=f".{source.kind}")
    parts = {}
    for part, numbers in parts_of(paths).items():
        parts[part] = [row for i in numbers for row in _rows(paths[i], source)]
    return parts


def _rows(path: Path, source: SourceName) -> list[tuple[bytes, object]]:
    columns = read_columns(path, source.kind)
    label = label_column(path, list(columns), source.label)
    others = [name for name in columns if name != label]
    text = next((name for name in _COLUMNS if name in others), others[0] if len(others) == 1 else None)
    if text is None:
        raise InputError(
            f"{path} has no column {', '.join(_COLUMNS[:-1])} or {_COLUMNS[-1]}. Received: "
            f"{', '.join(others) or 'none'} besides the label {label!r}. Rename the text column to 'text'."
        )
    lacking = [at for at, pair in enumerate(zip(columns[text], columns[label], strict=True)) if None in pair]
    if lacking:
        first = place_of(path, source.kind, lacking[0])
        raise InputError(f"{path}: {len(lacking)} row(s) lack a text or a label; the first is {first}.")
    if not all(isinstance(value, str) for value in columns[text]):
        raise InputError(f"{path}: column {text!r} must contain text. Received: {type(columns[text][0]).__name__}.")
    return [(t.encode(), y) for t, y in zip(columns[text], columns[label], strict=True)]

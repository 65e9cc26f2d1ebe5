"""Plain text as bytes, for a language model (`corpus:PATH`).

A token is a byte of UTF-8, so the vocabulary always has the same 256 entries: there is no training, no unknown token,
and no vocabulary file to save. 0, which does not occur in text, marks the end of a file.
"""

from pathlib import Path

import numpy as np

from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples
from tfgpu.data.records import find, parts_of
from tfgpu.errors import InputError

VOCABULARY = 256
LENGTH = 256  # default bytes per example
_TOKEN_BYTES = 8  # of memory for each byte of a corpus: a token and its target, int32 each


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
    folder = Path(pattern)
    if not folder.is_dir():
        paths = find(pattern, end=".txt")
    else:
        below = ((path, path.relative_to(folder).parts) for path in sorted(folder.rglob("*.txt")) if path.is_file())
        paths = [path for path, parts in below if not any(part.startswith(".") for part in parts)]
    if not paths:
        raise InputError(f"No .txt files in {pattern!r}. Use a file, a glob such as 'books/*.md', or another folder.")
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


def check_no_length(name: str, reading: Reading) -> None:
    """Raises `InputError` if a length was given for examples that are not text."""
    if reading.length is not None:
        raise InputError(f"`length` applies to corpus: only. Received: {reading.length} for {name}. Remove it.")

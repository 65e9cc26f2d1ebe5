"""From records to tokens and targets; what is not learned has the target -100."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfgpu.data.text.sequences import IGNORED
from tfgpu.errors import InputError
from tfgpu.finetuning.conversations import Record, is_jsonl
from tfgpu.finetuning.templates import END, START, Template

_MARKS = re.compile(f"([{START}{END}])")
_TURN_ENDS = ("<|eot_id|>", "<end_of_turn>", "<|im_end|>")


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
        ids: int32 [n], the tokens that the model sees.
        targets: int32 [n], the token after each, or -100 where it is not learned.
        prompt: how many of the tokens are given before the first that is learned.
        line: of the file, from 1.
    """

    ids: np.ndarray
    targets: np.ndarray
    prompt: int
    line: int


class Tokenizer:
    """A tokenizer of KerasHub, as lists of numbers.

    Args:
        stock: of `keras_hub.tokenizers`.
    """

    def __init__(self, stock: Any):
        self.stock = stock
        self.start, self.end = (getattr(stock, f"{name}_token_id", None) for name in ("start", "end"))
        self.pad = getattr(stock, "pad_token_id", None) or 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of some texts, without start and end."""
        found = self.stock(list(texts))
        lists = found.to_list() if hasattr(found, "to_list") else found
        return [[int(token) for token in tokens] for tokens in lists]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        found = self.stock.detokenize([list(map(int, tokens))])
        first = np.asarray(found).reshape(-1)[0]
        return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)

    def stops(self) -> set[int]:
        """The tokens that end a text or a turn."""
        marks = {self.stock.token_to_id(mark) for mark in _TURN_ENDS if self.has(mark)}
        return {*marks, *([] if self.end is None else [self.end])}

    def has(self, token: str) -> bool:
        """Whether the vocabulary has this token."""
        try:
            return token in self.stock.get_vocabulary()
        except (AttributeError, NotImplementedError, ValueError):
            return False

    def text_of(self, token: int | None) -> str:
        """How the vocabulary writes a token; empty for none."""
        if token is None:
            return ""
        try:
            found = self.stock.id_to_token(token)
        except (AttributeError, NotImplementedError, ValueError):
            return ""
        return found if isinstance(found, str) else ""


def encode(
    records: Sequence[Record], tokenizer: Tokenizer, template: Template, *, path: Path, length: int, limit: str
) -> list[Example]:
    """Tokenizes records. A plain text is cut into pieces; a record must fit.

    Args:
        records: of `path`.
        tokenizer: adds its start token before each record, and its end token behind it, which is learned.
        template: of chats.
        path: for errors.
        length: the most tokens of a sequence.
        limit: where `length` comes from, for errors.

    Raises:
        InputError: a record has more tokens than `length`, or nothing to learn; the message names the line.
    """
    wholes = [template.segments(record, f"{path}, line {record.line}") for record in records]
    # Pieces of text, of which `START` and `END` are pieces of their own.
    segments = [
        [(piece, is_learned) for text, is_learned in parts for piece in _MARKS.split(text) if piece] for parts in wholes
    ]
    texts = [text for parts in segments for text, _ in parts if not _MARKS.match(text)]
    found, encoded = [], iter(tokenizer.encode(texts))
    marks = {START: tokenizer.start, END: tokenizer.end}
    for record, parts in zip(records, segments, strict=True):
        known = []
        for text, is_learned in parts:
            tokens = [marks[text]] if text in marks else next(encoded)
            known.append(([token for token in tokens if token is not None], is_learned))
        ids = [token for tokens, _ in known for token in tokens]
        learned = [is_learned for tokens, is_learned in known for _ in tokens]
        if tokenizer.end is not None and ids[-1:] != [tokenizer.end]:  # some templates write it
            ids, learned = [*ids, tokenizer.end], [*learned, True]
        if tokenizer.start is not None:
            ids, learned = [tokenizer.start, *ids], [False, *learned]
        ids, learned = np.array(ids, np.int32), np.array(learned, bool)
        if not is_jsonl(path):
            return _pieces(ids, length, path)
        if len(ids) - 1 > length:
            raise InputError(
                f"{path}, line {record.line} has {len(ids) - 1:,} tokens, more than length={length:,} ({limit}). "
                "Shorten or split the record, or raise --length if the model has more positions."
            )
        if not learned[1:].any():
            raise InputError(f"{path}, line {record.line} has no token to learn. Write a response, or remove the line.")
        found.append(_example(ids, learned, record.line))
    return found


def _example(ids: np.ndarray, learned: np.ndarray, line: int) -> Example:
    targets = np.where(learned[1:], ids[1:], IGNORED).astype(np.int32)
    return Example(ids[:-1], targets, 1 + int(np.argmax(learned[1:])), line)


def _pieces(ids: np.ndarray, length: int, path: Path) -> list[Example]:
    """A plain text as sequences of `length` tokens; the last one may be shorter."""
    if len(ids) < 2:
        raise InputError(f"{path} has {len(ids)} token(s), too few to learn from. Give more text.")
    parts = [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]
    return [_example(part, np.ones(len(part), bool), 1) for part in parts]

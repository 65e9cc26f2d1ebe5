"""Texts to fine-tune on: JSONL files of texts, prompts with responses or chats, and plain text. Imports no TensorFlow.

A line of a `.jsonl` file is one record, in one of three forms:

    {"text": "Once upon a time"}
    {"prompt": "What is 2 + 2?", "response": "4"}
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}

Any other file is one plain text.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError

ROLES = ("system", "user", "assistant")
_JSONL = (".jsonl", ".ndjson")
_TOLD = ("system", "tools", "functions")
"""What some formats tell a model beside its messages; other keys of a line, such as a number or a source, do not."""
_FORMS = '{"text": ...}, {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}'


@dataclass(frozen=True)
class Record:
    """One text or conversation.

    Attributes:
        line: its line in the file, from 1.
        text: a plain text, every token of which is learned; else None.
        messages: the role and the content of each message; the assistant's are learned. Empty for a text.
        is_pair: whether it was written as a prompt and a response.
    """

    line: int
    text: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    is_pair: bool = False


def is_jsonl(path: Path) -> bool:
    """Whether a file's name says that it has a record a line."""
    return path.suffix.lower() in _JSONL


def read(path: str | Path) -> list[Record]:
    """Reads the records of a file.

    Args:
        path: a `.jsonl` or `.ndjson` file, or one of plain text.

    Returns:
        The records in their order; empty lines are skipped. A plain text is one record.

    Raises:
        InputError: there is no such file, it is empty or not UTF-8, or a line is not a record; the message has the
            line's number.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/chat.jsonl"
        >>> _ = Path(path).write_text('{"prompt": "2 + 2", "response": "4"}')
        >>> read(path)[0].messages
        (('user', '2 + 2'), ('assistant', '4'))
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no file {str(path)!r}. Give --data a .jsonl file or a text file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8: {error}. Convert it: iconv -t utf-8.") from error
    if not text.strip():
        raise InputError(f"{path} is empty. Give --data a file with one record per line, or a text file.")
    if not is_jsonl(path):
        return [Record(1, text)]
    numbered = enumerate(text.split("\n"), start=1)  # not `splitlines`: a JSON string may have other line ends
    return [_record(line, f"{path}, line {number}", number) for number, line in numbered if line.strip()]


def _record(line: str, where: str, number: int) -> Record:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}. Write one object per line, such as {_FORMS}.") from None
    if not isinstance(found, Mapping):
        raise InputError(f"{where} is not a JSON object. Received: {type(found).__name__}. Write {_FORMS}.")
    _check_known(found, found.keys() - _TOLD, where)
    if "messages" in found:
        return Record(number, messages=_messages(found["messages"], where))
    if "prompt" in found or "response" in found:
        pair = tuple(_filled(found, name, where) for name in ("prompt", "response"))
        return Record(number, messages=(("user", pair[0]), ("assistant", pair[1])), is_pair=True)
    if "text" in found:
        return Record(number, _filled(found, "text", where))
    raise InputError(f"{where} has an unknown form. Received: {', '.join(found) or 'nothing'}. Write {_FORMS}.")


def _filled(found: Mapping[str, Any], name: str, where: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value.strip():
        given = f"Received: {value!r}" if name in found else "It is missing"
        raise InputError(f"{where} needs a {name!r} with text. {given}. Write it, or remove the line.")
    return value


def _check_known(found: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuses what a model would be told or taught, but is neither here."""
    others = [name for name, value in found.items() if name not in known and value not in (None, "", [], {})]
    if others:
        raise InputError(
            f"{where} has {', '.join(map(repr, others))}, which no form of a record has. Write it into a message's "
            "content, or remove it."
        )


def _messages(found: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise InputError(
            f"{where}: `messages` must be a list of objects with a role and a content. Received: {found!r}."
        )
    messages = []
    for at, message in enumerate(found, start=1):
        if message.get("role") not in ROLES:
            raise InputError(
                f"{where}, message {at}: the role must be one of {', '.join(ROLES)}. Received: "
                f"{message.get('role')!r}. Rename it, or remove the message."
            )
        _check_known(message, ("role", "content"), f"{where}, message {at}")
        messages.append((message["role"], _filled(message, "content", f"{where}, message {at}")))
    if not messages or messages[-1][0] != "assistant":
        raise InputError(
            f"{where}: the last message must be the assistant's: that is what the model learns. Received: "
            f"{messages[-1][0] if messages else 'no messages'}. Add the answer, or remove the message."
        )
    return tuple(messages)

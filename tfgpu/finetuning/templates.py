"""Chat templates: how messages become one text, and which parts of it are learned. Imports no TensorFlow."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2 import StrictUndefined, TemplateError, Undefined, ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tfgpu.errors import InputError, unknown
from tfgpu.finetuning.conversations import Record

PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}\n{% elif m.role == 'user' %}User: {{ m.content }}\n"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NAMED = {"plain": PLAIN, "chatml": CHATML, "gemma": GEMMA, "llama3": LLAMA3}
_MARKS = {"chatml": "<|im_start|>", "gemma": "<start_of_turn>", "llama3": "<|start_header_id|>"}
"""A token of its own in the vocabularies of models that were trained with the template."""
START, END = "\ufdd0", "\ufdd1"
"""The start and the end token in a template's text: characters that Unicode keeps out of texts."""


class _Absent(Undefined):
    """What a template may ask for and test, as Hugging Face's do with `message.tool_calls`, but not write."""

    __slots__ = ()
    __str__ = StrictUndefined.__str__


class _Generation(ext.Extension):
    """`{% generation %}`, with which some templates mark what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class Template:
    """A chat template.

    Attributes:
        name: for the report: one of `NAMED`, or the file that it comes from.
        source: Jinja, with `messages` and `add_generation_prompt`, as Hugging Face's templates have it.
        start: the text of the start token, which some templates write themselves; tokenizing adds it once.
    """

    name: str
    source: str
    start: str = ""

    def segments(self, record: Record, where: str) -> list[tuple[str, bool]]:
        """A record as pieces of text, and whether each is learned: texts, and what the assistant says.

        `START` and `END` stand for tokens within a piece.

        Args:
            record: of `conversations.read`.
            where: its file and line, for errors.

        Raises:
            InputError: the template refuses the messages, or does not put the assistant's text behind the prompt.

        Example:
            >>> record = Record(1, messages=(("user", "2 + 2?"), ("assistant", "4")))
            >>> Template("plain", PLAIN).segments(record, "line 1")
            [('User: 2 + 2?\\nAssistant: ', False), ('4\\n', True)]
        """
        if record.text is not None:
            return [(record.text, True)]
        if record.is_pair and self.name == "plain":
            (_, prompt), (_, response) = record.messages
            return [(f"{prompt}\n", False), (response, True)]
        whole = self._rendered(record.messages, False, where)
        found, done = [], 0
        for at, (role, _) in enumerate(record.messages):
            if role != "assistant":
                continue
            begin, end = self._answer(record.messages, at, whole, where)
            if begin < done:
                raise self._unordered(where)
            found += [(whole[done:begin], False), (whole[begin:end], True)]
            done = end
        return found

    def _answer(self, messages: tuple[tuple[str, str], ...], at: int, whole: str, where: str) -> tuple[int, int]:
        """Where an answer begins and ends in the text of the whole conversation."""
        asked = self._rendered(messages[:at], True, where)
        answered = self._rendered(messages[: at + 1], False, where)
        if not answered.startswith(asked) or not whole.startswith(asked):
            raise self._unordered(where)
        if whole.startswith(answered):
            return len(asked), len(answered)
        # Qwen3's template leaves what was thought out of earlier answers.
        content = messages[at][1].strip()
        kept = content + answered[len(asked) :].rpartition(content)[2]
        begin = whole.find(kept, len(asked))
        if begin < 0:
            raise self._unordered(where)
        return len(asked), begin + len(kept)

    def _unordered(self, where: str) -> InputError:
        return InputError(
            f"{where}: the template {self.name} does not put the answer after the prompt, so the tokens to learn "
            "cannot be told from the prompt's. Use --template chatml, or plain."
        )

    def _rendered(self, messages: tuple[tuple[str, str], ...], is_asking: bool, where: str) -> str:
        listed = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._compiled.render(messages=listed, add_generation_prompt=is_asking)
        except Exception as error:  # a template raises whatever its expressions raise
            raise InputError(
                f"{where}: the template {self.name} refuses the messages: {error}. Use --template chatml, or plain."
            ) from None
        return text.removeprefix(START).removeprefix(self.start)

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            undefined=_Absent, trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
        )

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        given = {"bos_token": START, "eos_token": END, "raise_exception": refuse, "tools": None}
        return environment.from_string(self.source, globals=given)


def choose(name: str, folder: Path, has_token: Callable[[str], bool], start: str = "") -> Template:
    """The template of a run.

    Args:
        name: one of `NAMED`, the path of a Jinja file, or `"auto"`: the folder's own (`chat_template.jinja`, or in
            `tokenizer_config.json`), else the one whose marks are tokens of the vocabulary, else plain.
        folder: the preset's.
        has_token: whether the vocabulary has a token.
        start: the text of the start token.

    Raises:
        InputError: there is no such template.
    """
    if name in NAMED:
        return Template(name, NAMED[name], start)
    if name != "auto":
        if not Path(name).is_file():
            raise unknown("template", name, ("auto", *NAMED, "a Jinja file"))
        return Template(name, Path(name).read_text(encoding="utf-8"), start)
    own = _of_folder(folder)
    if own is not None:
        return Template(f"of {folder.name}", own, start)
    marked = next((each for each, mark in _MARKS.items() if has_token(mark)), "plain")
    return Template(marked, NAMED[marked], start)


def _of_folder(folder: Path) -> str | None:
    alone, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{config} is not a JSON object: {error}. Copy it again.") from None
    if isinstance(found, list):  # several by name
        found = next((each["template"] for each in found if each.get("name") == "default"), None)
    return found

"""Templates in the ways in which published models write them."""

import numpy as np
import pytest

from tfgpu.data.text.sequences import IGNORED
from tfgpu.errors import InputError
from tfgpu.finetuning import tokens
from tfgpu.finetuning.conversations import Record
from tfgpu.finetuning.templates import END, START, Template

TALK = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
TURN = "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n'"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TOOLS = (  # as Qwen 2.5
    "{% for message in messages %}{% if message.role == 'user' or message.role == 'assistant' and "
    "not message.tool_calls %}{{ " + TURN + " }}{% endif %}{% endfor %}" + ASKED
)
THOUGHT = (  # as Qwen 3
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>\\n' }}"
    "{% else %}{{ " + TURN + " }}{% endif %}{% endfor %}" + ASKED
)
MARKED = (  # as SmolLM 3
    "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{% if message.role == 'user' %}{{ '[' + message.content + ']' }}"
    "{% else %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}{% endfor %}"
)
ENDED = (  # as Mistral
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[' + message.content + ']' }}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)
FIRST, SECOND = (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in "ac")
WANTED = {
    "tools": (TOOLS, [(FIRST, False), ("b<|im_end|>\n", True), (SECOND, False), ("d<|im_end|>\n", True)]),
    "thought": (
        THOUGHT,
        [
            (FIRST, False),
            ("b<|im_end|>\n", True),
            (SECOND, False),
            ("<think>\n\n</think>\n\nd<|im_end|>\n", True),
        ],
    ),
    "marked": (MARKED, [("[a]", False), ("b", True), ("[c]", False), ("d", True)]),
    "ended": (ENDED, [("[a]", False), (f"b{END}", True), ("[c]", False), (f"d{END}", True)]),
}


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_a_published_model_s_template_is_taken(kind):
    source, wanted = WANTED[kind]
    assert Template("own", source).segments(Record(1, messages=TALK), "line 1") == wanted


def test_the_end_token_is_learned_after_each_answer_and_written_once(tmp_path):
    class Letters:
        start_token_id, end_token_id, pad_token_id = 256, 257, 0

        def __call__(self, texts):
            return [list(text.encode()) for text in texts]

    source = ENDED.replace(
        "{% if message.role == 'user'",
        "{% if loop.index0 == 2 %}{{ bos_token }}{% endif %}{% if message.role == 'user'",
    )
    (found,) = tokens.encode(
        [Record(1, messages=TALK)],
        tokens.Tokenizer(Letters()),
        Template("own", source),
        path=tmp_path / "a.jsonl",
        length=16,
        limit="the default",
    )
    whole = [256, *b"[a]b", 257, 256, *b"[c]d", 257]
    assert [*found.ids, found.targets[-1]] == whole
    learned = np.flatnonzero(found.targets != IGNORED) + 1
    assert [whole[at] for at in learned] == [*b"b", 257, *b"d", 257]


def test_the_start_token_is_not_part_of_the_text():
    segments = Template("own", ENDED).segments(Record(1, messages=TALK), "line 1")
    assert not any(START in text for text, _ in segments)


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[0].missing }}"])
def test_what_a_template_raises_is_named_with_the_line(source):
    with pytest.raises(InputError, match="line 3: the template own refuses the messages"):
        Template("own", source).segments(Record(3, messages=TALK), "line 3")


def test_a_template_is_compiled_once(monkeypatch):
    template, made = Template("own", TOOLS), []
    stock = tokens.Template._compiled.func
    monkeypatch.setattr(tokens.Template._compiled, "func", lambda self: made.append(self) or stock(self))
    for line in range(20):
        template.segments(Record(line, messages=TALK), f"line {line}")
    assert len(made) == 1

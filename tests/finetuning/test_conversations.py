"""Records of files of texts, prompts and chats; templates; each wrong line is one error with its number."""

import json
from pathlib import Path

import pytest

from tfgpu.errors import InputError
from tfgpu.finetuning import conversations, templates

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}


def written(folder: Path, *lines: object, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_three_forms_are_read_with_their_lines(tmp_path):
    chat = {"messages": [{"role": "system", "content": "Be short."}, ASKED, ANSWERED]}
    path = written(tmp_path, {"text": "Once\u2028upon"}, "", {"prompt": "2 + 2?", "response": "4"}, chat)
    text, pair, talk = conversations.read(path)
    assert (text.line, text.text, text.messages) == (1, "Once\u2028upon", ())
    assert (pair.line, pair.messages, pair.is_pair) == (3, (("user", "2 + 2?"), ("assistant", "4")), True)
    assert (talk.line, [role for role, _ in talk.messages]) == (4, ["system", "user", "assistant"])


def test_what_says_nothing_to_the_model_is_left_out(tmp_path):
    chat = {"id": 7, "source": "a book", "messages": [ASKED, {**ANSWERED, "tool_calls": None, "name": ""}], "tools": []}
    (record,) = conversations.read(written(tmp_path, chat))
    assert record.messages == (("user", "2 + 2?"), ("assistant", "4"))


def test_another_file_is_one_plain_text(tmp_path):
    (record,) = conversations.read(written(tmp_path, "Once", "upon", name="book.txt"))
    assert record == conversations.Record(1, "Once\nupon")


WRONG = {
    "no JSON": ("{", "line 2 is not JSON"),
    "a list": ("[1]", "line 2 is not a JSON object"),
    "unknown": ({"question": "?"}, "line 2 has an unknown form. Received: question"),
    "no response": ({"prompt": "2 + 2?"}, "line 2 needs a 'response' with text. It is missing"),
    "no prompt": ({"response": "4"}, "line 2 needs a 'prompt' with text"),
    "empty text": ({"text": " "}, "line 2 needs a 'text' with text. Received: ' '"),
    "a role": ({"messages": [{"role": "bot", "content": "x"}]}, "line 2, message 1: the role must be one of system"),
    "no content": ({"messages": [{"role": "user"}]}, "line 2, message 1 needs a 'content'"),
    "unanswered": ({"messages": [ANSWERED, ASKED]}, "line 2: the last message must be the assistant's"),
    "no messages": ({"messages": []}, "Received: no messages"),
    "a call": ({"messages": [ASKED, {**ANSWERED, "tool_calls": [{}]}]}, "line 2, message 2 has 'tool_calls', which no"),
    "a weight": ({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "line 2, message 2 has 'weight'"),
    "tools": ({"messages": [ASKED, ANSWERED], "tools": [{"name": "add"}]}, "line 2 has 'tools', which no"),
    "system": ({"system": "Be short.", "prompt": "2 + 2?", "response": "4"}, "line 2 has 'system'"),
    "messages of text": ({"messages": ["Hello"]}, "line 2: `messages` must be a list of objects"),
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_wrong_line_is_named(kind, tmp_path):
    line, words = WRONG[kind]
    with pytest.raises(InputError) as error:
        conversations.read(written(tmp_path, {"text": "right"}, line))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "words"), [(None, "There is no file"), (b" \n", "is empty"), (b"\xff", "UTF-8")])
def test_a_wrong_file_is_named(content, words, tmp_path):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        conversations.read(path)


TALK = conversations.Record(1, messages=(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")))
SEGMENTS = {
    "plain": [("User: a\nAssistant: ", False), ("b\n", True), ("User: c\nAssistant: ", False), ("d\n", True)],
    "gemma": [
        ("<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n", False),
        ("b<end_of_turn>\n", True),
        ("<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n", False),
        ("d<end_of_turn>\n", True),
    ],
}


@pytest.mark.parametrize("name", sorted(SEGMENTS))
def test_only_what_the_assistant_says_is_learned(name):
    assert templates.Template(name, templates.NAMED[name]).segments(TALK, "line 1") == SEGMENTS[name]


@pytest.mark.parametrize("name", sorted(templates.NAMED))
def test_the_pieces_are_the_whole_conversation(name):
    template = templates.Template(name, templates.NAMED[name])
    learned = [text for text, is_learned in template.segments(TALK, "line 1") if is_learned]
    assert [text[0] for text in learned] == ["b", "d"]


def test_a_plain_pair_is_the_prompt_and_the_response():
    record = conversations.Record(1, messages=(("user", "2 + 2 ="), ("assistant", "4")), is_pair=True)
    segments = templates.Template("plain", templates.PLAIN).segments(record, "line 1")
    assert segments == [("2 + 2 =\n", False), ("4", True)]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ unknown_name }}", "unknown_name"),
        ("{{ messages[-1].content }}", "does not put the answer after the prompt"),
        ("{% for m in messages %}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
    ],
)
def test_a_template_that_does_not_fit_is_named(source, words):
    with pytest.raises(InputError, match="line 1") as error:
        templates.Template("mine", source).segments(TALK, "data.jsonl, line 1")
    assert words in str(error.value)


def test_the_template_is_the_folder_s_own_or_the_vocabulary_s(tmp_path):
    def chosen(name="auto", tokens=()):
        return templates.choose(name, tmp_path, tokens.__contains__)

    assert chosen().name == "plain" and chosen("chatml").source == templates.CHATML
    assert chosen(tokens=["<start_of_turn>"]).name == "gemma"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    assert chosen(tokens=["<start_of_turn>"]).source == "own"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert chosen().source == "newer" and chosen(str(tmp_path / "chat_template.jinja")).source == "newer"
    with pytest.raises(InputError, match="chatml"):
        chosen("chatlm")

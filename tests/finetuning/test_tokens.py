"""Which tokens are learned, how long a sequence may be, and how sequences become rows."""

import numpy as np
import pytest

from tfgpu.data.text.sequences import IGNORED
from tfgpu.errors import InputError
from tfgpu.finetuning import batches, tokens
from tfgpu.finetuning.conversations import Record
from tfgpu.finetuning.templates import PLAIN, Template

PLAINLY = Template("plain", PLAIN)
START, END = 256, 257


class Bytes:
    """A tokenizer of KerasHub's form whose tokens are bytes."""

    start_token_id, end_token_id, pad_token_id = START, END, 0

    def __call__(self, texts):
        return [list(text.encode()) for text in texts]

    def detokenize(self, rows):
        return [bytes(row).decode() for row in rows]

    def get_vocabulary(self):
        return ["<start>"]


def encoded(path, *records, length=16):
    return tokens.encode(records, tokens.Tokenizer(Bytes()), PLAINLY, path=path, length=length, limit="the default")


def pair(line, prompt, response):
    return Record(line, messages=(("user", prompt), ("assistant", response)), is_pair=True)


def test_a_prompt_is_not_learned_and_the_end_is(tmp_path):
    (found,) = encoded(tmp_path / "a.jsonl", pair(1, "ab", "c"))
    assert found.ids.tolist() == [START, *b"ab\nc"]
    assert found.targets.tolist() == [IGNORED, IGNORED, IGNORED, ord("c"), END]
    assert found.prompt == 4 and found.line == 1


def test_of_a_text_each_token_is_learned(tmp_path):
    (found,) = encoded(tmp_path / "a.jsonl", Record(1, "ab"))
    assert found.ids.tolist() == [START, *b"ab"] and found.targets.tolist() == [*b"ab", END] and found.prompt == 1


def test_a_plain_text_is_cut_and_no_token_is_lost(tmp_path):
    found = encoded(tmp_path / "a.txt", Record(1, "abcdef"), length=3)
    assert [each.ids.tolist() for each in found] == [[START, *b"ab"], [*b"cde"], [*b"f"]]
    assert np.concatenate([each.targets for each in found]).tolist() == [*b"abcdef", END]


def test_a_record_that_is_too_long_is_named_with_its_line(tmp_path):
    fits = pair(1, "ab", "c")
    assert len(encoded(tmp_path / "a.jsonl", fits, length=5)) == 1
    with pytest.raises(InputError, match=r"line 7 has 6 tokens, more than length=5 \(the default\). .*--length"):
        encoded(tmp_path / "a.jsonl", fits, pair(7, "ab", "cd"), length=5)


def test_packed_batches_have_every_token_that_is_learned_once(tmp_path):
    records = [pair(at, chr(96 + at), "answer"[: 1 + at % 6]) for at in range(1, 21)]
    found = encoded(tmp_path / "a.jsonl", *records)
    given = {"path": tmp_path / "a.jsonl", "vocabulary": 258, "length": 16, "global_batch": 4}
    for names in (("token_ids", "segment_ids"), None):
        parts = batches.make(found, names=names, validation=0.1, test=0.1, **given)
        assert [parts.data.info.train_examples, len(parts.test)] == [16, 2]
        weights = sum(float(weight.numpy().sum()) for _, _, weight in parts.data.train)
        assert weights == parts.learned
        x, _, _ = parts.data.peek()
        assert sorted(x) == sorted(names or ("padding_mask", "token_ids"))


def test_copies_of_a_record_are_in_one_part(tmp_path):
    found = encoded(tmp_path / "a.jsonl", *[pair(at, "ask", str(at % 5)) for at in range(40)])
    given = {"path": tmp_path / "a.jsonl", "vocabulary": 258, "length": 16, "global_batch": 4}
    parts = batches.make(found, names=None, validation=0.2, test=0.2, **given)
    tested = {example.ids.tobytes() for example in parts.test}
    trained = {bytes(row[row > 0].tobytes()) for x, _, _ in parts.data.train for row in x["token_ids"].numpy()}
    assert len(tested) == 1 and not tested & trained


def test_too_few_records_are_named(tmp_path):
    found = encoded(tmp_path / "a.jsonl", pair(1, "a", "b"))
    given = {"path": tmp_path / "a.jsonl", "vocabulary": 258, "length": 16, "global_batch": 4, "names": None}
    with pytest.raises(InputError, match=r"a.jsonl has 1 sequence\(s\)"):
        batches.make(found, validation=0.1, test=0.1, **given)


def test_a_tokenizer_knows_its_vocabulary():
    tokenizer = tokens.Tokenizer(Bytes())
    assert tokenizer.has("<start>") and not tokenizer.has("<end>")
    assert tokenizer.decode([104, 105]) == "hi" and tokenizer.text_of(None) == ""

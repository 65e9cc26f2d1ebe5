"""Parsers of untrusted text read it or raise an `InputError`: no other error, and no text takes long."""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import targets
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfgpu.cluster import hostlist
from tfgpu.errors import InputError
from tfgpu.recipes import reading, recipe


def near(name):
    """Pieces of what the parser knows, among anything."""
    samples = [*targets.DICTIONARY[name], *([targets.an_index()] if name == "index" else [])]
    pieces = st.one_of(st.sampled_from(samples), st.text(max_size=8), st.sampled_from(list("[]{}:,-&*!\n \"'0a")))
    return st.lists(pieces, max_size=12).map("".join) | st.sampled_from(samples) | st.text(max_size=200)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_whatever_the_text(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)

    @settings(max_examples=100)
    @given(near(name))
    @example("\ud800")
    @example("[" * 5000)
    @example("\0")
    def check(text):
        targets.attempt(name, text, folder)

    check()


@pytest.mark.parametrize("name", targets.documents())
def test_whatever_stands_in_a_document(name, tmp_path_factory):
    """Texts die in JSON's own reader; these reach what comes after it."""
    folder, document, read = tmp_path_factory.mktemp(name), targets.documents()[name], []

    @settings(max_examples=300)
    @given(st.data())
    def check(data):
        text = targets.mutated(document, lambda count: data.draw(st.integers(0, count - 1)))
        read.append(targets.attempt(name, text, folder))

    check()
    assert any(read) and not all(read)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_what_is_right_is_read(name, tmp_path):
    right = {"recipe": "model: mlp\nepochs: 3", "index": targets.an_index()}
    assert targets.attempt(name, right.get(name) or targets.DICTIONARY[name][0], tmp_path)


@pytest.mark.parametrize(
    "text",
    ["a" * 60 + "[", "a," * 100_000 + "[", "," * 50_000, "a[" + "1-3," * 50_000, "n[" + "0-65535," * 1000 + "1]"],
    ids=["no end", "many names", "commas", "ranges", "overlapping ranges"],
)
def test_no_list_of_hosts_takes_long_or_much(text):
    began = time.process_time()
    with pytest.raises(InputError):
        hostlist.expand(text)
    assert time.process_time() - began < 5  # one of these took seven minutes, another one years


def test_aliases_in_aliases_are_refused():
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    assert reading.parse_value(bomb) == bomb  # a flag that is no YAML is its text
    assert reading.parse_value("{a: &a [1], b: *a}") == {"a": [1], "b": [1]}
    with pytest.raises(reading.yaml.YAMLError, match="it contains itself"):
        reading._loaded("&a [*a]")


def nested(first, form, alias):
    """Eight lines, each of which stands for ten times the one before."""
    lines = (f"a{at}: &a{at} {form % ', '.join([f'{alias}a{at - 1}'] * 10)}" for at in range(1, 9))
    return "\n".join([first, *lines])


@pytest.mark.parametrize(
    "text",
    [
        nested("a0: &a0 {k: 1}", "{<<: [%s]}", "*"),
        nested("a0: &a0 !!pairs [k: x]", "!!pairs [%s]", "k: *"),
        nested("a0: &a0 !!set {x}", "{%s}", "? *"),
        "epochs: 0x" + "f" * 5000,
        "strategy: -0x" + "f" * 5000,
        "- 0x" + "f" * 5000,
        "? 0x" + "f" * 5000 + "\n: 1",
        "epochs: 1" + ":1" * 30_000,
        "model_options: {a: [" + "1," * 500_000,
        "a: 1\n" * 60_000,
    ],
    ids=[
        "merges",
        "pairs",
        "sets",
        "number",
        "negative",
        "in a list",
        "as a name",
        "sexagesimal",
        "megabyte",
        "settings",
    ],
)
def test_no_recipe_takes_long_or_much(text, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(InputError) as error:
        recipe.load(tmp_path / "recipe.yaml")
    assert time.process_time() - began < 10 and len(str(error.value)) < 1000  # merges took 150 s and all memory


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", "a\ud800b", "/"])
def test_a_path_that_is_no_recipe(path):
    with pytest.raises(InputError):
        reading.read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file": "../../etc/passwd"}, "not a file name"),
        ({"file": ""}, "not a file name"),
        ({"file": "/etc/passwd"}, "not a file name"),
        ({"examples": 10**12}, "more examples than its bytes"),
        ({"examples": True}, "examples"),
        ({"bytes": 43}, "does not match its records"),
        ({"part": "x"}, "split 'x'"),
        ({"labels": targets.manifest.pack(np.zeros(1))}, "a label for each record"),
        ({"sha256": None}, "no checksum"),
    ],
)
def test_an_index_leads_nowhere_else(change, words, tmp_path):
    index = json.loads(targets.an_index())
    index["shards"][0] |= change
    (tmp_path / targets.manifest.FILE).write_text(json.dumps(index))
    with pytest.raises(InputError, match=words):
        targets.manifest.find(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "object"}, "not a numeric dtype"),
        ({"dtype": "V8"}, "not a numeric dtype"),
        ({"shape": [-1]}, "must be a whole number"),
        ({"shape": [True]}, "must be a whole number"),
        ({"class_names": "abc"}, "no names"),
        ({"class_names": [1, 2]}, "damaged"),
        ({"class_names": ["\ud800"]}, "damaged"),
        ({"features": {}}, "damaged"),
        ({"features": []}, "damaged"),
        ({"features": {"x": "x", "y": "y", "kind": "x", "shape": [8], "labels": 1}}, "'x' is unknown"),
        (
            {"features": {"x": "x", "y": "y", "kind": "int64_list", "shape": [8, 10**10], "labels": 1}},
            "larger than a file",
        ),
    ],
)
def test_what_an_index_says_of_records_is_checked(change, words, tmp_path):
    (tmp_path / targets.manifest.FILE).write_text(json.dumps({**json.loads(targets.an_index()), **change}))
    with pytest.raises(InputError, match=words):
        targets.manifest.find(tmp_path)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    max_leaves=6,
)


@given(st.data(), plain)
def test_whatever_stands_in_one_place_of_an_index(data, value):
    index = json.loads(targets.an_index())
    places = [(whole, name) for whole in (index, index["features"], index["shards"][0]) for name in whole]
    whole, name = data.draw(st.sampled_from(places))
    whole[name] = value
    with tempfile.TemporaryDirectory() as folder:
        targets.attempt("index", json.dumps(index), Path(folder))


def test_an_index_does_not_unpack_to_more_than_its_file():
    zeros = targets.manifest.pack(np.zeros(10**6))
    assert len(zeros) < 20_000
    with pytest.raises(ValueError, match="more than 2 numbers"):
        targets.manifest.unpack(zeros, 2)


def test_numbers_that_end_too_early_are_damaged():
    import base64

    import numpy as np

    packed = base64.b64decode(targets.manifest.pack(np.array([5, 7])))
    for end in range(1, 7):
        with pytest.raises(ValueError, match="end too early"):
            targets.manifest.unpack(base64.b64encode(packed[:-end]).decode(), 2)

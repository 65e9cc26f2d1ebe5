"""Text as bytes: tokens by hand, texts by class, corpora, and errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.data import load
from tfgpu.data.decoding import Reading
from tfgpu.data.text import texts
from tfgpu.errors import InputError


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.integers(0, 40))
def test_a_text_that_fits_comes_back(text, more):
    tokens = texts.encode(text, len(text.encode()) + more)
    assert texts.decode(tokens) == text and tokens.dtype == np.int32 and tokens.max(initial=0) < texts.VOCABULARY


def test_a_longer_text_is_cut():
    assert texts.encode("abc", 2).tolist() == [97, 98]


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_a_folder_of_classes(tmp_path):
    files = {"good/a.txt": "fine", "bad/b.txt": "awful", "good/deep/c.txt": "yes", "good/.d.txt": "x"}
    write(tmp_path / "reviews", files)
    found = texts.open_texts(str(tmp_path / "reviews"), Reading(length=5))
    assert found.class_names == ("bad", "good") and found.labels.tolist() == [0, 1, 1] and found.shape == (5,)
    assert [texts.decode(row) for row in found.array] == ["awful", "fine", "yes"]


def test_a_folder_with_parts_of_its_own(tmp_path):
    write(tmp_path, {f"{part}/{kind}/1.txt": part for part in ("train", "test") for kind in ("a", "b")})
    found = texts.open_texts(str(tmp_path), Reading())
    assert {part: rows.tolist() for part, rows in found.own.items()} == {"train": [0, 1], "test": [2, 3]}
    assert found.shape == (256,) and texts.decode(found.array[3]) == "test"


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv#mood", "rows.parquet#mood"])
def test_a_table_of_texts(tmp_path, name):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    label = "mood" if "#" in name else "label"
    table = arrow.table({label: ["sad", "glad", "sad"], "review": ["no,\nno", "yes", "hm"]})
    path = tmp_path / name.partition("#")[0]
    (parquet.write_table if path.suffix == ".parquet" else csv.write_csv)(table, path)
    found = texts.open_texts(str(tmp_path / name), Reading(length=8))
    assert found.class_names == ("glad", "sad") and found.labels.tolist() == [1, 0, 1]
    assert [texts.decode(row) for row in found.array] == ["no,\nno", "yes", "hm"]


def test_a_corpus_is_cut_into_pieces_whose_targets_are_the_next_bytes(tmp_path):
    write(tmp_path, {"a.txt": "abcd", "b.txt": "efgh"})  # "abcd", 0, "efgh", 0: three pieces of 3, and one left over
    found = texts.open_corpus(str(tmp_path), Reading(length=3))
    assert found.array.tolist() == [[97, 98, 99], [100, 0, 101], [102, 103, 104]]
    assert found.labels.tolist() == [[98, 99, 100], [0, 101, 102], [103, 104, 0]]
    assert len(found.class_names) == 256


def test_a_corpus_through_the_pipeline(tmp_path):
    write(tmp_path, {"train.txt": "the cat sat on the mat. " * 40, "test.txt": "the dog. " * 10})
    data = load(f"corpus:{tmp_path}/*.txt", global_batch=8, length=16, validation=0.2)
    x, y = data.peek()
    assert data.info.labels == "tokens" and data.info.classes == 256 and data.info.input_shape == (16,)
    assert x.shape == y.shape == (8, 16) and (x.numpy()[:, 1:] == y.numpy()[:, :-1]).all()
    assert data.info.test_examples == 5 and data.info.validation_examples > 0  # its own test part: 90 // 16


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("text:none", {}, "No such text: 'text:none'. Use text:PATH"),
        ("corpus:", {}, "No such text"),
        ("text:one", {}, "at least two classes of training texts. Received: good"),
        ("text:photos", {}, "No texts by class in .*For a language model's plain text use `corpus:PATH`"),
        ("text:bare.csv", {}, "no column text, sentence.*Received: a, b besides the label 'label'"),
        ("text:holes.csv", {}, "1 row\\(s\\) lack a text or a label; the first is line 3"),
        ("text:numbers.csv", {}, "column 'text' must contain text. Received: int"),
        ("corpus:photos", {}, "No .txt files in"),
        ("corpus:one", {"length": 64}, "too few for one sequence of length=64. Use a shorter"),
        ("corpus:one", {"memory_bytes": 8}, "needs 40 bytes of memory. Received: memory_bytes=8. Increase it"),
        ("corpus:one", {"length": 1}, "`length` must be a whole number from 2"),
        ("corpus:one", {"image_size": 8}, "`image_size` only applies to image files"),
        ("digits", {"length": 8}, "`length` applies to text: and corpus: only"),
    ],
)
def test_invalid_input_is_reported(tmp_path, monkeypatch, source, options, message):
    pytest.importorskip("pyarrow")
    write(tmp_path, {"one/good/a.txt": "hello", "photos/cat/1.md": ""})
    write(tmp_path, {"bare.csv": "a,b,label\nx,y,1\n", "holes.csv": "text,label\nx,1\n,0\n"})
    write(tmp_path, {"numbers.csv": "text,label\n3,1\n4,0\n"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        load(source, global_batch=1, **options)

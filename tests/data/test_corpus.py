"""Plain text as bytes: corpora, and errors."""

import pytest

from tfgpu.data import load
from tfgpu.data.decoding import Reading
from tfgpu.data.text import corpus
from tfgpu.errors import InputError


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_a_corpus_is_cut_into_pieces_whose_targets_are_the_next_bytes(tmp_path):
    write(tmp_path, {"a.txt": "abcd", "b.txt": "efgh"})  # "abcd", 0, "efgh", 0: three pieces of 3, and one left over
    found = corpus.open_corpus(str(tmp_path), Reading(length=3))
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
        ("corpus:", {}, "No such text"),
        ("corpus:photos", {}, "No .txt files in"),
        ("corpus:one", {"length": 64}, "too few for one sequence of length=64. Use a shorter"),
        ("corpus:one", {"memory_bytes": 8}, "needs 40 bytes of memory. Received: memory_bytes=8. Increase it"),
        ("corpus:one", {"length": 1}, "`length` must be a whole number of at least 2"),
        ("corpus:one", {"image_size": 8}, "`image_size` only applies to image files"),
        ("digits", {"length": 8}, "`length` applies to corpus: only"),
    ],
)
def test_invalid_input_is_reported(tmp_path, monkeypatch, source, options, message):
    write(tmp_path, {"one/good/a.txt": "hello", "photos/cat/1.md": ""})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        load(source, global_batch=1, **options)

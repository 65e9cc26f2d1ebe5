import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data.decoding import Reading
from tfgpu.data.examples import from_arrays
from tfgpu.data.sources import digits, open_source
from tfgpu.errors import InputError

MODULE = """
import numpy as np, tensorflow as tf
def arrays():
    return np.arange(6.0).reshape(3, 2), np.array(["b", "a", "b"])
def parts():
    return {"train": arrays(), "test": (np.ones([1, 2]), np.array(["a"]))}
def dataset():
    return tf.data.Dataset.from_tensor_slices((np.arange(6.0).reshape(3, 2), [1, 0, 1]))
def broken():
    raise KeyError("no file")
def stream():
    yield from zip(np.arange(6.0).reshape(3, 2), ["b", "a", "b"])
def wrong():
    return 5
def leaves():
    raise SystemExit(0)
def alone():
    return np.zeros([3, 2]), np.array(["a", "a", "a"])
def numbered():
    return np.zeros([8, 2]), np.full([8], 5)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"source_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_digits_are_the_real_ones():
    examples = digits()
    assert examples.array.shape == (1797, 8, 8, 1)
    assert examples.labels[:10].tolist() == list(range(10))
    assert (examples.array[0, 0, :, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_a_function_gives_arrays_parts_or_a_dataset(module):
    examples = open_source(f"{module}:arrays")
    assert examples.class_names == ("a", "b") and examples.labels.tolist() == [1, 0, 1]
    assert examples.array.dtype == np.float32 and examples.name == f"{module}:arrays"
    parts = open_source(f"{module}:parts")
    assert {name: i.tolist() for name, i in parts.own.items()} == {"train": [0, 1, 2], "test": [3]}
    assert parts.labels.tolist() == [1, 0, 1, 0]
    stream = open_source(f"{module}:stream")
    assert stream.array.tolist() == examples.array.tolist() and stream.labels.tolist() == [1, 0, 1]
    dataset = open_source(f"{module}:dataset")
    assert dataset.array.tolist() == [[0, 1], [2, 3], [4, 5]] and dataset.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "function, message",
    [
        ("array", "Did you mean 'arrays'"),
        ("broken", "raised KeyError: 'no file'"),
        ("wrong", "Received: int"),
        ("leaves", "raised SystemExit: 0"),
        ("alone", "must contain at least two classes with training examples. Received: a."),
        ("numbered", "must contain at least two classes with training examples. Received: 5."),
    ],
)
def test_a_function_that_does_not_work_is_named(module, function, message):
    with pytest.raises(InputError, match=message):
        open_source(f"{module}:{function}")


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(InputError, match="no module 'no_such_module'"):
        open_source("no_such_module:load")


def test_a_module_that_ends_the_program_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaving_source.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="leaving_source called sys.exit"):
        open_source("leaving_source:load")


def test_kinds_of_arrays():
    labels = np.arange(4) % 2
    images = from_arrays(np.full([4, 5, 6], 255, np.uint8), labels, name="a")
    assert images.shape == (5, 6, 1) and images.array.dtype == np.uint8
    assert from_arrays(np.zeros([4, 5], np.int32), labels, name="a").array.dtype == np.int32
    assert from_arrays(np.zeros([4]), labels[:, None], name="a").shape == (1,)
    assert from_arrays(np.zeros([4, 7]), np.ones([4, 7], int), name="a").labels.shape == (4, 7)


@pytest.mark.parametrize(
    "x, y, message",
    [
        (np.zeros([3, 2]), [0, 1], "3 rows in x, 2 in y"),
        (np.zeros([0, 2]), [], "no examples"),
        (np.zeros([2, 2]), [0, -1], "0 or more"),
        (np.zeros([2, 2]), np.eye(2), "argmax"),
        (np.zeros([3, 2]), [0, 1, 500], "Received: 500 as the largest"),
        (np.array([["a"], ["b"]]), [0, 1], "x must be numbers"),
        (np.array([[0.0], [np.nan]]), [0, 1], "Inf in example 1"),
        ([[1, 2], [3]], [0, 1], "one shape"),
    ],
)
def test_arrays_that_cannot_be_used_are_named(x, y, message):
    with pytest.raises(InputError, match=message):
        open_source((x, y))


@pytest.mark.parametrize(
    "value, message",
    [
        ({"test": (np.zeros([2, 2]), [0, 1])}, "needs 'train'"),
        ({"train": (np.zeros([2, 2]), [0, 1]), "valid": 0}, "Did you mean 'validation'"),
        ({"train": (np.zeros([2, 2]), [0, 1]), "test": (np.zeros([2, 3]), [0, 1])}, "one shape"),
    ],
)
def test_parts_that_cannot_be_used_are_named(value, message):
    with pytest.raises(InputError, match=message):
        open_source(value)


def test_datasets_that_cannot_be_used_are_named():
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros([4, 2]), [0, 1, 0, 1]))
    for wrong, message in (
        (dataset.batch(2), "not batches"),
        (dataset.repeat(), "is infinite"),
        (dataset.map(lambda x, y: x), r"\(x, y\) examples"),
    ):
        with pytest.raises(InputError, match=message):
            open_source(wrong)
    with pytest.raises(InputError, match="all splits or none must be"):
        open_source({"train": dataset, "test": Columns()})


def test_a_stream_that_does_not_fit_in_memory_is_read_from_a_file():
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(8.0).reshape(4, 2), [0, 1, 0, 1]))
    examples = open_source(dataset, Reading(memory_bytes=20))
    assert examples.array is None and examples.stored().numpy().tolist() == np.arange(8).reshape(4, 2).tolist()
    assert examples.labels.tolist() == [0, 1, 0, 1]


class Columns:
    """A stand-in for a Hugging Face dataset."""

    features = {"x": None, "label": None}
    with_format = iter = cast_column = None

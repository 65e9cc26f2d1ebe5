"""Hugging Face datasets, if `datasets` is installed, and objects that work like them."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import load
from tfgpu.data.decoding import Reading
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError


def png(value):
    return tf.io.encode_png(np.full([4, 5, 3], value, np.uint8)).numpy()


class Value:
    def __init__(self, dtype):
        self.dtype = dtype


class ClassLabel(Value):
    def __init__(self, names):
        self.dtype, self.names = "int64", names


class Image:
    def __init__(self, decode=True):
        self.decode = decode


class Like:
    """Rows with named columns, as a map-style dataset has them."""

    def __init__(self, features, rows):
        self.features, self._rows = features, rows

    def __iter__(self):
        return iter(self._rows)

    def with_format(self, kind):
        assert kind == "numpy"
        return self

    def cast_column(self, name, feature):
        assert not feature.decode
        return self

    def iter(self, batch_size):
        for start in range(0, len(self._rows), batch_size):
            rows = self._rows[start : start + batch_size]
            yield {name: _array([row[name] for row in rows]) for name in self.features}


def _array(values):
    try:
        return np.array(values)
    except ValueError:
        return np.array([None] * len(values))


CLASSES = ClassLabel(["cat", "dog"])


def test_several_columns_of_numbers_are_one_example():
    rows = [{"a": i, "b": [i / 2, -i], "kind": i % 2} for i in range(2000)]
    examples = open_source(Like({"a": Value("int32"), "b": Value("float32"), "kind": CLASSES}, rows))
    assert examples.array[3].tolist() == [3, 1.5, -3] and examples.array.dtype == np.float32
    assert examples.class_names == ("cat", "dog") and examples.labels[:3].tolist() == [0, 1, 0]


def test_one_column_keeps_its_shape_and_type():
    rows = [{"tokens": [i, i + 1, 0], "label": i % 2} for i in range(6)]
    examples = open_source(Like({"tokens": Value("int64"), "label": Value("int64")}, rows))
    assert examples.array.tolist()[2] == [2, 3, 0] and examples.array.dtype == np.int64


@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_images_stay_encoded_until_they_are_read(tmp_path, memory_bytes):
    (tmp_path / "3.png").write_bytes(png(3))
    rows = [{"image": {"bytes": png(i), "path": None}, "label": i % 2, "id": str(i)} for i in range(12)]
    rows[3]["image"] = {"bytes": None, "path": str(tmp_path / "3.png")}
    like = Like({"image": Image(), "label": CLASSES, "id": Value("string")}, rows)
    examples = open_source({"train": like, "test": like}, Reading(memory_bytes=memory_bytes))
    values = examples.array if memory_bytes else np.stack([examples.load(tf.constant(i, tf.int64)) for i in range(24)])
    assert values[:, 0, 0, 0].tolist() == [*range(12), *range(12)]
    assert examples.encoded(tf.constant(3, tf.int64)).numpy() == png(3)
    assert {part: len(indices) for part, indices in examples.own.items()} == {"train": 12, "test": 12}
    assert open_source(like, Reading(image_size=(2, 3))).shape == (2, 3, 3)
    rows[5]["image"] = {"bytes": b"text", "path": None}
    with pytest.raises(InputError, match="Corrupt: image 5 of data"):
        open_source(like)


@pytest.mark.parametrize(
    ("features", "rows", "message"),
    [
        ({"text": Value("string"), "label": CLASSES}, [{"text": "a", "label": 0}], r"'text' \(string\).*map"),
        ({"a": Value("int32"), "kind": Value("int32")}, [{"a": 1, "kind": 0}], "rename_column\\('kind', 'label'"),
        ({"label": CLASSES}, [{"label": 0}], "only a label column"),
        ({}, [], "columns are unknown"),
        (
            {"a": Value("int32"), "label": CLASSES},
            [{"a": [1], "label": 0}, {"a": [1, 2], "label": 1}],
            "must have one length",
        ),
    ],
)
def test_columns_that_cannot_be_used_are_named(features, rows, message):
    with pytest.raises(InputError, match=message) as caught:
        open_source(Like(features, rows))
    assert "\n" not in str(caught.value)


def test_real_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'tfgpu[hf]'")
    kinds = datasets.ClassLabel(names=["cat", "dog"])
    paths = [tmp_path / f"{i}.png" for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(png(i))
    columns = {"image": [str(path) for path in paths], "label": [i % 2 for i in range(20)]}
    features = datasets.Features({"image": datasets.Image(), "label": kinds})
    photos = datasets.Dataset.from_dict(columns, features=features)
    for source in (photos, photos.to_iterable_dataset(), datasets.DatasetDict({"train": photos})):
        examples = open_source(source)
        assert examples.array[:, 0, 0, 0].tolist() == list(range(20)) and examples.class_names == ("cat", "dog")
    vectors = datasets.Dataset.from_dict({"x": [[i, i / 2] for i in range(20)], "label": [i % 2 for i in range(20)]})
    memory, disk = (load(vectors, global_batch=4, memory_bytes=m) for m in (1 << 30, 10))
    for (x, y), (u, v) in zip(memory.train, disk.train, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)
    text = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    with pytest.raises(InputError, match="'text'"):
        open_source(text)
    assert Path(paths[0]).exists()

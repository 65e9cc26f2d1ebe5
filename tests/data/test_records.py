import gzip

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.data import load, records
from tfgpu.data.decoding import Reading
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError


def images(count):
    random = np.random.default_rng(0)
    return [(random.integers(0, 256, [6, 6, 1], dtype=np.uint8), i % 3) for i in range(count)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tfrecord"
    assert records.write(path, images(12)) == 12
    return path


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 255
    path.write_bytes(raw)


@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_images_are_read_back_exactly(path, memory_bytes):
    examples = open_source(str(path), Reading(memory_bytes=memory_bytes))
    x = examples.array if memory_bytes else np.stack([examples.load(tf.constant(i, tf.int64)) for i in range(12)])
    assert np.array_equal(x, np.stack([x for x, _ in images(12)]))
    assert examples.labels.tolist() == [i % 3 for i in range(12)]


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    whole=st.booleans(),
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
)
def test_numbers_are_read_back_exactly(tmp_path_factory, shape, whole, values):
    path = tmp_path_factory.mktemp("records") / "a.tfrecord"
    x = np.stack([np.full(shape, v) for v in values]).astype(np.int32 if whole else np.float32)
    records.write(path, [(row, 0) for row in x])
    array = open_source(str(path)).array
    assert array.shape == x.shape and np.array_equal(array, x)


def test_features_of_other_writers_are_understood(tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(4):
            feature = {
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=[i, i + 0.5])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 2])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    examples = open_source(str(path))
    assert examples.array.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5], [3, 3.5]]
    assert examples.labels.tolist() == [0, 1, 0, 1]


def test_files_of_parts_and_globs(tmp_path):
    for name, count in (("n-train-0.tfrecord", 6), ("n-train-1.tfrecord", 3), ("n-test.tfrecord", 4)):
        records.write(tmp_path / name, images(count))
    info = load(str(tmp_path), global_batch=2, validation=0).info
    assert (info.train_examples, info.validation_examples, info.test_examples) == (9, 0, 4)
    assert len(open_source(str(tmp_path / "n-train-*.tfrecord")).labels) == 9


def test_a_damaged_record_is_named_or_left_out(path, caplog):
    flip(path, records.Index([path]).offsets[7] + 20)
    with pytest.raises(InputError, match=f"record 7 of {path}.*--skip-corrupt"):
        load(str(path), global_batch=2)
    data = load(str(path), global_batch=2, skip_corrupt=True, validation=0, test=0)
    assert (data.info.skipped, data.info.train_examples) == (1, 11)
    assert f"record 7 of {path}" in caplog.text


@pytest.mark.parametrize("damage", ["header", "cut"])
def test_what_follows_a_damaged_header_is_named(path, damage):
    start = int(records.Index([path]).offsets[5])
    if damage == "header":
        flip(path, start + 1)
    else:
        path.write_bytes(path.read_bytes()[: start + 15])
    with pytest.raises(InputError, match=f"record 5 of {path} and what follows"):
        load(str(path), global_batch=2)
    data = load(str(path), global_batch=2, skip_corrupt=True, validation=0, test=0)
    assert (data.info.skipped, data.info.train_examples) == (1, 5)


def test_a_record_whose_image_is_no_image_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for encoded in (tf.io.encode_png(images(1)[0][0]).numpy(), b"text"):
            feature = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[1])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    with pytest.raises(InputError, match="record 1 of"):
        open_source(str(path))


def test_what_cannot_be_read_is_named(tmp_path, path):
    with pytest.raises(InputError, match="No TFRecord files at"):
        open_source(str(tmp_path / "none.tfrecord"))
    packed = tmp_path / "b.tfrecord.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match="gunzip"):
        open_source(str(packed))
    empty = tmp_path / "c.tfrecord"
    empty.touch()
    with pytest.raises(InputError, match="No readable records"):
        open_source(str(empty))
    with tf.io.TFRecordWriter(str(empty)) as writer:
        writer.write(tf.train.Example().SerializeToString())
    with pytest.raises(InputError, match="lack a known example feature"):
        open_source(str(empty))


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="Example 1"):
        records.write(tmp_path / "a.tfrecord", [([1.0], 0), ([1.0], "cat")])
    with pytest.raises(InputError, match="must contain"):
        records.write(tmp_path / "a.bin", [])
    assert list(tmp_path.iterdir()) == []

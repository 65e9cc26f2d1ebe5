import json
import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu import atomic, cli
from tfgpu.data import check_shards, load, manifest, records, write_shards
from tfgpu.data.decoding import Reading
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError

PARTS = {"validation": 0.1, "test": 0.2}


def numbered(count, classes=3):
    return np.arange(count * 2, dtype=np.float32).reshape(count, 2), np.arange(count) % classes


def photos(folder, count=12, sizes=(5,)):
    random = np.random.default_rng(0)
    for i in range(count):
        image = random.integers(0, 256, [sizes[i % len(sizes)], 6, 3], dtype=np.uint8)
        encode, end = ((tf.io.encode_jpeg, "jpg"), (tf.io.encode_png, "png"))[i % 2]
        path = folder / ("train", "test")[i % 4 == 3] / "ab"[i // 2 % 2] / f"{i:03}.{end}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(image).numpy())
    return str(folder)


def assert_same(one, two):
    assert one.info == two.info
    for part in ("train", "validation", "test"):
        for (x, y), (u, v) in zip(getattr(one, part) or (), getattr(two, part) or (), strict=True):
            assert x.dtype == u.dtype
            np.testing.assert_array_equal(x, u)
            np.testing.assert_array_equal(y, v)


def training(source, reading=None):
    examples = open_source(source, reading)
    return examples.array[examples.own["train"]]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def shard(out, number=0):
    return out / manifest.read(out).shards[number].file


@pytest.mark.slow
def test_digits_come_back_exactly(out):
    listed = write_shards("digits", out, shards=5)
    assert [s.examples for s in listed.shards] == [360, 360, 359, 359, 359] and listed.examples == {"train": 1797}
    assert_same(*(load(source, global_batch=1024, seed=3, **PARTS) for source in ("digits", str(out))))
    examples, source = open_source(str(out), Reading(memory_bytes=0)), open_source("digits")
    for i in range(0, 1797, 300):
        np.testing.assert_array_equal(examples.load(tf.constant(i)), source.array[i])
    np.testing.assert_array_equal(examples.labels, source.labels)


@pytest.mark.slow
def test_images_of_files_keep_their_bytes_and_parts(tmp_path, out):
    source = photos(tmp_path / "photos")
    listed = write_shards(source, out, shards=3)
    assert [s.file for s in listed.shards] == [
        *(f"photos-train-0000{i}-of-00003.tfrecord" for i in range(3)),
        "photos-test-00000-of-00001.tfrecord",
    ]
    assert_same(load(source, global_batch=3, **PARTS), load(str(out), global_batch=3, validation=0.1, test=0.2))
    examples = open_source(str(out))
    written = [examples.encoded(tf.constant(i)).numpy() for i in range(9)]
    files = sorted((tmp_path / "photos" / "train").rglob("*.*"))
    assert written == [path.read_bytes() for path in files] and examples.class_names == ("a", "b")


def test_images_of_several_sizes_are_copied_or_resized(tmp_path, out):
    source = photos(tmp_path / "photos", count=8, sizes=(5, 8, 7))
    assert write_shards(source, out, shards=2).shape == (None, None, 3)
    with pytest.raises(InputError, match="different sizes"):
        open_source(str(out))
    small = Reading(image_size=(2, 3))  # so small that a JPEG may be decoded at half its size
    expected = training(source, small)
    np.testing.assert_array_equal(training(str(out), small), expected)
    listed = write_shards(source, out, shards=2, image_size=(2, 3), overwrite=True)
    assert listed.shape == (2, 3, 3)
    np.testing.assert_array_equal(training(str(out)), expected)


@settings(max_examples=6, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    dtype=st.sampled_from(["uint8", "int16", "int32", "int64", "float32", "float64", "bool"]),
    words=st.booleans(),
    shards=st.integers(1, 6),
)
def test_arrays_come_back_with_shape_type_and_order(tmp_path_factory, shape, dtype, words, shards):
    out = tmp_path_factory.mktemp("shards") / "out"
    x = np.random.default_rng(1).integers(0, 2, [9, *shape]).astype(dtype)
    y = np.array(["b", "a", "c"] * 3) if words else np.arange(9) % 3
    source = open_source((x, y))
    if source.array.dtype == np.uint8 and source.array.ndim == 4 and source.array.shape[-1] == 2:
        with pytest.raises(InputError, match="1 or 3 channels"):
            write_shards((x, y), out, shards=shards)
        return
    write_shards((x, y), out, shards=shards)
    examples = open_source(str(out))
    assert examples.array.dtype == source.array.dtype and examples.class_names == source.class_names
    np.testing.assert_array_equal(examples.array, source.array)
    np.testing.assert_array_equal(examples.labels, source.labels)


def test_a_stream_and_shards_are_sources_too(tmp_path, out):
    x, y = numbered(20)

    def testing():
        yield from zip(x, y, strict=True)

    first = write_shards(testing, out, shards=4)
    again = write_shards(str(out), tmp_path / "again", shards=2, name="test")
    assert first.name == again.name == "testing" and again.shards[0].file == "data-train-00000-of-00002.tfrecord"
    np.testing.assert_array_equal(open_source(str(tmp_path / "again")).array, x)


def test_sequences_of_labels_come_back(out):
    x, y = np.arange(12, dtype=np.int64).reshape(4, 3), np.arange(8).reshape(4, 2)
    assert write_shards((x, y), out, shards=2).shards[0].labels is None
    np.testing.assert_array_equal(open_source(str(out)).labels, y)


def test_without_the_index_the_shards_are_read_in_the_order_of_the_disk(out):
    x, y = numbered(9)
    write_shards((x, y), out, shards=2)
    (out / manifest.FILE).unlink()
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7]  # dealt in turn
    examples = open_source(str(out))
    np.testing.assert_array_equal(examples.array, x[order])
    np.testing.assert_array_equal(examples.labels, y[order])


def test_some_of_the_shards_can_be_named(out):
    x, y = numbered(10)
    write_shards({"train": (x, y), "test": (x[:4], y[:4])}, out, shards=2)
    examples = open_source(str(out / "*-test-*.tfrecord"))
    np.testing.assert_array_equal(examples.array, x[:4])
    assert examples.own["train"].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(open_source(str(shard(out, 1))).array, x[1::2])


def test_with_an_index_opening_reads_no_more_than_one_example(out, monkeypatch):
    x, y = numbered(12)
    write_shards((x, y), out, shards=3)
    read, record = [], records.Index.record
    monkeypatch.setattr(records.Index, "record", lambda self, i: read.append(i) or record(self, i))
    monkeypatch.setattr("tfgpu.data.places.scan", lambda *_: pytest.fail("a file was scanned"))
    examples = open_source(str(out), Reading(memory_bytes=0, examine_bytes=0))
    assert {int(i) for i in read} == {0} and examples.labels.tolist() == y.tolist()
    np.testing.assert_array_equal(examples.load(tf.constant(7)), x[7])


def damage(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 255
    path.write_bytes(raw)


def test_a_damaged_shard_is_named(out):
    write_shards(numbered(12), out, shards=3)
    assert check_shards(out).examples == {"train": 12}
    bad = shard(out, 1)
    damage(bad, 30)
    with pytest.raises(InputError, match=f"shard {bad} is damaged: its checksum") as caught:
        check_shards(out)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=f"record 0 of {bad}"):  # A record's own checksum finds it too.
        open_source(str(out))
    bad.write_bytes(bad.read_bytes()[:-20])
    for read in (check_shards, lambda out: open_source(str(out))):
        with pytest.raises(InputError, match=f"shard {bad} is damaged: it has .* bytes"):
            read(out)
    assert len(open_source(str(out), Reading(skip_corrupt=True)).labels) == 10
    bad.unlink()
    with pytest.raises(InputError, match=f"shard {bad} is missing"):
        open_source(str(out))
    (out / "other.tfrecord").touch()
    with pytest.raises(InputError, match="other.tfrecord is not in index.json"):
        open_source(str(out))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:200], "index.json is damaged"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "written by a newer tfgpu"),
        (lambda text: text.replace('"lengths": "e', '"lengths": "f'), "index.json is damaged"),
        (lambda text: text.replace('"bytes"', '"bits"'), "index.json is damaged"),
    ],
)
def test_a_damaged_index_is_named(out, change, message):
    write_shards(numbered(12), out, shards=2)
    path = out / manifest.FILE
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=message):
        open_source(str(out))


def test_another_programs_index_is_ignored(tmp_path):
    records.write(tmp_path / "a.tfrecord", zip(*numbered(4), strict=True))
    (tmp_path / manifest.FILE).write_text(json.dumps({"shards": []}))
    assert len(open_source(str(tmp_path)).labels) == 4
    with pytest.raises(InputError, match="No shards with an index"):
        check_shards(tmp_path)


def test_a_folder_in_use_is_not_changed(tmp_path, out):
    write_shards(numbered(6), out, shards=2)
    before = sorted(out.iterdir())
    with pytest.raises(InputError, match="already has shards. Replace them with --overwrite"):
        write_shards(numbered(8), out)
    write_shards(numbered(8), out, shards=1, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["arrays-train-00000-of-00001.tfrecord", "index.json"] != before
    (out / "notes.txt").touch()
    with pytest.raises(InputError, match="also contains 'notes.txt'"):
        write_shards(numbered(8), out, overwrite=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "one.tex").touch()
    for wrong, message in ((tmp_path / "thesis", "has no shards"), (out / "notes.txt", "is a file")):
        with pytest.raises(InputError, match=message):
            write_shards(numbered(8), wrong, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "thesis"]


def test_of_two_writers_the_first_wins(tmp_path, out):
    def slow():
        write_shards(numbered(6), out, shards=2)
        yield from zip(*numbered(8), strict=True)

    with pytest.raises(InputError, match="already has shards"):
        write_shards(slow, out)
    assert check_shards(out).examples == {"train": 6} and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("moment", ["in a shard", "before the index", "between the renames"])
def test_an_interrupted_write_keeps_the_old_data(tmp_path, out, monkeypatch, moment):
    write_shards(numbered(6), out, shards=2)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupt(*_, **__):
        raise KeyboardInterrupt if moment != "between the renames" else OSError("no")

    if moment == "in a shard":
        monkeypatch.setattr(records, "serialize", interrupt)
    elif moment == "before the index":
        monkeypatch.setattr(manifest.Manifest, "write", interrupt)
    else:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)  # as on file systems that cannot
        rename = os.rename

        def fail_once(source, target):
            is_new = Path(target) == out and not str(source).endswith(atomic.OLD)
            return interrupt() if is_new else rename(source, target)

        monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises((KeyboardInterrupt, OSError)):
        write_shards(numbered(8), out, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 0}, "whole number from 1 to"),
        ({"shards": 2.5}, "whole number from 1 to"),
        ({"shards": 7}, "more shards than training examples. Received: shards=7, 6 training"),
        ({"image_size": 5}, "image files"),
    ],
)
def test_invalid_settings_name_the_fix(out, options, message):
    with pytest.raises(InputError, match=message):
        write_shards(numbered(6), out, **options)
    assert not out.exists()


def command(capsys, *words):
    """Runs a tfgpu command in this process; returns its exit code and output."""
    with pytest.raises(SystemExit) as done:
        cli.main([*map(str, words)])
    printed = capsys.readouterr()
    return done.value.code, printed.out + printed.err


def test_the_commands(tmp_path, out, capsys):
    source = photos(tmp_path / "photos", count=8)
    code, printed = command(capsys, "data", "write", source, out, "--shards", 2, "--image-size", "4x5", "--name", "p")
    assert code == 0 and printed.splitlines()[-2:-1][0].startswith("photos: train 6, test 2 examples in 3 shards, ")
    assert shard(out).name == "p-train-00000-of-00002.tfrecord" and open_source(str(out)).shape == (4, 5, 3)
    assert command(capsys, "data", "check", out) == (0, printed)
    damage(shard(out), 30)
    code, printed = command(capsys, "data", "check", out)
    assert code == 2 and printed.startswith("error: The shard") and printed.count("\n") == 1
    for words, message in (
        (["write", source, out], "already has shards. Replace them with --overwrite"),
        (["write", "digts", out], "Did you mean 'digits'"),
        (["write", source, tmp_path / "new", "--shards", "0"], "whole number from 1 to"),
        (["write", source, tmp_path / "new", "--image-size", "big"], "--image-size should"),
        (["write"], "`tfgpu data write --help`"),
        (["check", tmp_path], "No shards with an index"),
    ):
        code, printed = command(capsys, "data", *words)
        assert code == 2 and message in printed and printed.count("\n") == 1, printed
    assert not (tmp_path / "new").exists()

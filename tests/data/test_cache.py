import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import cache, load
from tfgpu.data.decoding import Reading
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError, MachineError


def write_photos(folder, count=14):
    random = np.random.default_rng(0)
    for i in range(count):
        path = folder / "photos" / "ab"[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Numbers 4 and 6 are copies, which belong on one side of the split.
        image = np.full([6, 7, 3], 9, np.uint8) if i in (4, 6) else random.integers(0, 256, [6, 7, 3], dtype=np.uint8)
        path.write_bytes(tf.io.encode_png(image).numpy())
    return folder / "photos"


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path)


def read(source, **settings):
    data = load(source, global_batch=4, seed=3, augment=["flip"], test=0.2, **settings)
    return data.info.cache, [(x.numpy(), y.numpy()) for part in (data.train, data.test) for x, y in part]


def same(one, two):
    return all(np.array_equal(a, b) and np.array_equal(c, d) for (a, c), (b, d) in zip(one, two, strict=True))


def opened(source, directory, **settings):
    examples = open_source(str(source), Reading(cache="disk", cache_directory=directory, **settings))
    assert examples.cache == "disk"
    return examples.stored().numpy()


@pytest.mark.slow
def test_every_cache_gives_the_same_batches(photos, tmp_path):
    settings = {"cache": "disk", "cache_directory": tmp_path / "cache"}
    kinds, batches = zip(*(read(photos, **s) for s in ({}, {"cache": "none"}, settings)), strict=True)
    assert kinds == ("memory", "none", "disk")
    assert all(same(batches[0], other) for other in batches[1:])


def test_auto_takes_memory_then_the_disk_then_none(photos, tmp_path):
    def kind(**settings):
        return open_source(str(photos), Reading(**settings)).cache

    assert kind() == kind(cache_directory=tmp_path) == "memory"
    assert kind(memory_bytes=100) == "none"
    assert kind(memory_bytes=100, cache_directory=tmp_path) == "disk"
    assert kind(cache_directory=tmp_path) == "disk"  # It is there already.


def test_a_cache_is_written_once_and_again_when_a_file_has_changed(photos, tmp_path):
    def written():
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.examples")}

    before = opened(photos, tmp_path)
    first = written()
    assert len(first) == 1 and before.nbytes == sum(p.stat().st_size for p in tmp_path.glob("*.examples"))
    (photos / "a" / "000.png").write_bytes((photos / "b" / "001.png").read_bytes())
    changed = opened(photos, tmp_path)
    assert len(written()) == 2 and first.items() <= written().items()
    assert np.array_equal(changed[1:], before[1:]) and np.array_equal(changed[0], changed[7])
    opened(photos, tmp_path, image_size=(6, 7))
    assert len(written()) == 3  # Another setting of the reading is another cache.
    assert not list(tmp_path.glob(".*.examples.*"))


def test_nothing_is_decoded_where_there_is_a_cache(photos, tmp_path):
    stored = Reading(cache="disk", cache_directory=tmp_path)
    first = open_source(str(photos), stored)
    for path in photos.rglob("*.png"):  # The same size and time, but no longer an image.
        facts = path.stat()
        path.write_bytes(b"x" * facts.st_size)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    again = open_source(str(photos), stored)
    assert np.array_equal(first.stored().numpy(), again.stored().numpy())
    assert again.copies.tolist() == first.copies.tolist() and again.copies[2] == again.copies[3]
    assert again.class_names == ("a", "b") and again.labels.tolist() == [0] * 7 + [1] * 7


def test_a_damaged_cache_is_written_again(photos, tmp_path, caplog):
    expected = opened(photos, tmp_path)
    for kind in ("examples", "npz"):
        path = next(tmp_path.glob(f"*.{kind}"))
        path.write_bytes(path.read_bytes()[:-7])
        assert np.array_equal(opened(photos, tmp_path), expected)
    assert caplog.text.count("rewriting it") == 2


@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_byte_is_noticed(photos, tmp_path, caplog, place):
    expected = opened(photos, tmp_path)
    path = next(tmp_path.glob("*.examples"))
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert np.array_equal(opened(photos, tmp_path), expected)
    assert "is damaged; rewriting it" in caplog.text


def test_values_are_compared_with_the_checksums_once_and_again_after_a_change(photos, tmp_path, monkeypatch):
    read, checksums = [], cache._checksums
    monkeypatch.setattr(cache, "_checksums", lambda path, size: (read.append(path), checksums(path, size))[1])
    expected = opened(photos, tmp_path)  # writes it
    for _ in range(3):
        assert np.array_equal(opened(photos, tmp_path), expected)
    assert len(read) == 1
    os.utime(read[0])
    for _ in range(2):
        assert np.array_equal(opened(photos, tmp_path), expected)
    assert len(read) == 2


def test_a_damaged_record_of_the_comparison_is_ignored(photos, tmp_path):
    expected = [opened(photos, tmp_path) for _ in range(2)][0]
    next(tmp_path.glob("*.verified")).write_bytes(b"\xff\xfe")
    assert np.array_equal(opened(photos, tmp_path), expected)


def test_values_and_index_are_flushed_to_the_disk(photos, tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    opened(photos, tmp_path)
    assert [Path(name).suffix for name in flushed if name != str(tmp_path)] == [".examples", ".npz"]


def test_skipped_examples_are_remembered(photos, tmp_path):
    (photos / "a" / "002.png").write_bytes(b"text")
    for _ in range(2):
        reading = Reading(skip_corrupt=True, cache="disk", cache_directory=tmp_path)
        skipped = open_source(str(photos), reading).skipped
        assert len(skipped) == 1 and "002.png" in skipped[0]


def test_two_processes_write_one_cache_once(photos, tmp_path, monkeypatch):
    writes = []
    renamed = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (writes.append(b.suffix), renamed(a, b)))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: opened(photos, tmp_path), range(2))
    assert np.array_equal(one, two) and sorted(writes) == [".examples", ".npz", ".verified"]


def test_too_little_space_is_reported_before_anything_is_written(photos, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(MachineError, match="no room .* Use another"):
        load(photos, global_batch=2, cache="disk", cache_directory=tmp_path / "c")
    examples = open_source(str(photos), Reading(memory_bytes=9, cache_directory=tmp_path / "c"))
    assert examples.cache == "none" and "no room" in caplog.text
    assert not list((tmp_path / "c").glob("*.examples"))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"cache": "ram"}, "Unknown cache 'ram'"),
        ({"cache": "disk"}, "Give cache_directory"),
        ({"cache": "none", "cache_directory": "c"}, "Remove one of them"),
        ({"cache": "memory", "memory_bytes": 100}, "do not fit in memory_bytes=100. Increase it"),
        ({"cache": "disk", "cache_directory": "/proc/none"}, "Cannot create cache_directory"),
    ],
)
def test_an_impossible_cache_says_why(photos, settings, message):
    with pytest.raises(InputError, match=message):
        load(photos, global_batch=2, **settings)


@pytest.mark.parametrize("choice", [{"cache": "none"}, {"cache_directory": "c"}])
def test_arrays_are_in_memory_already(choice):
    with pytest.raises(InputError, match="already in memory"):
        load("digits", global_batch=2, **choice)


def test_memory_that_is_enough_is_used_whatever_the_size_of_the_files(photos):
    assert open_source(str(photos), Reading(examine_bytes=0)).cache == "memory"
    assert open_source(str(photos), Reading(examine_bytes=0, memory_bytes=14 * 6 * 7 * 3 - 1)).cache == "none"


def test_a_cached_dataset_is_sharded_over_replicas(photos, tmp_path):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    data = load(Path(photos), global_batch=4, cache="disk", cache_directory=tmp_path, validation=0, test=0)
    expected = [x.numpy() for x, _ in data.train]
    data.seek(0)
    got = [
        np.concatenate([part.numpy() for part in strategy.experimental_local_results(x)])
        for x, _ in strategy.experimental_distribute_dataset(data.train)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))

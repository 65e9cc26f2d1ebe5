import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import load, spool
from tfgpu.data.decoding import Reading
from tfgpu.data.sources import open_source
from tfgpu.errors import InputError, MachineError

LARGE, SMALL = 1 << 30, 30  # bytes of memory: everything fits, or next to nothing


def batches(data):
    parts = [part for part in (data.train, data.validation, data.test) if part is not None]
    return [[(x.numpy(), y.numpy()) for x, y in part] for part in parts]


def same(one, two):
    flat = [[v for part in data for pair in part for v in pair] for data in (one, two)]
    return len(flat[0]) == len(flat[1]) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*flat, strict=True)
    )


def vectors():
    for i in range(600):  # more than a chunk; every fifth one is a copy of another
        yield [i % 500, i % 3 + 0.5], "abc"[i % 3]


def images():
    for i in range(40):
        yield np.full([5, 4], i, np.uint8), i % 2


def tokens():
    for i in range(40):
        yield np.arange(i, i + 3, dtype=np.int32), [i % 7, i % 5]


@pytest.mark.parametrize("source", [vectors, images, tokens])
def test_a_generator_gives_the_same_batches_from_memory_and_from_a_file(source):
    memory, disk = (load(source, global_batch=16, seed=3, memory_bytes=m) for m in (LARGE, SMALL))
    assert memory.info == disk.info
    assert same(batches(memory), batches(disk))


@pytest.mark.parametrize("memory_bytes", [LARGE, SMALL])
def test_parts_may_be_streams_of_several_kinds(memory_bytes):
    x, y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10) % 2
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    source = {"train": lambda: zip(x, y, strict=True), "test": dataset.take(3), "validation": (x[:4], y[:4])}
    data = load(source, global_batch=5, shuffle=False, memory_bytes=memory_bytes)
    train, validation, test = (np.concatenate([v for v, _ in part]) for part in batches(data))
    np.testing.assert_array_equal(train, x)
    np.testing.assert_array_equal(validation, x[:4])
    np.testing.assert_array_equal(test, x[:3])


def test_files_go_when_the_process_ends(tmp_path, monkeypatch):
    gone = []
    monkeypatch.setattr(spool.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spool.atexit, "register", lambda function, *args, **_: gone.append((function, args)))
    open_source(vectors, Reading(memory_bytes=SMALL))
    assert len(list(tmp_path.glob("tfgpu-*/examples"))) == 1
    for function, args in gone:
        function(*args)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_fills_the_disk_is_stopped(monkeypatch):
    monkeypatch.setattr(spool, "_LEAST_FREE", 1 << 60)
    with pytest.raises(MachineError, match="has no room for it.*TMPDIR.*check that the data ends"):
        open_source(vectors, Reading(memory_bytes=SMALL))
    open_source(vectors, Reading(memory_bytes=LARGE))


def broken(*pairs):
    return lambda: iter(pairs)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (broken(([1.0], 0), ([1.0, 2.0], 1)), "one shape"),
        (broken(([1.0], 0), ([1.0], [0, 1])), "one shape"),
        (broken(*[([i / 2], i % 2) for i in range(300)], ([np.nan], 0)), "Inf in example 300"),
        (broken(*[([i / 2], i % 2) for i in range(256)], ([1], 0)), "one type. Received: float32 and int64"),
        (broken(*[([i / 2], i % 2) for i in range(256)], ([1.5], "a")), "labels must have one type and shape"),
        (broken(), "no examples"),
        (broken([1.0]), "must be a pair"),
        (lambda: 5, "must yield"),
        (broken(("text", 0)), "must be numbers"),
        (7, "a function that yields"),
    ],
)
@pytest.mark.parametrize("memory_bytes", [LARGE, SMALL])
def test_streams_that_cannot_be_used_are_named(source, message, memory_bytes):
    with pytest.raises(InputError, match=message) as caught:
        open_source(source, Reading(memory_bytes=memory_bytes))
    assert "\n" not in str(caught.value)

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.cluster import Cluster
from tfgpu.data import load, shards, write_shards
from tfgpu.data.examples import Examples
from tfgpu.errors import InputError


def workers(count):
    addresses = tuple(f"h{i}:1" for i in range(count))
    return [Cluster(addresses, rank=i, task_index=i) for i in range(count)]


def images(count):
    """Gray images that contain their own index."""
    x = np.arange(count, dtype=np.uint8)[:, None, None, None] + np.zeros([4, 4, 1], np.uint8)
    return x, np.arange(count) % 2


def numbers(dataset):
    return [np.round(x.numpy()[:, 0, 0, 0] * 255).astype(int).tolist() for x, _ in dataset]


def test_the_plan_by_hand():
    # 9 to worker 0; 5 to 1; 4 to 1 (5 < 9): 9 and 9; 2 to 0, which has as many examples and as many files... fewer.
    assert shards.plan(np.array([5, 9, 4, 2]), 2).tolist() == [1, 0, 1, 0]
    assert shards.plan(np.array([1] * 6), 3).tolist() == [0, 1, 2, 0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=40), count=st.integers(1, 7))
def test_every_file_has_one_worker_and_loads_are_even(counts, count):
    counts = np.array(counts)
    owner = shards.plan(counts, count)
    loads = np.bincount(owner, weights=counts, minlength=count)
    assert len(owner) == len(counts) and loads.sum() == counts.sum()
    best = max(counts.max(), counts.sum() / count)
    assert loads.max() - loads.min() <= counts.max() and loads.max() <= 2 * best


@settings(max_examples=40, deadline=None)
@given(
    file_of=st.lists(st.integers(0, 12), min_size=8, max_size=90),
    count=st.integers(1, 4),
    batch=st.integers(4, 20),
    kind=st.sampled_from(shards.CHOICES),
)
def test_each_example_is_one_worker_s_and_all_make_as_many_batches(file_of, count, batch, kind):
    examples = Examples("a", np.zeros(len(file_of)), (2,), ("a",), load=abs, file_of=np.array(file_of))
    indices = np.flatnonzero(np.arange(len(file_of)) % 5)  # the training part
    try:
        parts = [
            shards.share(examples, indices, sharding=kind, global_batch=batch, cluster=worker)
            for worker in workers(count)
        ]
    except InputError:
        assert kind == "file" and count > 1
        return
    assert len({(part.by, part.steps) for part in parts}) == 1
    if parts[0].by == "data":  # all make every global batch
        assert all(np.array_equal(part.indices, indices) for part in parts)
        assert (parts[0].batch, parts[0].steps) == (batch, -(-len(indices) // batch))
        return
    assert count > 1 and kind != "data"
    assert sorted(np.concatenate([part.indices for part in parts]).tolist()) == indices.tolist()
    assert [part.first for part in parts] == np.cumsum([0, *(len(part.indices) for part in parts[:-1])]).tolist()
    assert all(part.batch <= batch for part in parts)
    assert all(-(-len(part.indices) // part.batch) * count <= part.steps for part in parts)
    files = [set(np.array(file_of)[part.indices].tolist()) for part in parts]
    assert sum(map(len, files)) == len(set().union(*files))


@pytest.mark.sample(1)
@pytest.mark.parametrize("count, memory_bytes", [(2, 0), (3, 1 << 30)])
def test_each_example_is_read_once_an_epoch(tmp_path, caplog, count, memory_bytes):
    write_shards(images(50), tmp_path / "out", shards=7)
    caplog.set_level(logging.INFO)
    options = {"global_batch": 8, "seed": 1, "validation": 0, "test": 0.2, "memory_bytes": memory_bytes}
    whole = load(str(tmp_path / "out"), **options)
    made = [load(str(tmp_path / "out"), sharding="file", cluster=worker, **options) for worker in workers(count)]
    assert caplog.text.count("training examples are sharded by file: 7 files") == 1  # by the chief
    before = None
    for _ in range(2):
        read = [numbers(data.train) for data in made]
        assert sorted(sum(sum(read, []), [])) == sorted(sum(numbers(whole.train), []))
        assert len({len(batches) for batches in read}) == 1
        assert read != before
        before = read
    assert all(numbers(data.test) == numbers(whole.test) for data in made)
    assert len({data.info.steps_per_epoch for data in made}) == 1


def test_random_numbers_of_workers_do_not_overlap(tmp_path):
    x = np.zeros([12, 4, 4, 1], np.uint8)
    write_shards((x, np.arange(12) % 2), tmp_path / "out", shards=4)
    options = {"global_batch": 12, "validation": 0, "test": 0, "augment": ["noise"], "sharding": "file"}
    noise = [
        batch.numpy()
        for worker in workers(2)
        for batch, _ in load(str(tmp_path / "out"), cluster=worker, **options).train
    ]
    assert len(np.unique(np.concatenate(noise)[:, 0, 0, 0])) == 12


def test_auto_says_why(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    write_shards(images(40), tmp_path / "even", shards=4)
    options = {"global_batch": 8, "validation": 0, "test": 0, "sharding": "auto"}

    def said(source, count=2, memory_bytes=0):
        caplog.clear()
        load(source, cluster=workers(count)[0], memory_bytes=memory_bytes, **options)
        return caplog.text

    even = str(tmp_path / "even")
    for source, memory_bytes in ((even, 0), (even, 1 << 30), (images(10), 0)):
        assert "sharded by data: each worker reads its rows of every" in said(source, memory_bytes=memory_bytes)
    assert "sharded" not in said(even, count=1)


@pytest.mark.parametrize(
    ("sharding", "message"), [("fil", "Did you mean 'file'"), ("file", "cannot be sharded by file: it is not read")]
)
def test_data_that_cannot_be_sharded_is_named(sharding, message):
    with pytest.raises(InputError, match=message):
        load(images(10), global_batch=4, sharding=sharding, cluster=workers(2)[0])


def test_too_few_files_are_named(tmp_path):
    write_shards(images(40), tmp_path / "few", shards=4)
    with pytest.raises(InputError, match="4 files are too few for 5 workers"):
        load(str(tmp_path / "few"), global_batch=8, sharding="file", cluster=workers(5)[0])

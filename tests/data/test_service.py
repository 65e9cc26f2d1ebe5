"""A tf.data service in real processes gives the batches of this process, whichever process dies."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf

from tfgpu.core import worker_rows
from tfgpu.data import load, service
from tfgpu.errors import InputError

pytestmark = [pytest.mark.processes]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(60):
        path = folder / ("cat" if i % 3 else "dog") / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tf.io.encode_jpeg(rng.integers(0, 256, [16, 16, 3], dtype=np.uint8)).numpy())
    return folder


@contextlib.contextmanager
def serving():
    """The address of a service with two workers, and its process."""
    command = [sys.executable, "-m", "tfgpu", "data", "serve", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process.stdout.readline().strip(), process
    finally:
        workers = psutil.Process(process.pid).children() if process.poll() is None else []
        process.terminate()
        process.wait(timeout=550)
        _, left = psutil.wait_procs(workers, timeout=550)
        assert not left


@pytest.fixture(scope="module")
def shared():
    with serving() as found:
        yield found


@pytest.fixture
def served():
    """A service that the test may kill."""
    with serving() as found:
        yield found


def data(photos, **options):
    return load(str(photos), global_batch=8, augment=["flip"], seed=3, cache="none", test=0, **options)


def same(mine, theirs):
    assert len(mine) == len(theirs)
    for (x, y), (u, v) in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)


@pytest.mark.slow
def test_the_same_batches_in_the_same_order(photos, shared):
    here, there = data(photos), data(photos, service=shared[0])
    assert there.train.element_spec == here.train.element_spec
    for _ in range(2):
        same(list(here.train), list(there.train))
    there.seek(1)
    here.seek(1)
    same([here.peek()], [there.peek()])


@pytest.mark.slow
@pytest.mark.parametrize("stages", [["flip"], ["mixup"]])
def test_each_worker_asks_for_its_own_rows(photos, shared, caplog, stages):
    """Three workers with a shard each: a batch of 8 is 3, 3 and 2 rows."""
    options = {"global_batch": 8, "augment": stages, "seed": 3, "cache": "none", "test": 0}
    here, there = (load(str(photos), **options, **more) for more in ({}, {"service": shared[0]}))
    same([here.peek()], [worker_rows.of(there.train).first()])
    whole = list(here.train)
    asked = 0
    for worker in range(3):
        ranges = worker_rows.Ranges((worker,), 3)
        there.seek(0)
        found = list(worker_rows.of(there.train).make(ranges))
        assert [int(total) for _, total in found] == [len(y) for _, y in whole]
        same([ranges.take(batch)[0] for batch in whole], [rows for rows, _ in found])
        asked += sum(len(y) for (_, y), _ in found)
    assert asked == here.info.epoch_examples
    assert "did not arrive" not in caplog.text


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(service.in_order, "__kwdefaults__", {"patience_s": 1.0, "ahead": 64})


@pytest.mark.slow
def test_a_dead_worker_loses_no_batch(photos, served, impatient):
    here, there = data(photos), data(photos, service=served[0])
    expected, found = list(here.train), []
    for number, batch in enumerate(there.train):
        if number == 1:
            os.kill(psutil.Process(served[1].pid).children()[0].pid, signal.SIGKILL)
        found.append(batch)
    same(expected, found)
    end = time.monotonic() + 500
    while len(psutil.Process(served[1].pid).children()) < 2 and time.monotonic() < end:
        time.sleep(0.2)
    assert len(psutil.Process(served[1].pid).children()) == 2


@pytest.mark.slow
def test_a_dead_service_loses_no_batch(photos, served, impatient):
    here, there = data(photos), data(photos, service=served[0])
    expected, found = list(here.train), []
    for number, batch in enumerate(there.train):
        if number == 1:
            served[1].kill()
            served[1].wait()
        found.append(batch)
    same(expected, found)


@pytest.mark.slow
def test_a_corrupt_example_is_named(photos, shared):
    there = data(photos, service=shared[0])
    victim = photos / "dog" / "0.jpg"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:100])
    try:
        with pytest.raises(tf.errors.OpError, match="Corrupt: example"):
            for _ in range(2):
                list(there.train)
    finally:
        victim.write_bytes(whole)


class Numbers:
    """An epoch of three batches, each its own number."""

    steps = 3

    def numbered(self):
        return tf.data.Dataset.range(self.steps).enumerate()

    def make(self, step):
        return step


def test_whatever_error_ends_the_fetching_the_rest_is_made_here_at_once(caplog):
    assert list(service.in_order(Numbers(), "", patience_s=5)) == [0, 1, 2]  # tf.data refuses "": a ValueError
    assert "ValueError" in caplog.text and "No batch from" not in caplog.text


def test_no_service_answers(photos):
    with pytest.raises(InputError, match="No tf.data service answers at localhost:1 .*tfgpu data serve"):
        data(photos, service="localhost:1")
    with pytest.raises(InputError, match="must look like 'grpc://HOST:PORT'"):
        data(photos, service="here")


@pytest.mark.slow
def test_data_in_memory_needs_no_service(shared):
    with pytest.raises(InputError, match="decoded examples in memory"):
        load("digits", global_batch=8, service=shared[0])


def test_data_that_cannot_be_served():
    with pytest.raises(InputError, match="`workers` must be a whole number of at least 1"):
        service.serve(0)
    with pytest.raises(InputError, match="`host` must be a name .*'no such host'"):
        service.serve(1, host="no such host")

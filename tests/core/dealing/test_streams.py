"""Workers of one process, with real sockets: each batch is made once, and each worker gets its rows of it."""

import collections
import contextlib
import os
import random
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core.dealing import batches, epochs, links
from tfgpu.core.dealing.batches import Layout
from tfgpu.core.dealing.links import Links
from tfgpu.core.dealing.making import Ahead, Chosen, OneByOne
from tfgpu.core.dealing.streams import AHEAD, Stream, StreamSpec
from tfgpu.core.worker_rows import Ranges
from tfgpu.core.workers.ledger import Ledger
from tfgpu.errors import InputError, MachineError

KEY = b"k" * 32
SPEC = (
    {"a": tf.TensorSpec([None, 2], "float32"), "b": tf.TensorSpec([None], "string")},
    tf.TensorSpec([None, 3, 1], "bool"),
    tf.TensorSpec([], "float64"),
)


def together(*jobs):
    """Runs functions in threads; returns what each returned or raised."""
    found = [None] * len(jobs)

    def run(at, job):
        try:
            found[at] = job()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(jobs)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(300)
        assert not each.is_alive()
    return found


def hang_up(each):
    """As the end of a worker's process does."""
    for connection in each._connections.values():
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def mesh():
    """Makes so many workers' links to each other."""
    made = []

    def make(workers):
        names = [f"worker {rank} (127.0.0.1:{rank + 1})" for rank in range(workers)]
        ledgers = [Ledger(names, [f"/job:worker/task:{rank}" for rank in range(workers)], at) for at in range(workers)]
        listeners = [links._listener(name) for name in names]
        ports = [each.getsockname()[1] for each in listeners]
        connections = [{} for _ in names]
        said = together(
            *(
                lambda at=at: links._meet(ledgers[at], listeners[at], ports, KEY, connections[at])
                for at in range(workers)
            )
        )
        assert said == [""] * workers
        for each in listeners:
            each.close()
        made.extend(Links(*each) for each in zip(ledgers, connections, strict=True))
        return made

    yield make
    for each in made:
        hang_up(each)


def batch(number, rows):
    draw = np.random.default_rng(number)
    texts = [f"{number}-{row}" * (row + 1) for row in range(rows)]
    return {"a": draw.normal(size=(rows, 2)), "b": texts}, draw.random((rows, 3, 1)) > 0.5, number / 3


class Batches:
    """Batches of 5 rows, the last one of 2."""

    workers, use_multiprocessing, max_queue_size = 2, False, 3

    def __init__(self, count=7, fails=None):
        self.count, self.fails, self.made = count, fails, collections.Counter()

    def __getitem__(self, number):
        self.made[number] += 1
        if number == self.fails:
            raise OSError("The disk\nis away")
        return batch(number, 5 if number < self.count - 1 else 2)


def ranges_of(workers, devices):
    return [Ranges(tuple(d * workers + w for d in range(devices)), workers * devices) for w in range(workers)]


def streams(made, data, spec, order):
    return [
        Stream(
            each, ("test", 0), spec, OneByOne(Chosen(data, order, 0, each.rank, spec.makers, lambda d, n: d[n]), id_)
        )
        for each in made
    ]


def id_(value):
    return value


def same(ours, theirs):
    tf.nest.assert_same_structure(ours, theirs)
    for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()


@pytest.mark.parametrize(("workers", "devices"), [(1, 1), (2, 1), (3, 1), (2, 3)])
def test_each_batch_is_made_once_and_each_worker_gets_its_rows(mesh, workers, devices):
    made, data, order = mesh(workers), Batches(), [3, 0, 6, 1, 2, 5, 4]
    ranges = ranges_of(workers, devices)
    spec, layout = StreamSpec("Batches", Layout(SPEC), ranges, workers), Layout(SPEC)
    found = together(*(lambda each=each: list(each.read()) for each in streams(made, data, spec, order)))
    assert data.made == collections.Counter(order)
    for rows, own in zip(found, ranges, strict=True):
        assert [int(total) for _, total in rows] == [5, 5, 2, 5, 5, 5, 5]
        for (ours, total), number in zip(rows, order, strict=True):
            same(ours, layout.packed(batches.taken(layout.arrays(batch(number, total)), own, int(total))))
    assert not [each for each in threading.enumerate() if each.name == "tfgpu-dealing"]


def test_a_maker_waits_for_workers_that_take_nothing(mesh):
    made, data = mesh(2), Batches(count=40)
    spec = StreamSpec("Batches", Layout(SPEC), ranges_of(2, 1), 2)
    first, second = streams(made, data, spec, list(range(40)))
    while data.made.total() < 2 * (AHEAD + 1):
        time.sleep(0.01)
    assert len(next(first.read())[0][1]) == 3  # rows of the first batch
    assert set(data.made) <= set(range(2 * (AHEAD + 2)))
    together(first.close, second.close)
    assert not [each for each in threading.enumerate() if each.name == "tfgpu-dealing"]


@pytest.mark.parametrize("fails", [0, 4])
def test_all_end_with_one_error_for_a_batch_that_cannot_be_made(mesh, fails, caplog):
    made, data = mesh(3), Batches(fails=fails)
    spec = StreamSpec("Batches", Layout(SPEC), ranges_of(3, 1), 3)
    found = together(*(lambda each=each: list(each.read()) for each in streams(made, data, spec, list(range(7)))))
    words = f"Batch {fails} of `Batches` cannot be made on worker {fails % 3} (127.0.0.1:{fails % 3 + 1})"
    assert {type(each) for each in found} == {MachineError}
    assert {str(each) for each in found} == {f"{words}: OSError: The disk"}
    assert "is away" in caplog.text  # the whole traceback, where it happened


def test_what_is_no_batch_is_an_error(mesh):
    class Odd(Batches):
        def __getitem__(self, number):
            (parts, y, weight) = super().__getitem__(number)
            return (parts, y[:3], weight) if number == 1 else (parts, y, weight)

    spec = StreamSpec("Odd", Layout(SPEC), ranges_of(2, 1), 2)
    found = together(*(lambda each=each: list(each.read()) for each in streams(mesh(2), Odd(), spec, [0, 1, 2])))
    assert {type(each) for each in found} == {InputError}
    assert all("same number of rows. Received: [3, 5]" in str(each) for each in found)


def test_a_worker_that_is_gone_ends_the_others(mesh):
    made, data = mesh(3), Batches(count=60)
    spec = StreamSpec("Batches", Layout(SPEC), ranges_of(3, 1), 3)
    one, two, three = streams(made, data, spec, list(range(60)))
    next(three.read())
    hang_up(made[2])
    found = together(lambda: list(one.read()), lambda: list(two.read()))
    assert {type(each) for each in found} == {MachineError}
    assert all("no longer answers" in str(each) for each in found)
    three.close()


def test_strangers_get_no_answer_and_block_nobody(mesh):
    name = "worker 0 (127.0.0.1:1)"
    with links._listener(name) as listener:
        connections = {}
        waiting = threading.Thread(target=links._accept, args=(listener, KEY, {1}, connections), daemon=True)
        waiting.start()
        address = listener.getsockname()
        with socket.create_connection(address, 5) as silent, socket.create_connection(address, 5) as stranger:
            stranger.sendall(os.urandom(68))
            assert stranger.recv(1) == b""
            with pytest.raises((OSError, links.Stranger)):
                links.call(address, 1, b"another key" * 3)
            with links.call(address, 1, KEY) as connection:
                waiting.join(300)
                assert list(connections) == [1]
                links.send(connection, {"key": [], "kind": "x"}, [memoryview(b"abc")])
                header, content = links.receive(connections[1])
                assert header == {"key": [], "kind": "x"} and content.tobytes() == b"abc"
            assert silent.fileno() > 0
        connections[1].close()


def test_threads_of_keras_make_batches_ahead_in_order_and_pause():
    data = Batches(count=20)
    ahead = Ahead(Chosen(data, list(range(20)), 0, 1, 2, lambda d, n: n), id_, data)
    assert [next(ahead) for _ in range(3)] == [1, 3, 5]
    with ahead.paused():
        pass
    assert list(ahead) == [7, 9, 11, 13, 15, 17, 19]
    ahead.close()


class Holds:
    def __init__(self, seed):
        self.rng, self.old, self.own = np.random.default_rng(seed), np.random.RandomState(seed), random.Random(seed)
        self.order, self.count, self.texts = np.arange(50), 0, ["a", "b"]


def test_workers_draw_alike_after_an_epoch_whatever_they_drew_in_it():
    chief, other = Holds(1), Holds(2)
    random.seed(5)
    np.random.seed(5)
    text = epochs.states(chief)
    drawn = []
    for number, each in enumerate((chief, other)):
        random.seed(number)
        np.random.seed(number)
        epochs.take_over(each, text)
        before = epochs.marks(each)
        each.rng.shuffle(each.order)
        each.count += 1
        drawn.append((each.old.random(), each.own.random(), random.random(), np.random.random(), each.order.tolist()))
        drawn[-1] += (epochs.changed(before, epochs.marks(each)),)
    assert drawn[0] == drawn[1] and set(drawn[0][-1]) == {"order", "count"}
    epochs.check("Holds", drawn[0][-1], drawn[1][-1], "worker 1")
    other.order[:2] = other.order[1::-1]
    with pytest.raises(InputError, match="`order` of `Holds` is not the same on worker 1"):
        epochs.check("Holds", drawn[0][-1], epochs.changed(before, epochs.marks(other)), "worker 1")

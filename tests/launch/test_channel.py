"""The connections between a launching program and its Spark tasks."""

import os
import socket
import threading
import time

import pytest

from tfgpu.errors import MachineError
from tfgpu.launch.spark.channel import GONE, SparkLink, TaskListener, connected, relay


class Worker:
    """Stands for a task's `Relay`: hands out what it is given, and notes what is sent to it."""

    def __init__(self, *messages):
        self._pipe = os.pipe()
        self.asked, self.closed = [], threading.Event()
        self._messages = []
        for each in messages:
            self.tell(each)

    def tell(self, messages):
        self._messages.append(messages)
        os.write(self._pipe[1], b"!")

    def fileno(self):
        return self._pipe[0]

    def receive(self):
        os.read(self._pipe[0], 1)
        return self._messages.pop(0)

    def send(self, do, facts):
        self.asked.append((do, facts))
        if do == "end":
            self.tell(None)

    def close(self):
        self.closed.set()


@pytest.fixture
def links():
    made = [SparkLink(rank) for rank in range(5)]
    yield made
    for link in made:
        link.close()


def served(link):
    while not link.is_served:
        time.sleep(0.01)


def test_messages_arrive_at_the_link_of_their_rank(links):
    worker = Worker([({"event": "hello"}, b"")], [({"event": "output"}, b"x"), ({"event": "exit"}, b"")], None)
    with TaskListener("localhost", links) as listener, connected(listener.address, listener.key, 1) as line:
        relay(line, worker)
        assert links[1].receive() == [({"event": "hello"}, b"")]
        assert [data for _, data in links[1].receive()] == [b"x", b""]
    assert worker.closed.is_set()
    assert links[1].receive() is None and links[1].last_words() == (GONE,)


def test_what_is_sent_reaches_the_task_even_before_it_connects(links):
    worker = Worker()
    with TaskListener("localhost", links) as listener:
        links[0].send("reserve", count=1)
        with connected(listener.address, listener.key, 0) as line:
            thread = threading.Thread(target=relay, args=(line, worker))
            thread.start()
            served(links[0])
            links[0].send("end", grace_period_s=0)
            thread.join(300)
    assert worker.asked == [("reserve", {"count": 1}), ("end", {"grace_period_s": 0})] and worker.closed.is_set()


def test_a_program_that_is_gone_ends_the_worker(links):
    worker = Worker()
    with TaskListener("localhost", links) as listener:
        line = connected(listener.address, listener.key, 0)
        served(links[0])
    relay(line, worker)
    assert worker.closed.is_set()


def test_a_listener_waits_until_its_tasks_are_gone(links):
    with TaskListener("localhost", links) as listener:
        with connected(listener.address, listener.key, 0):
            served(links[0])
            began = time.monotonic()
            listener.wait(0.5)
            assert time.monotonic() - began >= 0.5 and links[0].is_served
        listener.wait(300)
        assert not links[0].is_served


def test_strangers_are_ignored_and_block_nobody(links):
    with TaskListener("localhost", links) as listener, socket.create_connection(("localhost", listener.address[1])):
        with pytest.raises(Exception, match="digest"):
            connected(listener.address, b"another key", 0)
        assert not links[0].is_served
        with connected(listener.address, listener.key, 2) as line:
            line.send([({"event": "hello"}, b"")])
            assert links[2].receive() == [({"event": "hello"}, b"")]


def test_an_unreachable_listener(links):
    with TaskListener("localhost", links) as listener:
        address = listener.address
    with pytest.raises(MachineError, match="Worker 4 cannot reach the Spark driver.*driver_port"):
        connected(address, listener.key, 4)


def test_a_port_that_is_taken(links):
    with socket.create_server(("", 0)) as taken, pytest.raises(MachineError, match="Give another `driver_port`"):
        TaskListener("localhost", links, taken.getsockname()[1])

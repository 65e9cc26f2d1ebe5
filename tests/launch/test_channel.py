"""The line between a launching program and its tasks."""

import socket
import threading
import time

import pytest

from tfgpu.errors import MachineError
from tfgpu.launch.functions.child import Ended
from tfgpu.launch.spark.channel import GONE, STOP, Desk, connected, follow


class Child:
    """Stands for a worker's process: hands out what it is given, then nothing."""

    def __init__(self, *news):
        self._news, self.stopped = list(news), threading.Event()

    def news(self, wait_s):
        return self._news.pop(0) if self._news else ([], None)

    def stop(self):
        self.stopped.set()


def test_reports_and_the_end_arrive_with_the_rank():
    ended = Ended(1, 0)
    child = Child(([{"loss": 1.0}], None), ([], ended))
    with Desk("localhost") as desk, connected(desk.address, desk.key, 1) as line:
        follow(line, child)
        assert [desk.news.get(timeout=30) for _ in range(2)] == [(1, {"loss": 1.0}), (1, ended)]
    assert child.stopped.is_set()


def test_a_stop_reaches_the_task():
    child = Child()
    with Desk("localhost") as desk, connected(desk.address, desk.key, 0) as line:
        thread = threading.Thread(target=follow, args=(line, child))
        thread.start()
        while not desk._lines:
            pass
        desk.stop()
        thread.join(30)
    assert child.stopped.is_set() and STOP == "stop"


def test_a_task_that_is_gone_is_noted():
    with Desk("localhost") as desk:
        connected(desk.address, desk.key, 3).close()
        assert desk.news.get(timeout=30) == (3, GONE)


def test_a_program_that_is_gone_ends_the_process():
    child = Child()
    with Desk("localhost") as desk:
        line = connected(desk.address, desk.key, 0)
        while not desk._lines:
            pass
    follow(line, child)
    assert child.stopped.is_set()


def test_a_desk_waits_until_its_tasks_are_gone():
    with Desk("localhost") as desk:
        with connected(desk.address, desk.key, 0):
            while not desk._lines:
                pass
            began = time.monotonic()
            desk.wait(0.5)
            assert time.monotonic() - began >= 0.5 and desk._lines
        desk.wait(30)
        assert time.monotonic() - began < 20 and not desk._lines


def test_strangers_are_not_heard_and_keep_nobody_waiting():
    with Desk("localhost") as desk, socket.create_connection(("localhost", desk.address[1])):
        with pytest.raises(Exception, match="digest"):
            connected(desk.address, b"another key", 0)
        with connected(desk.address, desk.key, 2) as line:
            line.send({"loss": 2.0})
            assert desk.news.get(timeout=30) == (2, {"loss": 2.0})


def test_a_desk_that_cannot_be_reached():
    with Desk("localhost") as desk:
        address = desk.address
    with pytest.raises(MachineError, match="Worker 4 cannot reach the Spark driver.*driver_port"):
        connected(address, desk.key, 4)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken, pytest.raises(MachineError, match="Give another `driver_port`"):
        Desk("localhost", taken.getsockname()[1])

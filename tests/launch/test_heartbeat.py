"""Heartbeats, and the watch that times them out."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfgpu.launch import heartbeat


def wait_for(condition, within_s: float = 300) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def touched(file: Path) -> int:
    return file.stat().st_mtime_ns


@pytest.mark.processes
def test_a_stopped_process_sends_no_heartbeat_and_a_resumed_one_does(tmp_path):
    file = tmp_path / "heart"
    code = "import time; from tfgpu.launch import heartbeat; heartbeat.beat(); time.sleep(120)"
    environ = {**os.environ, "TFGPU_HEARTBEAT": str(file)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ)
    try:
        assert wait_for(file.exists)
        first = touched(file)
        assert wait_for(lambda: touched(file) > first)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # a touch under way
        still = touched(file)
        time.sleep(2.5)
        assert touched(file) == still
        process.send_signal(signal.SIGCONT)
        assert wait_for(lambda: touched(file) > still)
    finally:
        process.kill()
        process.wait()


def test_the_heartbeat_continues_while_python_computes(tmp_path):
    file = tmp_path / "heart"
    end = heartbeat.beat(file, period_s=0.05)
    first = touched(file)
    until = time.monotonic() + 500
    while touched(file) == first and time.monotonic() < until:
        sum(range(20000))
    assert touched(file) > first
    end.set()


def test_without_a_file_it_does_nothing(monkeypatch):
    monkeypatch.delenv("TFGPU_HEARTBEAT", raising=False)
    assert heartbeat.beat() is None


def test_a_missing_folder_is_reported_once_and_ends_nothing(tmp_path, caplog):
    folder = tmp_path / "later"
    heart = folder / "heart"
    end = heartbeat.beat(heart, period_s=0.02)
    assert wait_for(lambda: any("heartbeat" in record.message for record in caplog.records))
    folder.mkdir()
    assert wait_for(heart.exists)
    end.set()
    assert [record.message for record in caplog.records if "heartbeat" in record.message] == [
        f"The heartbeat file {heart} cannot be written: [Errno 2] No such file or directory: '{heart}'."
    ]


class Clock:
    """Stands for the clock of `heartbeat.Watch`."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)

    def look(self, watch, seconds: float, every_s: float = heartbeat.LOOK_S) -> bool:
        """Looks every so often, for that time; returns the last answer."""
        late = False
        for _ in range(int(seconds / every_s)):
            self.now += every_s
            late = watch.is_late()
        return late


def at(file: Path, seconds: float) -> None:
    file.touch()
    os.utime(file, (seconds, seconds))


def test_a_heartbeat_that_stops_is_late_after_its_timeout(tmp_path, monkeypatch):
    clock, file = Clock(monkeypatch), tmp_path / "heart"
    watch = heartbeat.Watch(file, 3.0)
    assert not clock.look(watch, 100)  # There was no first heartbeat yet.
    at(file, 1000)
    assert not clock.look(watch, 3.0) and watch.quiet_s == 2.5
    assert clock.look(watch, 0.5)
    at(file, 1)  # The clock was set: any change is a heartbeat.
    assert not clock.look(watch, 3.0)
    assert clock.look(watch, 0.5)


def test_without_a_timeout_no_heartbeat_is_late(tmp_path, monkeypatch):
    clock, file = Clock(monkeypatch), tmp_path / "heart"
    watch = heartbeat.Watch(file, 0)
    at(file, 1000)
    assert not clock.look(watch, 1000) and watch.quiet_s == 999.5


def test_a_suspended_supervisor_blames_no_process(tmp_path, monkeypatch):
    clock, file = Clock(monkeypatch), tmp_path / "heart"
    watch = heartbeat.Watch(file, 60.0)
    at(file, 1000)
    assert not clock.look(watch, 7200, every_s=3600) and watch.quiet_s == 1.0

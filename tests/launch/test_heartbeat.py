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
def test_a_stopped_process_gives_no_sign_of_life_and_a_woken_one_does(tmp_path):
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


def test_it_goes_on_while_python_computes(tmp_path):
    file = tmp_path / "heart"
    end = heartbeat.beat(file, period_s=0.05)
    first = touched(file)
    until = time.monotonic() + 20
    while touched(file) == first and time.monotonic() < until:
        sum(range(20000))
    assert touched(file) > first
    end.set()


def test_without_a_file_it_does_nothing(monkeypatch):
    monkeypatch.delenv("TFGPU_HEARTBEAT", raising=False)
    assert heartbeat.beat() is None


def test_a_folder_that_is_gone_is_said_once_and_ends_nothing(tmp_path, caplog):
    folder = tmp_path / "later"
    heart = folder / "heart"
    end = heartbeat.beat(heart, period_s=0.02)
    time.sleep(0.3)
    folder.mkdir()
    assert wait_for(heart.exists)
    end.set()
    assert [record.message for record in caplog.records if "sign of life" in record.message] == [
        f"The sign of life {heart} cannot be given: [Errno 2] No such file or directory: '{heart}'."
    ]

"""A worker under an engine: it ends with the process that started it, and at once when its script does."""

import gzip
import json
import lzma
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tfgpu.launch.child import REPORT, RESULT, STDERR
from tfgpu.launch.functions import pickled
from tfgpu.launch.functions.relay import Relay, Work
from tfgpu.launch.job import Job

pytestmark = [pytest.mark.processes]
PARENT = """
import pathlib, sys
sys.path[:0] = sys.argv[1:2]
import test_relay
from tfgpu.launch.functions.relay import Relay, Work
from tfgpu.launch.job import Job
folder, script, rows = sys.argv[1:]
test_relay.Driver(Relay(Work(Job(script)), 0, "127.0.0.1", folders=[pathlib.Path(rows)])).run()
"""
# Another process of the script's, then a call that never gives Python's lock back, as a hanging TensorFlow may.
DEAF = """
import ctypes, os, pathlib, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
pathlib.Path("new").write_text(f"{os.getpid()} {other.pid}")
os.rename("new", "up")
ctypes.PyDLL(None).sleep(3600)
"""
ENDLESS = """
import atexit, gzip, lzma, os, sys, time
class Endless:
    def __del__(self):
        time.sleep(3600)
kept, file = Endless(), open("left-open", "w")
file.write("all of it")
packed, text, both = gzip.open("packed", "wb"), lzma.open("text", "wt"), open("both", "w+b")
packed.write(b"all of it")
text.write("all of it")
both.write(b"all of it")
try:
    os.waitpid(-1, os.WNOHANG)
    print("a child that the script did not start")
except ChildProcessError:
    pass
atexit.register(print, "the end", flush=True)
sys.exit(3)
"""


def waited_for(path: Path, seconds: float = 200) -> str:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)
    return path.read_text()


class Driver:
    """Does what the launching program does: has the worker started, and notes what it sends."""

    def __init__(self, relay, runner=("-u", "-m", "tfgpu.launch.ending")):
        self.relay, self.runner = relay, runner
        self.streams, self.code, self.facts = {}, None, {}

    def run(self, **task) -> int:
        """Returns the worker's exit code."""
        try:
            while (messages := self.relay.receive()) is not None:
                for message, data in messages:
                    self.hear(message, data, task)
        finally:
            self.relay.close()
        return self.code

    def hear(self, message, data, task):
        if message["event"] == "hello":
            self.facts = message
            command = [message["python"], *self.runner, message["script"]]
            start = {"id": 0, "command": command, "environment": {}, "reports": True, **task}
            self.relay.send("start", {"tasks": [start]})
        if message["event"] == "output":
            self.streams[message["stream"]] = self.streams.get(message["stream"], b"") + data
        if message["event"] in ("exit", "late"):
            self.code = message.get("code", self.code)
            self.relay.send("end", {"grace_period_s": 0})


def relay_of(script: Path, **job) -> Relay:
    return Relay(Work(Job(str(script), **job)), 0, "127.0.0.1")


def test_a_process_that_holds_pythons_lock_dies_with_its_parent(tmp_path):
    script, rows = tmp_path / "deaf.py", tmp_path / "rows"
    script.write_text(DEAF)
    rows.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, Path(__file__).parent, script, rows]
    parent = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        worker, other = map(int, waited_for(tmp_path / "up").split())
        family = psutil.Process(parent.pid).children(recursive=True)
        assert {worker, other} < {process.pid for process in family} and list(tmp_path.glob("tfgpu-worker-*"))
    finally:
        parent.kill()
        parent.wait()
    gone, left = psutil.wait_procs(family, 20)
    for process in left:
        process.kill()
    assert not left and len(gone) == 4  # the script, what it started, its supervisor, and the guard of that
    assert not rows.exists() and not list(tmp_path.glob("tfgpu-worker-*"))


@pytest.mark.slow
def test_a_script_that_has_ended_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    worker = Driver(relay_of(script))
    assert worker.run() == 3
    lines = worker.streams[STDERR].decode().splitlines()
    assert lines[-1] == "the end" and not [line for line in lines if "child" in line]
    files = (tmp_path / "left-open", tmp_path / "both")
    written = [path.read_text() for path in files]
    written += [gzip.open(tmp_path / "packed", "rt").read(), lzma.open(tmp_path / "text", "rt").read()]
    assert written == ["all of it"] * 4


@pytest.mark.parametrize(("timeout_s", "code"), [(1, -9), pytest.param(0, 4, marks=pytest.mark.slow)])
def test_a_heartbeat_timeout_is_reported(tmp_path, timeout_s, code):
    script = tmp_path / "quiet.py"
    script.write_text(
        "import os, pathlib, time\npathlib.Path(os.environ['TFGPU_HEARTBEAT']).touch()\n"
        f"time.sleep({600 if timeout_s else 4})\nos._exit(4)\n"
    )
    driver = Driver(relay_of(script), runner=())  # `tfgpu.run` has its own heartbeat.
    assert driver.run(heartbeat_timeout_s=timeout_s) == code


def test_reports_result_and_output_go_to_separate_streams(tmp_path, capfd):
    pytest.importorskip("cloudpickle")

    def train(first, second):
        import tfgpu

        tfgpu.launch.report({"loss": 0.5})
        print("half way")
        return first, second

    work = Work(Job("train()", logs=tmp_path / "logs"), pickled.pack(train, ("b",)))
    worker = Driver(Relay(work, 3, "host7", data="a"), runner=())  # Nothing imports TensorFlow.
    assert worker.run() == 0
    assert json.loads(worker.streams[REPORT]) == {"loss": 0.5}
    assert pickle.loads(worker.streams[RESULT]) == ("a", "b")
    assert worker.streams[STDERR] == b"half way\n"
    assert (tmp_path / "logs" / "worker-3.log").read_text() == "half way\n"
    assert "worker 3| half way" in capfd.readouterr().err
    assert worker.facts["address"] == "host7" and not Path(worker.facts["script"]).exists()

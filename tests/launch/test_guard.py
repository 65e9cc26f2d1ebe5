"""A worker's process under an engine: it ends with the process that started it, and at once when its script does."""

import gzip
import lzma
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tfgpu.cluster import Cluster
from tfgpu.launch.functions.child import Child, Work
from tfgpu.launch.job import Job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
PARENT = """
import pathlib, sys, time
from tfgpu.cluster import Cluster
from tfgpu.launch.functions.child import Child, Work
from tfgpu.launch.job import Job
script, rows = sys.argv[1:]
Child(Work(Job(script)), Cluster(), folders=[pathlib.Path(rows)])
time.sleep(600)
"""
# Another process of the script's, then a call that never gives Python's lock back, as a hanging TensorFlow may.
DEAF = """
import ctypes, os, pathlib, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("new").write_text(f"{os.getpid()} {other.pid}")
os.rename("new", "up")
ctypes.PyDLL(None).sleep(600)
"""
ENDLESS = """
import atexit, gzip, lzma, os, sys, time
class Endless:
    def __del__(self):
        time.sleep(600)
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


def ended_of(child: Child):
    """How a worker's process has ended."""
    try:
        ended, end = None, time.monotonic() + 200
        while ended is None and time.monotonic() < end:
            ended = child.news(1.0)[1]
    finally:
        child.stop()
    return ended


def test_a_process_that_holds_pythons_lock_dies_with_its_parent(tmp_path):
    script, rows = tmp_path / "deaf.py", tmp_path / "rows"
    script.write_text(DEAF)
    rows.mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, script, rows], cwd=tmp_path, env=environment)
    try:
        worker, other = waited_for(tmp_path / "up").split()
        family = [process for process in psutil.process_iter() if os.getpgid(process.pid) == int(worker)]
        assert int(other) in [process.pid for process in family] and list(tmp_path.glob("tfgpu-worker-*"))
    finally:
        parent.kill()
        parent.wait()
    gone, left = psutil.wait_procs(family, 20)
    for process in left:
        process.kill()
    assert not left and len(gone) == 3  # the script, what it started, and who watched for it
    assert not rows.exists() and not list(tmp_path.glob("tfgpu-worker-*"))


@pytest.mark.slow
def test_a_script_that_has_ended_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    ended = ended_of(Child(Work(Job(str(script))), Cluster()))
    assert ended.code == 3 and ended.lines[-1] == "the end"
    assert not [line for line in ended.lines if "child" in line]
    files = (tmp_path / "left-open", tmp_path / "both")
    written = [path.read_text() for path in files]
    written += [gzip.open(tmp_path / "packed", "rt").read(), lzma.open(tmp_path / "text", "rt").read()]
    assert written == ["all of it"] * 4


@pytest.mark.slow
def test_no_sign_of_life_is_missed_where_none_is_asked_for(tmp_path):
    script = tmp_path / "quiet.py"
    script.write_text("import os, time\ntime.sleep(3)\nos._exit(4)\n")
    ended = ended_of(Child(Work(Job(str(script), silence_s=0)), Cluster()))
    assert ended.code == 4

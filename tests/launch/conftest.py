"""Launches of tiny scripts in real processes, and a look at what is left of them."""

import contextlib
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = """
import json, os, pathlib, signal, subprocess, sys, time
config = json.loads(os.environ.get("TF_CONFIG", '{"task": {"type": "worker", "index": 0}}'))
me = config["task"]["type"] + str(config["task"]["index"])
attempt = os.environ["TFGPU_ATTEMPT"]
def up():
    new = pathlib.Path("new-" + me)
    new.write_text(str(os.getpid()))
    new.rename("up-" + me + "-" + attempt)
"""
# A child, a grandchild in a session of its own whose parent has gone, and one that ignores what can be ignored.
FAMILY = """
sleep = [sys.executable, "-c", "import time; time.sleep(3600)", os.getcwd()]
subprocess.Popen(sleep)
subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"])
deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(3600)"
subprocess.Popen([sys.executable, "-c", deaf, os.getcwd()], start_new_session=True)
"""
DRIVER = """
import json, pathlib, sys
from tfgpu.errors import InputError
from tfgpu.launch import local, ssh
from tfgpu.launch.job import Job
job, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
nodes = options.pop("nodes", None)
if "logs" in job:
    job["logs"] = pathlib.Path(job["logs"])
try:
    if nodes:
        sys.exit(ssh.launch(Job(**job), nodes, runner=[], **options))
    sys.exit(local.launch(Job(**job), runner=[sys.executable], **options))
except InputError as error:
    sys.exit(f"error: {error}")
"""


class Launch:
    """A launcher in a process of its own, and the folder whose scripts it runs."""

    FAMILY = FAMILY

    def __init__(self, folder: Path):
        self.folder, self.process = folder, None

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(HEADER + text)
        return str(self.folder / name)

    def start(self, text: str, *, environ: dict | None = None, options: dict | None = None, terminal: int = -1, **job):
        """Starts a launcher, on a terminal or with pipes."""
        job = {"script": self.write("script.py", text), "workers": 2, **job}
        command = [sys.executable, "-c", DRIVER, json.dumps(job), json.dumps(options or {})]
        kept = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**kept, "PYTHONPATH": str(ROOT), **(environ or {})},
            stdin=None if terminal < 0 else terminal,
            stdout=subprocess.PIPE if terminal < 0 else terminal,
            stderr=subprocess.PIPE if terminal < 0 else terminal,
            start_new_session=terminal >= 0,
            preexec_fn=None if terminal < 0 else functools.partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0),
            text=True,
        )
        if terminal >= 0:
            os.close(terminal)
        return self

    def wait_for(self, count: int, name: str = "up*", seconds: float = 550) -> list[Path]:
        """Waits until so many files of that name lie in the folder: the scripts make them."""
        end = time.monotonic() + seconds
        while len(found := sorted(self.folder.glob(name))) < count:
            assert time.monotonic() < end and self.process.poll() is None, self.finish()
            time.sleep(0.02)
        return found

    def wait_for_processes(self, count: int, seconds: float = 120) -> None:
        """Waits until so many processes of the script run: one that has just begun does not name the folder yet."""
        end = time.monotonic() + seconds
        while len(left := self.left()) < count:
            assert time.monotonic() < end, left
            time.sleep(0.02)

    def finish(self, seconds: float = 550) -> tuple[int, str, str]:
        """Waits for the launcher's end: its exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def run(self, text: str, **options) -> tuple[int, str, str]:
        return self.start(text, **options).finish()

    @staticmethod
    def shown(text: str, name: str) -> list[str]:
        """The lines of a process in an output."""
        return [line.split("| ", 1)[1] for line in text.splitlines() if re.match(rf"{name} *\| ", line)]

    def left(self) -> dict[int, str]:
        """The processes whose command line names the folder; all that a script starts must name it."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes()
                if bytes(self.folder) in words and int(path.name) not in (os.getpid(), self.process.pid):
                    found[int(path.name)] = words.replace(b"\0", b" ").decode(errors="replace")
        return found

    def gone_after(self, seconds: float = 120) -> float:
        """Waits until nothing is left; returns the seconds that took."""
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() < began + seconds, left
            time.sleep(0.01)
        return time.monotonic() - began

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
        for pid in self.left() if self.process else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.communicate()


@pytest.fixture
def launch(tmp_path):
    launcher = Launch(tmp_path)
    yield launcher
    launcher.close()

"""Groups of real processes for parameter servers: started, killed and started again one by one."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest


class Group:
    """The processes of one cluster on loopback.

    Args:
        script: Python source that every task runs.
        cluster: addresses by job.
        folder: where their output goes.
        startup_timeout: seconds; 0 leaves the preflight out.
    """

    def __init__(self, script, cluster, folder, startup_timeout=240):
        self.path, self.cluster, self.folder = folder / "script.py", cluster, folder
        self.startup_timeout = startup_timeout
        self.path.write_text(script)
        self.running = {}

    def start(self, name, *arguments, **environ):
        job, index = name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        place = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
        with open(self.folder / f"{name}.out", "ab") as out:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(self.path), *map(str, arguments)],
                env={**os.environ, "TF_CONFIG": place, "TFGPU_STARTUP_TIMEOUT": str(self.startup_timeout), **environ},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def start_all(self, *arguments):
        for job, addresses in self.cluster.items():
            for index in range(len(addresses)):
                self.start(f"{job}{index}", *arguments)

    def end(self, name, how=signal.SIGKILL):
        self.running[name].send_signal(how)
        return self.running[name].wait(timeout=550)

    def wait(self, name, timeout=550):
        return self.running[name].wait(timeout=timeout)

    def said(self, name):
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def wait_for(self, name, words, timeout=550):
        """Waits for a regular expression in what the task has printed."""
        deadline = time.monotonic() + timeout
        while not re.search(words, self.said(name)):
            assert time.monotonic() < deadline, self.said(name)[-3000:]
            assert self.running[name].poll() is None or re.search(words, self.said(name)), self.said(name)[-3000:]
            time.sleep(0.05)

    def answer(self, name="chief0"):
        """What the task printed last, which is JSON."""
        code = self.wait(name)
        assert code == 0, self.said(name)[-4000:]
        return json.loads(self.said(name).strip().splitlines()[-1])

    def kill(self):
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def group(addresses, tmp_path):
    """Makes a `Group` of so many tasks a job, and kills it in the end."""
    made = []

    def make(script, *, startup_timeout=240, **jobs):
        left = iter(addresses(sum(jobs.values())))
        cluster = {job: [next(left) for _ in range(count)] for job, count in jobs.items()}
        folder = tmp_path / f"group{len(made)}"
        folder.mkdir()
        made.append(Group(script, cluster, folder, startup_timeout))
        return made[-1]

    yield make
    for each in made:
        each.kill()

"""What the tests on a real Slurm share: the cluster, a submitted job, and a script that counts."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tfgpu.launch.job import Job
from tfgpu.launch.slurm import submission
from tfgpu.launch.slurm.submission import Allocation

SET_UP = Path(__file__).with_name("slurm_cluster.sh")
ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
MARKS = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} (run {SET_UP.name} install)"),
]

# Leaves the Keras repairs out of `tfgpu.run`: TensorFlow may take a minute to start, and COUNT needs none.
LIGHT = """
import sys, types
repairs = types.ModuleType("tfgpu.repairs")
repairs.repair_keras = lambda: ()
sys.modules["tfgpu.repairs"] = repairs
"""
# Counts to `steps`, from where it was saved; rank 0 saves when asked to leave. `rank:step:fault` happens once.
COUNT = """
import os, signal, sys, time
from pathlib import Path

folder, steps, fault_rank, fault_step, fault = Path(sys.argv[1]), int(sys.argv[2]), *(sys.argv[3:] or ["-1", "0", ""])
rank = os.environ["SLURM_PROCID"]
saved, asked = folder / f"saved-{rank}", []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
first = int(saved.read_text()) if saved.exists() else 0
print("from", first, "at", time.time(), "tmp", os.environ.get("TMPDIR", ""), flush=True)
for step in range(first, steps):
    time.sleep(0.1)
    if "TFGPU_HEARTBEAT" in os.environ:
        Path(os.environ["TFGPU_HEARTBEAT"]).touch()
    if asked:
        saved.write_text(str(step))
        sys.exit(75)
    once = folder / "happened"
    if (rank, str(step)) == (fault_rank, fault_step) and not once.exists():
        once.touch()
        print("now", time.time(), flush=True)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(fault))
print("counted", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_TEST_PORT", str(17000 + os.getpid() % 1000 * 5))  # Several test runs at a time.
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        try:
            subprocess.run([SET_UP, "start", folder], check=True, timeout=550)
            yield folder
        finally:
            subprocess.run([SET_UP, "stop", folder], check=True, timeout=550)


class Run:
    """A submitted job, and what can be asked of it."""

    def __init__(
        self, folder: Path, *arguments, script: str = COUNT, light: bool = True, environment=(), job=None, **allocation
    ):
        (folder / "count it.py").write_text(script)
        (folder / "sitecustomize.py").write_text(LIGHT if light else "")
        self.folder, self.logs = folder, folder / "logs"
        self.job = Job(
            "count it.py",
            tuple(str(each) for each in arguments),
            logs=self.logs,
            environment={
                "TFGPU_STARTUP_TIMEOUT": "0" if light else "200",
                "PYTHONPATH": f"{folder}:{ROOT}",
                **dict(environment),
            },
            **{"workers": 2, "heartbeat_timeout_s": 30.0, **(job or {})},
        )
        before = Path.cwd()
        os.chdir(folder)
        try:
            self.submitted = submission.submit(self.job, Allocation(**{"nodes": 2, **allocation}))
        finally:
            os.chdir(before)
        self.id = self.submitted.id

    def facts(self) -> dict[str, str]:
        text = subprocess.run(["scontrol", "-o", "show", "job", self.id], capture_output=True, text=True).stdout
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def until(self, condition, seconds: float = 600):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.facts(), self.log(), self.task(0), self.task(1))
            time.sleep(0.1)

    def until_counting(self, starts: int = 1):
        """Both tasks have begun, so many times."""
        self.until(lambda: all(self.task(rank).count("from") >= starts for rank in range(2)))

    def wait(self, seconds: float = 600) -> int:
        self.until(lambda: self.facts().get("JobState") in submission.FINAL, seconds)
        return self.submitted.wait()

    def log(self) -> str:
        return self._read(self.logs / f"job-{self.id}.log")

    def task(self, rank: int) -> str:
        return self._read(self.logs / f"job-{self.id}" / f"task-{rank}.log")

    def times(self, word: str, rank: int) -> list[float]:
        return [float(each) for each in re.findall(rf"{word}.*?(\d{{10}}\.\d+)", self.task(rank))]

    def left_over(self) -> list[str]:
        """Processes that still name this test's folder in their command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_text().replace("\0", " ")
            except OSError:
                continue
            if str(self.folder) in words and int(path.parent.name) != os.getpid():
                found.append(words)
        return found

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_text() if path.exists() else ""

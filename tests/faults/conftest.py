"""Groups of real processes that run `train.py`, are killed, and are started again."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "train.py"
PATIENCE_S = 900

# TensorFlow takes long to import: one server imports it once, and each process of a test is a fork of that.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tensorflow", "keras", "tfgpu.keras_fixes.catalogue", "tfgpu.callbacks"])


def _code(arguments: list[str], environment: dict[str, str], log: Path) -> str:
    return (
        "import os, runpy, sys\n"
        f"os.environ.update({environment!r})\n"
        f"file = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "os.dup2(file, 1), os.dup2(file, 2)\n"
        f"sys.argv = [{str(SCRIPT)!r}, *{arguments!r}]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )


class Own:
    """A process of its own, with the methods of those of `multiprocessing`: it also ends as a script does."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path):
        self._start = [sys.executable, str(SCRIPT), *words], {**os.environ, **environment}, log

    def start(self) -> None:
        command, environment, log = self._start
        with open(log, "ab") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        self.pid = self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


class Group:
    """The processes of one training.

    Args:
        folder: the run's directory.
        variant: a name of `train.VARIANTS`.
        addresses: `free_addresses` of `tests/conftest.py`.
        workers: how many processes.
        own: each starts as a script, and not as a fork.
        options: for `train.py`.
    """

    def __init__(self, folder: Path, variant: str, addresses, *, workers: int = 1, own: bool = False, **options):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.codes = folder, []
        environments = [{}]
        if workers > 1:
            cluster = {"worker": addresses(workers)}
            tasks = [{"cluster": cluster, "task": {"type": "worker", "index": at}} for at in range(workers)]
            environments = [{"TF_CONFIG": json.dumps(task)} for task in tasks]
        words = [variant, str(folder), *(f"{name}={json.dumps(value)}" for name, value in options.items())]
        self.logs = [folder / f"log{at}" for at in range(workers)]
        self.processes = [
            Own(words, environment, log)
            if own
            else _processes.Process(target=exec, args=(_code(words, environment, log), {}))
            for environment, log in zip(environments, self.logs, strict=True)
        ]
        for process in self.processes:
            process.start()

    def progress(self) -> bytes:
        """A byte for each block of steps, epoch and block of validation that the chief has told of, in all starts."""
        path = self.folder / "progress0"
        return path.read_bytes() if path.exists() else b""

    def kill_at(self, length: int, *, rank: int = 0, number: int = signal.SIGKILL, delay_s: float = 0.0) -> bool:
        """Sends a signal to one process when the progress is so long; False where the training ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.progress()) < length:
            if any(process.exitcode is not None for process in self.processes):
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)
        time.sleep(delay_s)
        if self.processes[rank].exitcode is not None:
            return False
        os.kill(self.processes[rank].pid, number)
        return True

    def wait(self) -> list[int]:
        """The exit codes of processes that end by themselves."""
        for process in self.processes:
            process.join(PATIENCE_S)
        return [process.exitcode for process in self.processes]

    def end(self) -> None:
        """Kills what is left, as a launcher does when one of the processes has died."""
        for process in self.processes:
            process.kill()
            process.join()

    def said(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self.logs if log.exists())


@pytest.fixture
def group(addresses):
    """Makes a `Group`, and ends its processes after the test."""
    made = []

    def make(folder, variant, **options):
        made.append(Group(folder, variant, addresses, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def result():
    """What a training in a folder has come to: weights and the optimizer's variables, and the history."""

    def read(folder: Path):
        with np.load(folder / "result.npz") as found:
            arrays = [found[name] for name in found.files]
        return arrays, json.loads((folder / "history.json").read_text())

    return read

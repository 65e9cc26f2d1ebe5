"""Groups of real processes that run `train.py` or, under `tfgpu launch`, `small.py` or `served.py`, and fail."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tfgpu.checkpoint import storage

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "train.py"
SMALL = Path(__file__).parent / "small.py"
PATIENCE_S = 900
LAUNCH_S = 600
# Where a training can be, and what `train.py` writes when it comes there.
BEGINS = {"start": b"S", "mid-epoch": b"E", "validation": b"V", "between epochs": b"B", "save": b"W"}

# TensorFlow takes long to import: one server imports it once, and each process of a test is a fork of that.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tensorflow", "keras", "tfgpu.repairs.trainer", "tfgpu.callbacks"])


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

    def __init__(self, words: list[str], environment: dict[str, str], log: Path, under: tuple[str, ...]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._start = [*under, sys.executable, str(SCRIPT), *words], environment, log

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
        under: the command that starts the script, as `env` or `setpriv` do; then each is its own.
        hold: a kind of `BEGINS`, which time, and which process stays in it until it is killed.
        options: for `train.py`.
    """

    def __init__(
        self,
        folder: Path,
        variant: str,
        addresses,
        *,
        workers: int = 1,
        own: bool = False,
        under: tuple[str, ...] = (),
        hold: tuple[str, int, int] | None = None,
        **options,
    ):
        if hold:
            options["hold"] = [BEGINS[hold[0]].decode(), *hold[1:]]
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._from = {rank: len(self._phases(rank)) for rank in range(workers)}
        environments = [{}]
        if workers > 1:
            cluster = {"worker": addresses(workers)}
            tasks = [{"cluster": cluster, "task": {"type": "worker", "index": at}} for at in range(workers)]
            environments = [{"TF_CONFIG": json.dumps(task)} for task in tasks]
        words = [variant, str(folder), *(f"{name}={json.dumps(value)}" for name, value in options.items())]
        self.logs = [folder / f"log{at}" for at in range(workers)]
        self.processes = [
            Own(words, environment, log, under)
            if own or under
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

    def kill_in(self, kind: str, *, nth: int = 1, rank: int = 0, delay_s: float = 0.0) -> str | None:
        """Kills one process in a phase of its own, or while the chief writes.

        Args:
            kind: a name of `BEGINS`.
            nth: which time that this start comes there.
            rank: whom.
            delay_s: how long to wait then; in the phase's next time, should this one be over.

        Returns:
            The kind in which it died; None where the training ended before.
        """
        watched, deadline = 0 if kind == "save" else rank, time.monotonic() + PATIENCE_S
        while self._new(watched).count(BEGINS[kind]) < nth:
            if any(process.exitcode is not None for process in self.processes):
                return None
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)
        time.sleep(delay_s)
        while time.monotonic() < deadline:
            if any(process.exitcode is not None for process in self.processes):
                return None
            self._send(signal.SIGSTOP)  # what they write next, they write after the kill
            time.sleep(0.003)
            if self._kind(rank) == kind or kind == "start" and b"E" in self._new(rank):
                os.kill(self.processes[rank].pid, signal.SIGKILL)
                died_in = self._kind(rank)
                self._send(signal.SIGCONT)
                return died_in
            self._send(signal.SIGCONT)
            time.sleep(0.003)
        raise AssertionError(self.said())

    def epochs_begun(self) -> int:
        """How many epochs this start has begun, or gone on with."""
        return self._new(0).count(b"E")

    def wait_for_checkpoint(self, name: str) -> None:
        """Returns when the newest one has a name that a pattern fits.

        Args:
            name: such as `"epoch-0001-step-*"`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not any(path.match(name) for path in storage.found(self.folder / "checkpoints")[:1]):
            assert all(process.exitcode is None for process in self.processes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)

    def _send(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _phases(self, rank: int) -> bytes:
        path = self.folder / f"phases{rank}"
        return path.read_bytes() if path.exists() else b""

    def _new(self, rank: int) -> bytes:
        return self._phases(rank)[self._from[rank] :]

    def _kind(self, rank: int) -> str | None:
        """What a process is in, by what this start has told of."""
        chief, own = self._new(0), self._new(rank)
        if chief.count(b"W") > chief.count(b"w"):
            return "save"
        phases = own.translate(None, b"Ww")
        return next((kind for kind, begin in BEGINS.items() if begin == phases[-1:]), None)

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


class Launched:
    """A launcher, what it says, and what its processes note.

    Args:
        folder: the run's directory.
        fault: which one `small.py` is to meet; `"none"` for none. The first word for another script.
        options: of `tfgpu launch`; two workers unless they say otherwise.
        epochs: of the training.
        environ: variables of the launcher.
        script: what it starts.
    """

    def __init__(
        self,
        folder: Path,
        fault: str = "none",
        *options: str,
        epochs: int = 4,
        environ: dict | None = None,
        script: Path = SMALL,
    ):
        folder.mkdir(exist_ok=True)
        self.folder, self.lines = folder, []
        words = ["launch", "-n", "2", "--no-logs", "--startup-timeout", "100", *options]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfgpu", *words, str(script), str(folder), fault, str(epochs)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "1", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    @property
    def said(self) -> str:
        return "".join(line for _, line in self.lines)

    def said_at(self, words: str, seconds: float = LAUNCH_S, after: float = 0.0) -> float:
        """Waits until it says the words, after a moment; when that was."""

        def look():
            return next((at for at, line in list(self.lines) if words in line and at > after), None)

        return self._wait(look, words, seconds)

    def events(self, name: str, attempt: int | None = None, rank: int | str | None = None) -> list[tuple[float, int]]:
        """The moments at which a process has noted an event, with its process id."""
        path = self.folder / "events"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [
            (at, pid)
            for at, event, its, who, pid in found
            if event == name and attempt in (None, its) and rank in (None, who)
        ]

    def event(
        self, name: str, attempt: int | None = None, rank: int | str | None = None, after: float = 0.0
    ) -> tuple[float, int]:
        """Waits for the first such event, after a moment."""

        def look():
            return next((found for found in self.events(name, attempt, rank) if found[0] > after), None)

        return self._wait(look, name, LAUNCH_S)

    def begun_at(self, attempt: int) -> int:
        """How many updates had been made before an attempt began: 0 where it has resumed nothing."""
        words = "begins at "
        found = [json.loads(line) for line in (self.folder / "events").read_text().splitlines()]
        steps = {
            int(event.removeprefix(words)) for _, event, its, *_ in found if event.startswith(words) and its == attempt
        }
        assert len(steps) == 1, (attempt, steps)  # all workers alike
        return steps.pop()

    def finish(self, seconds: float = LAUNCH_S) -> dict[str, np.ndarray]:
        """Waits for a good end: weights and losses."""
        assert self.end(seconds) == 0, self.said
        return dict(np.load(self.folder / "end.npz"))

    def end(self, seconds: float = LAUNCH_S) -> int:
        """Waits for the end: the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said) from None
        self._reader.join(500)
        return code

    def close(self) -> None:
        """Kills the launcher, with whom all ends that it has started."""
        self.process.kill()
        self.process.wait()

    def left(self) -> list[int]:
        """The processes that name the run's directory."""
        words, found = str(self.folder).encode(), []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if words in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    @staticmethod
    def gone(pid: int, within_s: float = PATIENCE_S) -> float:
        """Waits for a process's end; when that was."""
        until = time.monotonic() + within_s
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < until, f"process {pid} is still there"
            time.sleep(0.02)
        return time.monotonic()

    def _wait(self, look, what: str, seconds: float):
        until = time.monotonic() + seconds
        while (found := look()) is None:
            assert time.monotonic() < until and self.process.poll() is None, f"No {what!r}:\n{self.said}"
            time.sleep(0.02)
        return found


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


@pytest.fixture
def launched():
    """Makes a `Launched`, and ends it after the test."""
    made = []

    def make(*arguments, **options):
        made.append(Launched(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The result of `small.py` on two workers without a fault."""
    undisturbed = Launched(tmp_path_factory.mktemp("whole") / "run")
    try:
        return undisturbed.finish()
    finally:
        undisturbed.close()


@pytest.fixture
def same_bytes():
    """Says whether two results are the same, bit for bit."""

    def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)

    return same

"""The processes of one peer: they start together, run rounds together, and end together."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.table import Peer, Topology

ROOT = Path(__file__).parents[1]
_GRACE_S = 5


class Failed(Exception):
    """A peer cannot be measured; the message says why."""


def answer(module: str, *words: object) -> float:
    """Runs `python -m MODULE --child WORDS` on the CPU, and returns the JSON that it prints last."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", module, "--child", ",".join(map(str, words))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Machine:
    """Where the peers run.

    Attributes:
        cores: which may be used.
        peers_python: the interpreter of the environment with the other frameworks; None without one.
    """

    cores: tuple[int, ...]
    peers_python: Path | None = None

    def part(self, topology: Topology, rank: int) -> tuple[int, ...]:
        """The cores of one process; all of them where there are too few to divide."""
        count = len(self.cores) // topology.share
        return self.cores[rank * count : (rank + 1) * count] or self.cores


class Training:
    """The processes of a peer on one work and topology.

    Args:
        peer: the peer that trains.
        work: the work's name.
        topology: what it is spread over.
        machine: where.
        tiny: next to no work.
        log: a file for what the processes print.
        timeout_s: for each answer.
        root: the checkout whose code the processes run.
    """

    def __init__(
        self,
        peer: Peer,
        work: str,
        topology: Topology,
        machine: Machine,
        *,
        tiny: bool,
        log: Path,
        timeout_s: float,
        root: Path = ROOT,
    ):
        self._timeout_s, self._log, self._heard = timeout_s, log, {}
        addresses = free_addresses(topology.processes)
        python = machine.peers_python if peer.own_python and machine.peers_python else Path(sys.executable)
        task = {"name": peer.name, "work_name": work, "topology_name": topology.name}
        task |= {"addresses": addresses, "began": time.time(), "tiny": tiny}
        self._processes = []
        with log.open("w") as file:
            for rank in range(topology.processes):
                cores = machine.part(topology, rank)
                mine = json.dumps({**task, "rank": rank, "cores": cores})
                self._processes.append(
                    subprocess.Popen(
                        [python, "-m", "benchmarks.peers.process", mine],
                        cwd=root,
                        env=_environment(peer, topology, addresses, rank, len(cores), root),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        bufsize=0,
                        start_new_session=True,
                    )
                )

    def hear(self) -> list[dict]:
        """Waits for an answer of each process.

        Raises:
            Failed: one of them has ended, failed, or does not answer in time.
        """
        answers, deadline = {}, time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    raise Failed(f"no answer in {self._timeout_s:.0f} s ({self._log.name})")
                for key, _ in ready:
                    line = self._read(key.data)
                    if line is not None:
                        answers[key.data] = json.loads(line)
                        selector.unregister(key.fileobj)
                        if error := answers[key.data].get("error"):
                            raise Failed(error)
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, rank: int) -> bytes | None:
        """Reads on; returns a line once it is whole."""
        process = self._processes[rank]
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            raise Failed(f"ended with exit code {process.wait()} ({self._log.name})")
        self._heard[rank] = self._heard.get(rank, b"") + more
        return self._heard.pop(rank) if self._heard[rank].endswith(b"\n") else None

    def round(self) -> float:
        """Runs a round; returns its seconds, the slowest process's."""
        for process in self._processes:
            process.stdin.write(b"go\n")
        return max(answer["seconds"] for answer in self.hear())

    def last_word(self) -> list[dict]:
        """Asks the processes to end, and for what they have to say at last."""
        for process in self._processes:
            process.stdin.close()
        return self.hear()

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            process.stdin.close()  # Whoever waits for a round ends; so do all when this program dies.
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _environment(
    peer: Peer, topology: Topology, addresses: list[str], rank: int, threads: int, root: Path
) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    for name in ("TF_CONFIG", "TFGPU_REPAIR", "XLA_FLAGS"):
        environment.pop(name, None)
    environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "tensorflow"}
    environment |= {"TFGPU_CACHE": "off", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": str(threads)}
    # No compilers that wait beside the training, and a first step that is one.
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    if topology.strategy == "workers":
        task = {"type": "worker", "index": rank}
        environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    return environment | peer.environment


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine at ports that nothing listens on."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]

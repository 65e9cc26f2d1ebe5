"""One peer in a process of its own: trains, reports its results, then runs a round on request.

The runner starts `python -m benchmarks.peers.process JSON` with the fields of `Task`; "go" on standard input asks for a
round, the end of the input for the last word. Answers are lines of JSON on standard output; what libraries print goes
to standard error.
"""

import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.peers.table import PEERS, TOPOLOGIES, Peer, Topology
from benchmarks.peers.works import WORKS, Work


@dataclass(frozen=True)
class Task:
    """What this process is to do.

    Attributes:
        name: of the peer.
        work_name: of the work.
        topology_name: of the topology.
        rank: of this process.
        addresses: of all processes, "host:port".
        cores: which this process may use.
        began: when it was started, in seconds since 1970.
        tiny: next to no work, to see that everything runs.
    """

    name: str
    work_name: str
    topology_name: str
    rank: int
    addresses: tuple[str, ...]
    cores: tuple[int, ...]
    began: float
    tiny: bool = False

    @property
    def peer(self) -> Peer:
        return PEERS[self.name]

    @property
    def work(self) -> Work:
        work = WORKS[self.work_name]
        return work.tiny() if self.tiny else work

    @property
    def topology(self) -> Topology:
        return TOPOLOGIES[self.topology_name]

    @property
    def rows(self) -> slice:
        """This process's rows of each batch."""
        count = self.work.batch // self.topology.processes
        return slice(self.rank * count, (self.rank + 1) * count)


class Channel:
    """The pipes to the runner."""

    def __init__(self):
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, **facts) -> None:
        print(json.dumps(facts), file=self._out, flush=True)

    def go(self) -> bool:
        """Waits for the next word; whether it asks for another round."""
        return sys.stdin.readline().strip() == "go"


def rounds(peer, steps: int, channel: Channel) -> None:
    """Runs rounds of an epoch each, as often as asked."""
    while channel.go():
        began = time.perf_counter()
        peer.epoch(steps)
        channel.say(seconds=time.perf_counter() - began)


def peak_rss() -> int:
    """The most memory that this process has held, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def serve(task: Task, channel: Channel) -> None:
    """Builds the peer, trains the first steps that all peers must agree on, then runs rounds."""
    missing = [package for package in task.peer.packages if importlib.util.find_spec(package) is None]
    if missing:
        channel.say(missing=", ".join(missing))
        return
    module, name = task.peer.maker.split(":")
    peer = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)(task, **task.peer.options)
    losses = [peer.epoch(1)]
    first_step_s = time.time() - task.began
    for _ in range(2):
        peer.start()
        losses.append(peer.epoch(task.work.batches))
    facts = peer.facts()
    versions = {package: metadata.version(package) for package in task.peer.packages}
    channel.say(parameters=peer.parameters, losses=losses, first_step_s=first_step_s, versions=versions, **facts)
    peer.rounds(task.work.steps, channel)
    channel.say(peak_rss_bytes=peak_rss(), **peer.last_word())


def in_a_line(error: Exception) -> str:
    """The error's first line; where it is TensorFlow's "Graph execution error:", the node as well."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2]).partition(" defined at")[0] if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    facts = json.loads(sys.argv[1])
    task = Task(**{**facts, "addresses": tuple(facts["addresses"]), "cores": tuple(facts["cores"])})
    os.sched_setaffinity(0, task.cores)
    channel, code = Channel(), 1
    try:
        serve(task, channel)
        code = 0
    except Exception as error:
        traceback.print_exc()
        channel.say(error=in_a_line(error))
    finally:
        sys.stderr.flush()
        os._exit(code)  # What a framework does on its way out is not measured, and must not hang.


if __name__ == "__main__":
    main()

"""One task of a Slurm job: supervises the script's process and records how it ended.

`srun` returns the highest exit code of its tasks, and tasks that it ends itself count as 137, so the code of the task
that failed is lost. Therefore each task writes a record next to the logs, with the time of its first SIGTERM.

Slurm signals every process of a task, so this one forwards nothing. A task that received SIGTERM returns 0 to srun
whatever its script did: with any other code, `--kill-on-bad-exit` would kill the tasks that are still saving.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tfgpu import atomic
from tfgpu.launch import processes
from tfgpu.launch.child import Child
from tfgpu.launch.heartbeat import LOOK_S
from tfgpu.launch.restarts import HEARTBEAT_TIMEOUT, WRONG_INPUT


@dataclass(frozen=True)
class Record:
    """How a task ended.

    Args:
        code: exit code of its script; 128 + n for signal n; 124 for a heartbeat timeout.
        ended: when, in seconds since the epoch.
        asked: when it received its first SIGTERM; None if it did not.
    """

    code: int
    ended: float
    asked: float | None = None


def run(command: Sequence[str], record: Path, *, grace_period_s: float, heartbeat_timeout_s: float) -> int:
    """Runs a command until it ends, and writes its record.

    Args:
        command: the program and its arguments.
        record: the file to write.
        grace_period_s: seconds after SIGTERM until the process is killed.
        heartbeat_timeout_s: the heartbeat timeout in seconds; 0: none.

    Returns:
        The command's exit code, or 0 if the task received SIGTERM.
    """
    asked: list[tuple[float, float]] = []  # in wall-clock time, which nodes share, and monotonic time
    signal.signal(signal.SIGTERM, lambda *_: asked.append((time.time(), time.monotonic())))
    with tempfile.TemporaryDirectory(prefix="tfgpu-") as folder:
        options = {"heartbeat_timeout_s": heartbeat_timeout_s, "is_captured": False}
        child = Child(0, list(command), {}, Path(folder) / "heartbeat", **options)
        child.start()
        code = _supervise(child, asked, grace_period_s)
    ended = Record(code, time.time(), asked[0][0] if asked else None)
    atomic.write_text(record, json.dumps(asdict(ended)))  # The job reads it on another machine.
    return 0 if asked else code


def read(record: Path) -> Record | None:
    """Reads a record; None if it is missing or incomplete."""
    try:
        return Record(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _supervise(child: Child, asked: Sequence[tuple[float, float]], grace_period_s: float) -> int:
    """Returns a process's exit code; kills it at a heartbeat timeout or when its time to save is up."""
    is_late = False
    while not child.wait(LOOK_S):
        is_late = is_late or child.watch.is_late()
        if is_late or (asked and time.monotonic() - asked[0][1] > grace_period_s):
            child.send(signal.SIGKILL)
    return HEARTBEAT_TIMEOUT if is_late else processes.as_exit_code(child.code)


def main(words: Sequence[str] | None = None) -> int:
    """Runs `tfgpu.run SCRIPT ARGUMENTS` as the task that SLURM_PROCID names."""
    parser = argparse.ArgumentParser(prog="python -m tfgpu.launch.slurm.task")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--grace-period", type=float, required=True)
    parser.add_argument("--heartbeat-timeout", type=float, required=True)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    if not given.records.is_dir():
        words = f"tfgpu: {given.records} does not exist on this node. Give --logs a folder that all nodes share."
        print(words, file=sys.stderr)
        return WRONG_INPUT
    command = [sys.executable, "-m", "tfgpu.run", *given.script]
    record = given.records / f"{os.environ['SLURM_PROCID']}.json"
    return run(command, record, grace_period_s=given.grace_period, heartbeat_timeout_s=given.heartbeat_timeout)


if __name__ == "__main__":
    sys.exit(main())

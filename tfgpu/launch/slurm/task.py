"""One task of a Slurm job: runs the script in a process of its own, watches it, and records how it ended.

`srun` returns the highest code of its tasks, and those that it ends itself count as 137: the code of the task that
failed is lost. So each task writes a record beside the logs, with the time at which it was asked to leave, if it was.

Slurm signals every process of a task, so nothing is forwarded here. A task that was asked to leave returns 0 to srun
whatever its script did: with any other code `--kill-on-bad-exit` would end those that still save.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tfgpu import atomic
from tfgpu.launch import processes
from tfgpu.launch.heartbeat import HEARTBEAT, LOOK_S, Watch
from tfgpu.launch.restarts import HEARTBEAT_TIMEOUT, WRONG_INPUT


@dataclass(frozen=True)
class Record:
    """How a task ended.

    Args:
        code: exit code of its script; 128 + n for signal n; 124 for a heartbeat timeout.
        ended: when, in seconds since the epoch.
        asked: when it was first asked to leave (SIGTERM); None where it left on its own.
    """

    code: int
    ended: float
    asked: float | None = None


def run(command: Sequence[str], record: Path, *, grace_s: float, silence_s: float) -> int:
    """Runs a command until it ends, and writes its record.

    Args:
        command: the program and its arguments.
        record: the file to write.
        grace_s: seconds after SIGTERM until the process is killed.
        silence_s: the heartbeat timeout in seconds; 0: none.

    Returns:
        The command's exit code, or 0 where the task was asked to leave.
    """
    asked: list[tuple[float, float]] = []  # by the clock that nodes share, and by one that is never set
    signal.signal(signal.SIGTERM, lambda *_: asked.append((time.time(), time.monotonic())))
    with tempfile.TemporaryDirectory(prefix="tfgpu-") as folder:
        heart = Path(folder) / "heartbeat"
        process = subprocess.Popen(command, env={**os.environ, HEARTBEAT: str(heart)})
        code = _watch(process, Watch(heart, silence_s), asked, grace_s)
    _write(record, Record(code, time.time(), asked[0][0] if asked else None))
    return 0 if asked else code


def read(record: Path) -> Record | None:
    """Reads a record; None where it is missing or incomplete."""
    try:
        return Record(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _watch(process: subprocess.Popen, heart: Watch, asked: Sequence[tuple[float, float]], grace_s: float) -> int:
    is_late = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=LOOK_S)
            return HEARTBEAT_TIMEOUT if is_late else processes.as_exit_code(code)
        is_late = heart.is_late()
        if is_late or (asked and time.monotonic() - asked[0][1] > grace_s):
            process.kill()


def _write(path: Path, record: Record) -> None:
    atomic.write_text(path, json.dumps(asdict(record)))  # The job reads it on another machine.


def main(words: Sequence[str] | None = None) -> int:
    """Runs `tfgpu.run SCRIPT ARGUMENTS` as the task that SLURM_PROCID names."""
    parser = argparse.ArgumentParser(prog="python -m tfgpu.launch.slurm.task")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--silence", type=float, required=True)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    if not given.records.is_dir():
        print(
            f"tfgpu: this node does not see {given.records}. Give --logs a folder that all nodes share.",
            file=sys.stderr,
        )
        return WRONG_INPUT
    command = [sys.executable, "-m", "tfgpu.run", *given.script]
    record = given.records / f"{os.environ['SLURM_PROCID']}.json"
    return run(command, record, grace_s=given.grace, silence_s=given.silence)


if __name__ == "__main__":
    sys.exit(main())

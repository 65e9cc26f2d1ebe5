"""One task of a Slurm job: runs the script in a process of its own, watches it, and writes down how it ended.

`srun` answers with the highest code of its tasks, and those that it ends itself count as 137: the code of the task that
failed is lost. So each task leaves a record beside the logs, with the time at which it was asked to leave, if it was.

Slurm sends its signals to every process of a task, so nothing is forwarded here. A task that was asked to leave answers
0 to srun whatever its script did: a code other than 0 would have `--kill-on-bad-exit` cut short those that still save.
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

from tfgpu.launch.restarts import SILENT, WRONG_INPUT

LOOK_S = 0.5
"""Seconds between two looks at the process."""


@dataclass(frozen=True)
class Record:
    """How a task ended.

    Args:
        code: exit code of its script; 128 + n for signal n; 124 for one that gave no sign of life.
        ended: when, in seconds since the epoch.
        asked: when it was first asked to leave (SIGTERM); None where it left of itself.
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
        silence_s: seconds without a heartbeat, after the first, until the process is killed; 0: never.

    Returns:
        The command's exit code, or 0 where the task was asked to leave.
    """
    asked: list[tuple[float, float]] = []  # by the clock that nodes share, and by one that nobody sets
    signal.signal(signal.SIGTERM, lambda *_: asked.append((time.time(), time.monotonic())))
    with tempfile.TemporaryDirectory(prefix="tfgpu-") as folder:
        heart = Path(folder) / "heartbeat"
        process = subprocess.Popen(command, env={**os.environ, "TFGPU_HEARTBEAT": str(heart)})
        code = _watch(process, _Heart(heart, silence_s), asked, grace_s)
    _write(record, Record(code, time.time(), asked[0][0] if asked else None))
    return 0 if asked else code


def read(record: Path) -> Record | None:
    """Reads a record; None where there is none, or none that is whole."""
    try:
        return Record(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Heart:
    """The file that the process touches, by its changes alone: a clock may be set while a run lasts."""

    def __init__(self, path: Path, silence_s: float):
        self._path, self._silence_s = path, silence_s
        self._beat, self._quiet_s = None, 0.0

    def is_silent(self) -> bool:
        """To be asked every `LOOK_S`: a job that Slurm suspends for an hour has not been silent for an hour."""
        with contextlib.suppress(OSError):
            beat = self._path.stat().st_mtime_ns
            self._quiet_s = self._quiet_s + LOOK_S if beat == self._beat else 0.0
            self._beat = beat
        return 0 < self._silence_s <= self._quiet_s


def _watch(process: subprocess.Popen, heart: _Heart, asked: Sequence[tuple[float, float]], grace_s: float) -> int:
    silent = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=LOOK_S)
            return SILENT if silent else code if code >= 0 else 128 - code
        silent = heart.is_silent()
        if silent or (asked and time.monotonic() - asked[0][1] > grace_s):
            process.kill()


def _write(path: Path, record: Record) -> None:
    aside = path.with_suffix(".part")
    with aside.open("w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())  # The job looks for it on another machine.
    aside.replace(path)


def main(words: Sequence[str] | None = None) -> int:
    """Runs `tfgpu.run SCRIPT ARGUMENTS` as the task that SLURM_PROCID names."""
    parser = argparse.ArgumentParser(prog="python -m tfgpu.launch.slurm_task")
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

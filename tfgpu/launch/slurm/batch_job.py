"""What the batch file runs on the job's first node: one attempt of the group after another, each an `srun`.

| how the attempt ended | what follows |
|---|---|
| all tasks with 0 | the job is done |
| asked to stop and saved (75), or preempted | `scontrol requeue`; uses no restart |
| wrong input (2) | the job fails at once |
| another code | a restart in the same allocation, up to `--max-restarts`; counted across requeues |
| a node does not answer | `scontrol requeue`; uses no restart |
| the job is being ended (`scancel`, the time limit, an administrator's requeue) | nothing: Slurm decides |

Sources: https://slurm.schedmd.com/sbatch.html (--signal, --requeue), https://slurm.schedmd.com/preempt.html
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfgpu import atomic
from tfgpu.launch.restarts import PREEMPTED, WRONG_INPUT, Ending, Restarts, supervise
from tfgpu.launch.screen import tail
from tfgpu.launch.slurm import task
from tfgpu.launch.slurm.task import Record

KILLED = 128 + signal.SIGKILL
CONTROLLER_S = 60.0
SERVERS_END_S = 5
NODES_ANSWER_S = 90.0


@dataclass(frozen=True)
class Facts:
    """What the controller reports of the job: its state, the number of requeues, and whether it is being preempted."""

    state: str = "RUNNING"
    requeues: int | None = None
    preempted: bool = False


def ending(records: Sequence[Record | None], step_code: int, *, chief_ends: bool = False) -> Ending:
    """Determines how an attempt ended from the records of its tasks and srun's exit code.

    Args:
        records: by rank; None for a task without a record (its node is lost, or it was killed with its script).
        step_code: srun's exit code: 0 if every task succeeded or was asked to stop.
        chief_ends: whether task 0 is the chief of parameter servers, which never end on their own.

    Example:
        >>> ending([Record(137, 20.0, asked=10.1), Record(3, 10.0)], 137)
        Ending(code=3, member=1, asked=False)
        >>> ending([Record(75, 12.0, asked=10.0), Record(75, 11.0, asked=10.0)], 0)
        Ending(code=75, member=1, asked=True)
    """
    if chief_ends and records[0] is not None and records[0].code == 0:
        return Ending(0)
    lost = [rank for rank, record in enumerate(records) if record is None]
    bad = {rank: record for rank, record in enumerate(records) if record is not None and record.code}
    asked = [rank for rank, record in bad.items() if record.asked is not None]
    failed = sorted(bad.keys() - asked, key=lambda rank: (bad[rank].ended, rank))
    for rank in failed:
        if bad[rank].code == WRONG_INPUT:
            return Ending(WRONG_INPUT, rank)
    if asked and (step_code == 0 or not lost) and _came_first(asked, failed, bad):
        # Of those that were asked to stop, one that saved decides: there is a checkpoint to resume from.
        first = min(asked, key=lambda rank: (bad[rank].code != PREEMPTED, bad[rank].ended, rank))
        return Ending(bad[first].code, first, asked=True)
    if failed:
        return Ending(bad[failed[0]].code, failed[0])
    return Ending(step_code or KILLED, lost[0]) if lost else Ending(step_code)  # srun may return 0 for a lost task


def _came_first(asked: Sequence[int], failed: Sequence[int], bad: Mapping[int, Record]) -> bool:
    """Whether the first request to stop came before the first failure."""
    return not failed or min((bad[rank].asked, rank) for rank in asked) < (bad[failed[0]].ended, failed[0])


@dataclass(eq=False)
class Allocated:
    """The engine that runs a script's tasks in the Slurm allocation of this process.

    Args:
        command: the script and its arguments.
        folder: parent of this job's folder for the tasks' logs and records; shared by all nodes.
        max_restarts: restarts after failures.
        grace_period_s: seconds that a task gets to save after a request to stop.
        heartbeat_timeout_s: the heartbeat timeout in seconds; 0: none.
    """

    command: Sequence[str]
    folder: Path
    max_restarts: int = 0
    grace_period_s: float = 60.0
    heartbeat_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self.restarts = Restarts(most=self.max_restarts)
        self.tasks = int(os.environ["SLURM_NTASKS"])
        self.has_servers = os.environ.get("TFGPU_PARAMETER_SERVERS", "0") not in ("", "0")
        self.job = os.environ["SLURM_JOB_ID"]
        self.folder /= f"job-{self.job}"
        self.requeues = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.told_to_end = False
        self._used = self.folder / "restarts"
        self._left: list[Record | None] = []

    def supervise(self) -> int:
        """Runs attempts until the job has finally ended or is requeued; returns the job's exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.restarts.made = int(self._used.read_text()) if self._used.exists() else 0
        signal.signal(signal.SIGTERM, self._end)
        # Earlier records are of this job before it was requeued.
        ending = supervise(self, self.restarts, first=len(list(self.folder.glob("records/*"))) + 1)
        if ending.code == 0:
            say("done.")
        return ending.code

    def run(self, attempt: int) -> Ending:
        """Runs the group once, as a step."""
        records = self.folder / "records" / str(attempt)
        records.mkdir(parents=True)
        code = self._run_step(records, attempt)
        self._left = [task.read(records / f"{rank}.json") for rank in range(self.tasks)]
        return ending(self._left, code, chief_ends=self.has_servers)

    def may_restart(self, end: Ending) -> bool:
        """Requeues the job if that helps; does nothing if Slurm is ending the job."""
        self._explain(end, recorded=end.member is None or self._left[end.member] is not None)
        facts = job_facts(self.job)
        # The job may have been restarted elsewhere while this node was cut off.
        replaced = facts.requeues not in (None, self.requeues)
        if self.told_to_end or replaced or facts.state != "RUNNING":
            say(f"Slurm is ending this job ({facts.state}): no further attempt.")
            return False
        if end.code == PREEMPTED or (end.asked and facts.preempted):
            self._requeue("asked to leave")
            return False
        if None in self._left and not nodes_answer():
            self._requeue("a node does not answer")
            return False
        return True

    def restart(self, end: Ending, wait_s: float | None) -> bool:
        """Waits for the next attempt in this allocation."""
        atomic.write_text(self._used, str(self.restarts.made))
        if wait_s is None:
            say(f"no restart: {_reason(end.code, self.restarts.most)}.")
            return False
        if end.asked:  # Its time is up: the next attempt needs a new allocation.
            self._requeue("asked to stop without saving")
            return False
        say(f"restarting in {wait_s:g} s, restart {self.restarts.made} of {self.restarts.most}.")
        self._wait(wait_s)
        return not self.told_to_end

    def _run_step(self, records: Path, attempt: int) -> int:
        logs = str(self.folder).replace("%", "%%")
        program = [sys.executable, "-m", "tfgpu.launch.slurm.task", f"--records={records}"]
        program += [f"--grace-period={self.grace_period_s:g}", f"--heartbeat-timeout={self.heartbeat_timeout_s:g}"]
        options = [f"--ntasks={self.tasks}", "--kill-on-bad-exit=1", "--export=ALL"]
        # Seconds that the other tasks get after the first one has ended; 0: no limit.
        options += [f"--wait={SERVERS_END_S if self.has_servers else 0}", "--unbuffered"]
        options += ["--open-mode=append", f"--output={logs}/task-%t.log"]
        # In its own session: a signal to this one's group would make srun kill tasks that are still saving.
        command = ["srun", *options, *program, *self.command]
        environment = step_environment(os.environ) | {"TFGPU_ATTEMPT": str(attempt)}
        return subprocess.run(command, env=environment, start_new_session=True).returncode

    def _end(self, *_: object) -> None:
        self.told_to_end = True

    def _explain(self, end: Ending, *, recorded: bool) -> None:
        if end.member is None:
            say(f"srun ended with exit code {end.code}.")
            return
        log = self.folder / f"task-{end.member}.log"
        if end.code == PREEMPTED:
            say(f"task {end.member} was asked to stop and has saved.")
            return
        how = f"ended first, with exit code {end.code}" if recorded else "was lost: it was killed, or its node is down"
        say(f"task {end.member} {how}. The last lines of {log}:")
        for line in tail(log):
            print(f"    {line}", flush=True)

    def _requeue(self, why: str) -> None:
        """Puts the job back into the queue; Slurm then ends this process."""
        done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True)
        if done.returncode:
            say(f"{why}, but Slurm would not requeue the job: {done.stderr.strip()}. Submit the batch file again.")
            return
        say(f"{why}: requeued.")
        self._wait(CONTROLLER_S)

    def _wait(self, seconds: float) -> None:
        """Waits for that time or until Slurm ends this process."""
        deadline = time.monotonic() + seconds
        while not self.told_to_end and time.monotonic() < deadline:
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun, which since 22.05 no longer reads the job's CPUs per task."""
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    return {**({} if cpus is None else {"SRUN_CPUS_PER_TASK": cpus}), **environ}


def job_facts(job: str) -> Facts:
    """Asks the controller; if it does not answer, the job counts as running."""
    try:
        command = ["scontrol", "--oneliner", "show", "job", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONTROLLER_S)
    except subprocess.TimeoutExpired:
        return Facts()
    fields = dict(re.findall(r"(?:^| )(JobState|Restarts|StartTime|PreemptTime)=([\w:-]+)", done.stdout))
    began, preempted = fields.get("StartTime", ""), fields.get("PreemptTime", "")
    requeues = int(fields["Restarts"]) if "Restarts" in fields else None
    is_preempted = preempted[:1].isdigit() and preempted >= began  # Excludes a preemption of an earlier start.
    return Facts(fields.get("JobState", "RUNNING"), requeues, is_preempted)


def nodes_answer() -> bool:
    """Whether every node of the allocation starts a process within 90 s."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    command = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=NODES_ANSWER_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def say(message: str) -> None:
    """Writes one line with the time to the job's log."""
    print(f"tfgpu {time.strftime('%H:%M:%S')} {message}", flush=True)


def _reason(code: int, most: int) -> str:
    if code == WRONG_INPUT:
        return "wrong input, which a restart cannot fix"
    return f"all {most} are used" if most else "--max-restarts is 0"


def main(words: Sequence[str] | None = None) -> int:
    """Supervises the job with the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m tfgpu.launch.slurm.batch_job")
    parser.add_argument("--logs", dest="folder", type=Path, required=True, help="folder that all nodes see")
    parser.add_argument("--max-restarts", type=int, default=0, help="restarts after failures")
    parser.add_argument("--grace-period", dest="grace_period_s", type=float, default=60.0, help="seconds to save")
    words_of = {"type": float, "default": 60.0, "help": "heartbeat timeout in seconds"}
    parser.add_argument("--heartbeat-timeout", dest="heartbeat_timeout_s", **words_of)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGUMENTS")
    return Allocated(**vars(parser.parse_args(words))).supervise()


if __name__ == "__main__":
    sys.exit(main())

"""Runs a job on this machine or over ssh, with its output and signals on the terminal."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfgpu.errors import InputError, no_script
from tfgpu.launch import layout
from tfgpu.launch.group import Group, Member, ProcessSpecs
from tfgpu.launch.job import Job
from tfgpu.launch.layout import specs_for
from tfgpu.launch.link import Link
from tfgpu.launch.processes import Signals
from tfgpu.launch.restarts import PREEMPTED, WRONG_INPUT, Ending, Restarts, supervise
from tfgpu.launch.screen import Screen

GRACE_S = 30.0
"""Seconds that processes get to save after a request to stop that no failure caused."""
ANSWER_S = 60.0
"""Seconds for the nodes to answer."""
RUNNER = (sys.executable, "-m", "tfgpu.run")
_RESUMES = "If the script saves checkpoints, the same command resumes from the newest"
OURS = {
    "TF_CONFIG": "Use -n and --ps.",
    "CUDA_VISIBLE_DEVICES": "Use --gpus-per-worker; the launch divides the variable's current value among the workers.",
    "TFGPU_ATTEMPT": "",
    "TFGPU_HEARTBEAT": "",
    "TFGPU_STARTUP_TIMEOUT": "Use --startup-timeout.",
}
"""Variables that a launch gives each process, and what to use instead."""
SUPERVISOR = (sys.executable, "-m", "tfgpu.launch.remote")


def launch(job: Job, *, grace_period_s: float = GRACE_S, runner: Sequence[str] = RUNNER) -> int:
    """Runs a job's processes on this machine until all have ended.

    Args:
        job: what to run.
        grace_period_s: seconds that processes get to save after a request to stop that no failure caused.
        runner: the command before the script; the default repairs Keras before it runs the script.

    Returns:
        The exit code: 0 if all is done; that of the process that failed first (128+n for signal n; 124 for a
        heartbeat timeout); 130 after Ctrl-C.

    Raises:
        InputError: the script does not exist, TF_CONFIG is already set, or there are too few GPUs.

    Example:
        >>> launch(Job("train.py", workers=2))
        Traceback (most recent call last):
        tfgpu.errors.InputError: There is no script 'train.py'. Give the path of a Python file.
    """
    check(job)
    options = {"runner": runner, "grace_period_s": grace_period_s, "environ": dict(os.environ)}
    return run(job, lambda: [Link("", SUPERVISOR)], [""], **options)


def check(job: Job, *, script: bool = True) -> None:
    """Raises `InputError` for mistakes that show before any process starts.

    Args:
        script: whether the script must exist on this machine.
    """
    if script and not Path(job.script).is_file():
        raise no_script(job.script)
    if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        why = "TF_CONFIG is set, so this process already belongs to a cluster; a launch would make another."
        raise InputError(f"{why} Unset it, or run the script itself: tfgpu run SCRIPT.")
    for name in OURS:
        if name in job.environment:
            raise InputError(f"{name} cannot be set: the launch sets it for each process. {OURS[name]}")


def run(
    job: Job,
    connect: Callable[[], Sequence[Link]],
    nodes: Sequence[str],
    *,
    runner: Sequence[str],
    grace_period_s: float,
    environ: Mapping[str, str],
    directory: str | None = None,
) -> int:
    """Runs a job until it is done or no restart is left.

    Args:
        job: what to run.
        connect: starts a supervisor on each node.
        nodes: their names; `""` is this machine.
        runner: the command before the script.
        grace_period_s: seconds that processes get to save after a request to stop that no failure caused.
        environ: the user's own environment variables.
        directory: working directory of the processes; None: this process's.

    Returns:
        The exit code: that of the process that ended the last attempt, 130 after Ctrl-C, 128+n for signal n.
    """
    tasks = layout.tasks(job, len(nodes))
    members = [_member(job, task) for task in tasks]
    screen = Screen([member.name for member in members], job.logs)

    command = [*runner, job.script, *job.arguments]

    def specs(attempt: int) -> ProcessSpecs:
        return specs_for(job, tasks, attempt, lambda _: command, environ=environ, directory=directory)

    try:
        with Signals() as signals:
            terminal = Terminal(job, members, connect, specs, screen, signals, grace_period_s)
            for number, node in enumerate(nodes):
                if node:
                    screen.say(f"{node}: {', '.join(member.name for member in members if member.node == number)}")
            if job.logs:
                screen.say(f"Log files: {job.logs}")
            return terminal.exit_code(supervise(terminal, terminal.restarts))
    except BrokenPipeError:  # The reader of our output has closed the pipe, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    finally:
        screen.close()


@dataclass
class Terminal:
    """The engine of `tfgpu launch` on this machine and over ssh.

    Args:
        job: what to run.
        members: its processes.
        connect: starts a supervisor on each node.
        specs: makes the process specs of an attempt.
        screen: where output goes.
        signals: Ctrl-C and the like.
        grace_period_s: seconds that processes get to save after a request to stop that no failure caused.
        attempt: the number of the last attempt.
    """

    job: Job
    members: Sequence[Member]
    connect: Callable[[], Sequence[Link]]
    specs: Callable[[int], ProcessSpecs]
    screen: Screen
    signals: Signals
    grace_period_s: float
    attempt: int = 0

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.job.max_restarts)

    def run(self, attempt: int) -> Ending:
        """Runs the group once."""
        self.attempt = attempt
        self.screen.begin(attempt)
        links, specs = self.connect(), self.specs(attempt)
        limits = {"grace_period_s": self.grace_period_s, "heartbeat_timeout_s": self.job.heartbeat_timeout_s}
        limits["answer_s"] = ANSWER_S
        try:
            return Group(self.members, links, specs, self.screen, self.signals, self.restarts, **limits).run()
        finally:
            for link in links:
                link.close()

    def may_restart(self, ending: Ending) -> bool:
        """Allows no restart of a group that was asked to stop."""
        return not ending.asked

    def restart(self, ending: Ending, wait_s: float | None) -> bool:
        """Waits for the next attempt or a signal."""
        if wait_s is None:
            self._explain(ending.code)
            return False
        self.screen.say(f"Attempt {self.attempt + 1} starts in {wait_s:g} s ({self.restarts}).")
        self.signals.wait(wait_s)
        return self.signals.first is None

    def exit_code(self, ending: Ending) -> int:
        """Returns the launch's exit code, after the last attempt."""
        if self.signals.first is None or ending.code == 0 or (ending.asked and ending.code == PREEMPTED):
            return ending.code
        if ending.asked:
            self.screen.say(f"Ended. {_RESUMES}.")
        return 128 + self.signals.first  # Whichever came first, the signal or a process's own end.

    def _explain(self, code: int) -> None:
        """Says why there is no further attempt, where one might have been expected."""
        if code == WRONG_INPUT:
            if self.restarts.most:
                words = "is wrong input, which a restart cannot fix"
                self.screen.say(f"Exit code {WRONG_INPUT} {words}.", error=True)
        elif self.restarts.most:
            self.screen.say(f"All restarts are used ({self.restarts.most}).", error=True)
        else:
            self.screen.say(f"{_RESUMES}; --max-restarts N does so automatically.", error=True)


def _member(job: Job, task: layout.Task) -> Member:
    if task.kind == "evaluator":
        return Member(task.name, task.node, counted=False, may_return=True, may_finish=True)
    if not job.parameter_servers:
        return Member(task.name, task.node)
    # A chief schedules the steps: it knows when all are done, and gives a lost worker's steps to the others.
    return Member(task.name, task.node, counted=task.kind == "chief", may_return=task.kind == "worker")

"""Runs a job on this machine or over ssh, with its output and signals on the terminal."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfgpu.launch import layout
from tfgpu.launch.group import Group, Member, ProcessSpecs
from tfgpu.launch.job import Job
from tfgpu.launch.link import Link
from tfgpu.launch.process_specs import specs_for
from tfgpu.launch.restarts import PREEMPTED, WRONG_INPUT, Restarts
from tfgpu.launch.screen import Screen
from tfgpu.launch.signals import Signals
from tfgpu.launch.supervisor import Ending, supervise

GRACE_S = 30.0
"""Seconds that processes get to save after a request to stop that no failure caused."""
ANSWER_S = 60.0
"""Seconds for the nodes to answer."""
RUNNER = (sys.executable, "-m", "tfgpu.run")
_SAVED = "Checkpoints are kept; the same command resumes from them"


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

    def specs(attempt: int) -> ProcessSpecs:
        return specs_for(
            job, tasks, attempt, lambda _: [*runner, job.script, *job.arguments], environ=environ, directory=directory
        )

    try:
        with Signals() as signals:
            terminal = Terminal(job, members, connect, specs, screen, signals, grace_period_s)
            _introduce(screen, job, members, nodes)
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
        limits = {
            "grace_period_s": self.grace_period_s,
            "heartbeat_timeout_s": self.job.heartbeat_timeout_s,
            "answer_s": ANSWER_S,
        }
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
            self.screen.say(f"Ended. {_SAVED}.")
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
            self.screen.say(f"{_SAVED}; --max-restarts N does so automatically.", error=True)


def _member(job: Job, task: layout.Task) -> Member:
    if task.kind == "evaluator":
        return Member(task.name, task.node, counted=False, may_return=True, may_finish=True)
    if not job.parameter_servers:
        return Member(task.name, task.node)
    # A chief schedules the steps: it knows when all are done, and gives a lost worker's steps to the others.
    return Member(task.name, task.node, counted=task.kind == "chief", may_return=task.kind == "worker")


def _introduce(screen: Screen, job: Job, members: Sequence[Member], nodes: Sequence[str]) -> None:
    for number, node in enumerate(nodes):
        if node:
            screen.say(f"{node}: {', '.join(member.name for member in members if member.node == number)}")
    if job.logs:
        screen.say(f"Log files: {job.logs}")

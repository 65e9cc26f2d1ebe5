"""A job from its first attempt to its last: the group is started again as a whole, on fresh ports."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfgpu.errors import InputError
from tfgpu.launch import layout
from tfgpu.launch.group import Ending, Group, Member, Plan
from tfgpu.launch.job import Job
from tfgpu.launch.link import Link
from tfgpu.launch.restarts import PREEMPTED, WRONG_INPUT, Restarts
from tfgpu.launch.screen import Screen
from tfgpu.launch.signals import Signals

GRACE_S = 30.0
"""Seconds that processes have to save, when they are asked to end while all is well."""
RUNNER = (sys.executable, "-m", "tfgpu.run")


def supervise(
    job: Job,
    connect: Callable[[], Sequence[Link]],
    nodes: Sequence[str],
    *,
    runner: Sequence[str],
    grace_s: float,
    environ: dict[str, str],
    directory: str | None = None,
) -> int:
    """Runs a job until it is done, or until no restart is left for it.

    Args:
        job: what to run.
        connect: starts a supervisor on each node.
        nodes: their names; `""` is this machine.
        runner: the command before the script.
        grace_s: seconds for processes that are asked to end while all is well.
        environ: the user's own variables.
        directory: where the processes run; None: here.

    Returns:
        The exit code: that of the process that ended the last attempt, 130 after Ctrl-C, 128+n for signal n.
    """
    tasks = layout.tasks(job, len(nodes))
    members = [_member(job, task) for task in tasks]
    screen = Screen([member.name for member in members], job.logs)
    restarts = Restarts(job.max_restarts)
    attempt = 0
    try:
        with Signals() as signals:
            _introduce(screen, job, members, nodes)
            while True:
                attempt += 1
                began_at = time.monotonic()
                screen.begin(attempt)
                plan = _plan(job, tasks, nodes, attempt, runner, environ, directory)
                ending = _attempt(
                    members, connect, plan, screen, signals, restarts, grace_s=grace_s, silence_s=job.silence_s
                )
                if ending.asked and ending.code not in (0, PREEMPTED):
                    screen.say(f"Ended. {_SAVED}.")
                    return 128 + signals.first  # whichever came first, the signal or a process's own end
                wait = None if ending.asked else restarts.after(ending.code, time.monotonic() - began_at)
                if wait is None:
                    _explain(screen, ending.code, ending.asked, restarts)
                    return ending.code
                screen.say(f"Attempt {attempt + 1} starts in {wait:g} s ({restarts}).")
                signals.wait(wait)
                if signals.first is not None:
                    return 128 + signals.first
    except BrokenPipeError:  # Whoever read our output has enough, as after `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    finally:
        screen.close()


def _member(job: Job, task: layout.Task) -> Member:
    if task.kind == "evaluator":
        return Member(task.name, task.node, counted=False, may_return=True, may_finish=True)
    if not job.parameter_servers:
        return Member(task.name, task.node)
    # A chief hands out the steps: it knows when all are done, and gives a lost worker's to the others.
    return Member(task.name, task.node, counted=task.kind == "chief", may_return=task.kind == "worker")


def _attempt(
    members: Sequence[Member],
    connect: Callable[[], Sequence[Link]],
    plan: Plan,
    screen: Screen,
    signals: Signals,
    restarts: Restarts,
    **limits: float,
) -> Ending:
    links = connect()
    try:
        return Group(members, links, plan, screen, signals, restarts, **limits).run()
    finally:
        for link in links:
            link.close()


def _plan(
    job: Job,
    tasks: Sequence[layout.Task],
    nodes: Sequence[str],
    attempt: int,
    runner: Sequence[str],
    environ: dict[str, str],
    directory: str | None,
) -> Plan:
    """Makes the function that decides what to start, once the nodes have said what they have."""
    common = {
        "PYTHONUNBUFFERED": "1",
        "TFGPU_ATTEMPT": str(attempt),
        "TFGPU_STARTUP_TIMEOUT": f"{job.startup_timeout_s:g}",
    }

    def plan(facts: Sequence[dict[str, Any]], ports: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        places = [
            layout.Place(name, each["address"], each["cpus"], tuple(each["gpus"]))
            for name, each in zip(nodes, facts, strict=True)
        ]
        _check_addresses(places)
        left = [iter(each) for each in ports]
        own = {task: next(left[task.node]) for task in tasks}
        found = layout.environments(job, tasks, places, own, environ)
        command = [*runner, job.script, *job.arguments]
        return [
            {"command": command, "directory": directory, "environment": {**common, **found[task]}} for task in tasks
        ]

    return plan


def _check_addresses(places: Sequence[layout.Place]) -> None:
    local = [place for place in places if place.address == "::1" or place.address.startswith("127.")]
    if local and len(local) < len(places):
        others = next(place.name for place in places if place not in local)
        raise InputError(
            f"{local[0].name} is reached at {local[0].address}, where {others} cannot reach it. "
            "Name every node as the others know it, not as localhost."
        )


def _introduce(screen: Screen, job: Job, members: Sequence[Member], nodes: Sequence[str]) -> None:
    for number, node in enumerate(nodes):
        if node:
            screen.say(f"{node}: {', '.join(member.name for member in members if member.node == number)}")
    if job.logs:
        screen.say(f"Log files: {job.logs}")


_SAVED = "What a Checkpoint has saved stays, and the same command goes on from it"


def _explain(screen: Screen, code: int, asked: bool, restarts: Restarts) -> None:
    """Says why there is no further attempt, where one might have been expected."""
    if asked or code == 0 or (code == WRONG_INPUT and not restarts.most):
        return
    if not restarts.most:
        screen.say(f"{_SAVED}; --max-restarts N does so by itself.", error=True)
    elif code == WRONG_INPUT:
        screen.say(f"Exit code {WRONG_INPUT} is wrong input, which another start cannot mend.", error=True)
    else:
        screen.say(f"All restarts are used ({restarts.most}).", error=True)

"""What engines have in common: the facts of a launch, and starting the whole group again until it is done."""

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tfgpu.errors import InputError, MachineError
from tfgpu.launch.functions import pickled
from tfgpu.launch.functions.child import Ended, Work, search_paths
from tfgpu.launch.job import Job
from tfgpu.launch.restarts import PREEMPTED, SILENT, WRONG_INPUT, Restarts

_log = logging.getLogger(__name__)

Progress = Callable[[dict], None]


def work_of(
    train: Callable | str | Path | Job,
    arguments: Sequence,
    *,
    workers: int | None,
    gpus_per_worker: int | None,
    max_restarts: int,
    startup_timeout_s: float,
    silence_s: float,
    grace_s: float,
    logs: str | Path | None,
    environment: Mapping[str, str] | None,
) -> Work:
    """Makes what travels to the workers.

    Args:
        train: a function, the path of a script, or a whole `Job`, which brings its own settings.
        arguments, workers, gpus_per_worker, max_restarts, startup_timeout_s, silence_s, logs, environment: as in `Job`.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises:
        InputError: a setting is out of range, or a function cannot travel.
    """
    if not grace_s >= 0:
        raise InputError(f"`grace_s` must be at least 0 seconds. Received: {grace_s!r}.")
    if isinstance(train, Job):
        given = {"arguments": arguments, "workers": workers, "gpus_per_worker": gpus_per_worker, "logs": logs}
        given |= {"max_restarts": max_restarts, "environment": environment}
        twice = [name for name, value in given.items() if value]
        if twice:
            raise InputError(f"A Job brings its own settings: give {', '.join(twice)} to `Job(...)` alone.")
        if train.parameter_servers:
            raise InputError(
                f"This engine starts workers only. Received: parameter_servers={train.parameter_servers}. Set it to 0."
            )
        if train.evaluator:
            raise InputError("This engine starts workers only. Received: evaluator=True. Start it by itself.")
        return Work(train, None, search_paths(), grace_s)
    settings = {
        "workers": 2 if workers is None else workers,
        "gpus_per_worker": gpus_per_worker,
        "max_restarts": max_restarts,
        "startup_timeout_s": startup_timeout_s,
        "silence_s": silence_s,
        "logs": None if logs is None else Path(logs).absolute(),
        "environment": dict(environment or {}),
    }
    if callable(train):
        name = f"{getattr(train, '__name__', 'function')}()"
        return Work(Job(name, **settings), pickled.pack(train, arguments), search_paths(), grace_s)
    if not isinstance(train, (str, os.PathLike)):
        raise InputError(f"`train` must be a function, the path of a script, or a Job. Received: {train!r}.")
    script = os.path.abspath(train) if os.path.exists(train) else str(train)
    return Work(Job(script, tuple(map(str, arguments)), **settings), None, search_paths(), grace_s)


def run_until_done(work: Work, attempt: Callable[[Work], Ended]) -> object:
    """Starts the group, and starts it again after a failure or a preemption, as far as the budget goes.

    Args:
        work: what the workers are to do.
        attempt: starts the group with the work of this start, and returns how the chief ended, or the worker that
            ended badly first. Nothing of the group is left when it returns.

    Returns:
        What the chief's function returned; None for a script.

    Raises:
        InputError: a worker found wrong input.
        MachineError: a worker failed, and no restart is left.
    """
    job, restarts = work.job, Restarts(work.job.max_restarts)
    while True:
        began_at = time.monotonic()
        ended = attempt(work)
        if ended.code == 0:
            return None if ended.result is None else pickle.loads(ended.result)
        wait_s = restarts.after(ended.code, time.monotonic() - began_at)
        if wait_s is None:
            raise _error(job, ended)
        _log.warning("%s The group starts again in %.0f s.", _what_happened(ended), wait_s)
        time.sleep(wait_s)
        work = replace(work, start=work.start + 1)


def _error(job: Job, ended: Ended) -> Exception:
    lines = "\n".join(f"  {line}" for line in ended.lines) or "  (none)"
    message = f"{_what_happened(ended)} Its last lines:\n{lines}"
    if ended.code == WRONG_INPUT:
        return InputError(message)
    spent = f"All {job.max_restarts} restarts are spent." if job.max_restarts else "Restarts: `max_restarts=3`."
    return MachineError(f"{message}\n{spent}")


def _what_happened(ended: Ended) -> str:
    place = f" on {ended.host}" if ended.host else ""
    return f"Worker {ended.rank}{place} {_meaning(ended.code)}."


def _meaning(code: int) -> str:
    if code == PREEMPTED:
        return "was preempted (exit code 75)"
    if code == SILENT:
        return "gave no sign of life, and was ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"

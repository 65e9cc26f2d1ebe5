"""How each process of an attempt is started: its command, and the variables that define its role."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfgpu.errors import InputError
from tfgpu.launch import layout
from tfgpu.launch.group import ProcessSpecs
from tfgpu.launch.job import Job


def specs_for(
    job: Job,
    tasks: Sequence[layout.Task],
    attempt: int,
    command: Callable[[dict[str, Any]], Sequence[str]],
    *,
    environ: Mapping[str, str],
    directory: str | None = None,
    is_engine: bool = False,
) -> ProcessSpecs:
    """Makes the function that decides what to start, once the nodes have sent their facts.

    Args:
        job: what to run.
        tasks: the processes.
        attempt: the number of this attempt, from 1.
        command: returns the command of a process from its node's facts.
        environ: the user's own environment variables.
        directory: where the processes run; None: where the node's supervisor runs.
        is_engine: whether an engine starts the processes: its variables may describe another cluster, and its
            processes send reports.
    """
    common = {
        "PYTHONUNBUFFERED": "1",
        "TFGPU_ATTEMPT": str(attempt),
        "TFGPU_STARTUP_TIMEOUT": f"{job.startup_timeout_s:g}",
    }

    def specs(facts: Sequence[dict[str, Any]], ports: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        places = [layout.Place(each["name"], each["address"], each["cpus"], tuple(each["gpus"])) for each in facts]
        _check_addresses(places)
        left = [iter(each) for each in ports]
        own = {task: next(left[task.node]) for task in tasks}
        found = layout.environments(job, tasks, places, own, environ, is_engine=is_engine)
        return [
            {
                "command": list(command(facts[task.node])),
                "directory": directory,
                "environment": {**common, **found[task]},
                "reports": is_engine,
            }
            for task in tasks
        ]

    return specs


def _check_addresses(places: Sequence[layout.Place]) -> None:
    local = [place for place in places if place.address == "::1" or place.address.startswith("127.")]
    if local and len(local) < len(places):
        others = next(place.name for place in places if place not in local)
        raise InputError(
            f"{local[0].name} is reached at {local[0].address}, where {others} cannot reach it. "
            "Use a name for it that the other nodes can resolve, not localhost."
        )

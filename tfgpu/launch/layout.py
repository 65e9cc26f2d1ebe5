"""The tasks of a job on its nodes: their commands, TF_CONFIG, and shares of CPUs and GPUs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgpu.errors import InputError
from tfgpu.launch.group import ProcessSpecs
from tfgpu.launch.job import Job


@dataclass(frozen=True)
class Task:
    """One process of the cluster.

    Attributes:
        kind: its kind in TF_CONFIG: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: its index within its kind.
        node: the number of the node that runs it.
    """

    kind: str
    index: int
    node: int

    @property
    def name(self) -> str:
        return self.kind if self.kind in ("chief", "evaluator") else f"{self.kind} {self.index}"


@dataclass(frozen=True)
class Place:
    """What a node offers its tasks.

    Attributes:
        name: its name as the user gave it; `""` for this machine.
        address: the address at which its peers reach it.
        cpus: how many CPUs its processes may use.
        gpus: its GPUs, as CUDA_VISIBLE_DEVICES names them.
    """

    name: str
    address: str
    cpus: int
    gpus: tuple[str, ...] = ()


def tasks(job: Job, nodes: int = 1) -> list[Task]:
    """Spreads a job's tasks over nodes: consecutive tasks share a node, and the first nodes get one more.

    With parameter servers there is a chief besides the workers, which dispatches the steps, as TensorFlow's
    ParameterServerStrategy requires. Without them worker 0 is the chief. Nodes without a worker get the first parameter
    servers.

    Raises:
        InputError: there are more nodes than workers and parameter servers.

    Example:
        >>> [(task.name, task.node) for task in tasks(Job("train.py", workers=3), nodes=2)]
        [('worker 0', 0), ('worker 1', 0), ('worker 2', 1)]
    """
    if job.workers + job.parameter_servers < nodes:
        who, given = "a worker", f"-n {job.workers}"
        if job.parameter_servers:
            who, given = "a worker or a parameter server", f"{given}, --ps {job.parameter_servers}"
        least = nodes - job.parameter_servers
        raise InputError(f"Every node needs {who}. Received: {given} and {nodes} nodes. Use -n {least} or more.")
    with_workers = min(nodes, job.workers)
    found = [Task("chief", 0, 0)] if job.parameter_servers else []
    found += [Task("worker", index, index * with_workers // job.workers) for index in range(job.workers)]
    found += [Task("ps", index, (with_workers + index) % nodes) for index in range(job.parameter_servers)]
    return found + ([Task("evaluator", 0, nodes - 1)] if job.evaluator else [])


def environments(
    job: Job,
    tasks: Sequence[Task],
    places: Sequence[Place],
    ports: Mapping[Task, int],
    environ: Mapping[str, str],
    *,
    is_engine: bool = False,
) -> dict[Task, dict[str, str]]:
    """Returns each task's environment variables: its role in the cluster, and its CPUs and GPUs.

    Args:
        ports: the TCP port of each task, on its node.
        environ: the user's own environment variables; a number of threads set there is kept.
        is_engine: whether a single task gets a TF_CONFIG too: its engine's variables may describe another cluster.

    Raises:
        InputError: a node has fewer GPUs than its workers would need.
    """
    addresses = _addresses(tasks, places, ports)
    found = {}
    for number, place in enumerate(places):
        here = [task for task in tasks if task.node == number]
        graphics = _gpu_shares(job, [task for task in here if task.kind == "worker"], place)
        share = max(1, place.cpus // max(1, len(here)))
        # An operation that waits for peers occupies a thread of the second pool, which needs at least two.
        threads = {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": str(max(2, share))}
        # A single process uses all CPUs without being told.
        threads = {name: value for name, value in threads.items() if len(here) > 1 and name not in environ}
        # Only workers get GPUs: a chief that dispatches steps, a parameter server and an evaluator need none.
        no_gpu = {"CUDA_VISIBLE_DEVICES": ""} if place.gpus else {}
        for task in here:
            found[task] = threads | graphics.get(task, no_gpu) | job.environment
            if len(tasks) > 1 or is_engine:
                place_in_it = {"cluster": addresses, "task": {"type": task.kind, "index": task.index}}
                found[task]["TF_CONFIG"] = json.dumps(place_in_it)
    return found


def _addresses(tasks: Sequence[Task], places: Sequence[Place], ports: Mapping[Task, int]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for task in tasks:
        if task.kind == "evaluator":
            continue  # The evaluator has no peers, and TensorFlow's guides omit it.
        host = places[task.node].address
        shown = f"[{host}]" if ":" in host else host
        found.setdefault(task.kind, []).append(f"{shown}:{ports[task]}")
    return found


def _gpu_shares(job: Job, workers: Sequence[Task], place: Place) -> dict[Task, dict[str, str]]:
    size, where = job.gpus_per_worker, place.name or "This machine"
    if not workers or (size is None and not place.gpus):
        return {}
    if size is None:
        size = len(place.gpus) // len(workers)
        if not size:
            raise InputError(
                f"{where} has {len(place.gpus)} GPU(s) for {len(workers)} workers. Start at most that many "
                f"there (-n {len(place.gpus)} on one machine), or use --gpus-per-worker 0 to train on the CPU."
            )
    if size * len(workers) > len(place.gpus):
        raise InputError(
            f"{where} has {len(place.gpus)} GPU(s); {len(workers)} workers with --gpus-per-worker {size} need "
            f"{size * len(workers)}. Start fewer workers, give each fewer GPUs, or train on the CPU with "
            "--gpus-per-worker 0."
        )
    shares = [",".join(place.gpus[at * size : (at + 1) * size]) for at in range(len(workers))]
    return {task: {"CUDA_VISIBLE_DEVICES": share} for task, share in zip(workers, shares, strict=True)}


def specs_for(
    job: Job,
    tasks: Sequence[Task],
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
    common = {"PYTHONUNBUFFERED": "1", "TFGPU_ATTEMPT": str(attempt)}
    common["TFGPU_STARTUP_TIMEOUT"] = f"{job.startup_timeout_s:g}"

    def specs(facts: Sequence[dict[str, Any]], ports: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        places = [Place(each["name"], each["address"], each["cpus"], tuple(each["gpus"])) for each in facts]
        _check_addresses(places)
        left = [iter(each) for each in ports]
        own = {task: next(left[task.node]) for task in tasks}
        found = environments(job, tasks, places, own, environ, is_engine=is_engine)
        same = {"directory": directory, "reports": is_engine}
        return [
            {**same, "command": list(command(facts[task.node])), "environment": {**common, **found[task]}}
            for task in tasks
        ]

    return specs


def _check_addresses(places: Sequence[Place]) -> None:
    local = [place for place in places if place.address == "::1" or place.address.startswith("127.")]
    if local and len(local) < len(places):
        others = next(place.name for place in places if place not in local)
        why = f"{local[0].name} is reached at {local[0].address}, where {others} cannot reach it."
        raise InputError(f"{why} Use a name for it that the other nodes can resolve, not localhost.")

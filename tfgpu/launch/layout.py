"""The tasks of a job on its nodes, each with its TF_CONFIG and its share of CPUs and GPUs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfgpu.errors import InputError
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
        raise InputError(
            f"Every node needs {who}. Received: {given} and {nodes} nodes. "
            f"Use -n {nodes - job.parameter_servers} or more."
        )
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
        shares = _threads(len(here), place.cpus)
        threads = {name: share for name, share in shares.items() if name not in environ}
        for task in here:
            found[task] = threads | graphics.get(task, _no_gpu(place)) | job.environment
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


def _threads(processes: int, cpus: int) -> dict[str, str]:
    """A process's share of the CPUs; a single process uses all of them without being told."""
    if processes == 1:
        return {}
    share = max(1, cpus // processes)
    # An operation that waits for peers occupies a thread of the second pool, which needs at least two.
    return {"TF_NUM_INTRAOP_THREADS": str(share), "TF_NUM_INTEROP_THREADS": str(max(2, share))}


def _gpu_shares(job: Job, workers: Sequence[Task], place: Place) -> dict[Task, dict[str, str]]:
    size = job.gpus_per_worker
    if not workers or (size is None and not place.gpus):
        return {}
    if size is None:
        size = len(place.gpus) // len(workers)
        if not size:
            raise InputError(
                f"{_where(place)} has {len(place.gpus)} GPU(s) for {len(workers)} workers. Start at most that many "
                f"there (-n {len(place.gpus)} on one machine), or use --gpus-per-worker 0 to train on the CPU."
            )
    if size * len(workers) > len(place.gpus):
        raise InputError(
            f"{_where(place)} has {len(place.gpus)} GPU(s); {len(workers)} workers with --gpus-per-worker {size} need "
            f"{size * len(workers)}. Start fewer workers, give each fewer GPUs, or train on the CPU with "
            "--gpus-per-worker 0."
        )
    return {
        task: {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus[at * size : (at + 1) * size])}
        for at, task in enumerate(workers)
    }


def _no_gpu(place: Place) -> dict[str, str]:
    """Only workers get GPUs: a chief that dispatches steps, a parameter server and an evaluator need none."""
    return {"CUDA_VISIBLE_DEVICES": ""} if place.gpus else {}


def _where(place: Place) -> str:
    return place.name or "This machine"

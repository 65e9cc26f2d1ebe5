"""Training on a Ray cluster: one actor a worker, in a placement group, TensorFlow in a process of the actor.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError, unknown
from tfgpu.launch.functions import child
from tfgpu.launch.functions.child import Ended, Work
from tfgpu.launch.functions.group import Progress, run_until_done, work_of
from tfgpu.launch.job import Job
from tfgpu.launch.restarts import PREEMPTED

PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_LOST = 1
"""Exit code that stands for a worker whose actor is gone."""
_WAIT_S = 1.0

_log = logging.getLogger(__name__)


def ray_job(
    train: Callable[..., object] | str | Path | Job,
    workers: int | None = None,
    *,
    arguments: Sequence[object] = (),
    cpus_per_worker: float = 1,
    gpus_per_worker: int | None = None,
    placement: str = "SPREAD",
    max_restarts: int = 0,
    startup_timeout_s: float = 60.0,
    silence_s: float = 60.0,
    grace_s: float = 10.0,
    logs: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """Trains on a Ray cluster, and returns when the training is done.

    Joins the cluster that `RAY_ADDRESS` names, or starts one on this machine, unless `ray.init` was called before.
    Every worker runs `train` in a process of its own with its TF_CONFIG, so that `tfgpu.strategy()` finds the others.
    The first worker that ends badly, or whose actor dies, ends the group (SIGTERM, grace, SIGKILL). The group starts
    again, and `train` goes on from its checkpoint, if it keeps one. Nothing is left behind, whatever happens here.

    Args:
        train: a function, the path of a script that all machines see, or a `Job`.
        workers: processes that train, the chief included (default 2).
        arguments: what the function is called with, or the script's own.
        cpus_per_worker: CPUs to reserve for each.
        gpus_per_worker: GPUs of each; None shares out what the cluster has.
        placement: `"SPREAD"` over the machines, `"PACK"` onto few, or one of these with `"STRICT_"` before it.
        max_restarts: how often the group starts again after a failure. A preemption spends none.
        startup_timeout_s: seconds to wait for the resources, for the actors, and for workers to find each other.
        silence_s: seconds without a sign of life after which a worker counts as stopped.
        grace_s: seconds between SIGTERM and SIGKILL.
        logs: folder for a log file of each worker, on its machine; they also go to Ray's logs.
        environment: variables that every worker gets.
        runtime_env: Ray's own, such as `{"working_dir": "."}`, for the actors.
        on_progress: called here with what the chief reports by `tfgpu.callbacks.Report()` or `tfgpu.launch.report`,
            as it happens, with the number of the start under `"start"`, from 0.

    Returns:
        What the chief's function returned; None for a script.

    Raises:
        InputError: Ray is not installed, a setting is out of range, the function cannot travel, or a worker found
            wrong input.
        MachineError: the cluster does not have the resources in time, or a worker failed and no restart is left.

    Example:
        history = tfgpu.launch.ray_job(train, workers=4, gpus_per_worker=1, max_restarts=3, on_progress=print)
    """
    ray = _ray()
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    if isinstance(cpus_per_worker, bool) or not cpus_per_worker > 0:
        raise InputError(f"`cpus_per_worker` must be above 0. Received: {cpus_per_worker!r}.")
    work = work_of(
        train,
        arguments,
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        max_restarts=max_restarts,
        startup_timeout_s=startup_timeout_s,
        silence_s=silence_s,
        grace_s=grace_s,
        logs=logs,
        environment=environment,
    )
    with _joined(ray):
        gpus = work.job.gpus_per_worker
        if gpus is None:
            gpus = int(ray.cluster_resources().get("GPU", 0)) // work.job.workers
        bundle = {"CPU": cpus_per_worker, **({"GPU": gpus} if gpus else {})}
        return run_until_done(
            work, lambda work: _attempt(ray, work, bundle, placement, dict(runtime_env or {}), on_progress)
        )


class Worker:
    """The actor of one worker; Ray runs its methods in threads, so that `stop` need not wait for `news`."""

    def __init__(self):
        self._child: child.Child | None = None

    def address(self) -> str:
        """`host:port` under which the others reach this worker's process."""
        import ray

        host = ray.util.get_node_ip_address()
        return f"[{host}]:{child.free_port()}" if ":" in host else f"{host}:{child.free_port()}"

    def start(self, work: Work, cluster: Cluster, gpus: int) -> None:
        """Starts the process; without GPUs of its own it sees none."""
        self._child = child.Child(work, cluster, environment={} if gpus else {"CUDA_VISIBLE_DEVICES": ""})

    def news(self) -> tuple[list[dict], Ended | None]:
        """Reports, and how the process ended where it has; returns at the latest after some seconds."""
        return self._child.news(wait_s=5.0)

    def stop(self) -> None:
        """Ends the process."""
        if self._child is not None:
            self._child.stop()


def _ray():
    try:
        import ray
        import ray.util.placement_group
    except ImportError as error:
        raise InputError("`ray_job` needs Ray. Run: pip install 'tfgpu[ray]'") from error
    return ray


@contextlib.contextmanager
def _joined(ray):
    """Joins or starts a cluster where the program has not, and then leaves it."""
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()


def _attempt(ray, work: Work, bundle: dict, placement: str, runtime_env: dict, on_progress: Progress | None) -> Ended:
    """Starts the group once; returns how the chief ended, or the worker that ended badly first."""
    count, timeout_s = work.job.workers, work.job.startup_timeout_s
    group = ray.util.placement_group([bundle] * count, strategy=placement)
    actors = []
    try:
        if not group.wait(timeout_s):
            raise _no_room(ray, bundle, count, placement, timeout_s)
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for rank in range(count):
            options = ray.remote(Worker).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=4,
                runtime_env=runtime_env,
                scheduling_strategy=where(group, placement_group_bundle_index=rank),
            )
            actors.append(options.remote())
        return _run(ray, actors, work, bundle.get("GPU", 0), on_progress)
    finally:
        _end(ray, actors, work.grace_s)
        ray.util.remove_placement_group(group)


def _run(ray, actors: list, work: Work, gpus: int, on_progress: Progress | None) -> Ended:
    timeout_s = work.job.startup_timeout_s
    try:
        addresses = tuple(_answers(ray, [actor.address.remote() for actor in actors], timeout_s))
        clusters = [Cluster(workers=addresses, rank=rank, task_index=rank, source="Ray") for rank in range(len(actors))]
        starts = [a.start.remote(work, cluster, gpus) for a, cluster in zip(actors, clusters, strict=True)]
        _answers(ray, starts, timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise MachineError(
            f"Ray gave the resources, but its actors did not start within startup_timeout_s={timeout_s:g}. A new "
            "`runtime_env` may take longer to set up: give it more time, or look at Ray's logs."
        ) from error
    except _Lost as error:
        return error.ended
    return _follow(ray, actors, work.start, on_progress)


class _Lost(Exception):
    """An actor died before its process was started."""

    def __init__(self, ended: Ended):
        super().__init__()
        self.ended = ended


def _answers(ray, calls: list, timeout_s: float) -> list:
    """What the actors answer, each to its call."""
    ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    found = []
    for rank, call in enumerate(calls):
        try:
            found.append(ray.get(call, timeout=0))
        except ray.exceptions.RayActorError as error:
            raise _Lost(_lost(error, rank)) from error
    return found


def _follow(ray, actors: list, start: int, on_progress: Progress | None) -> Ended:
    """Passes reports on until all workers are done, or one has ended badly."""
    pending, chief = {actor.news.remote(): rank for rank, actor in enumerate(actors)}, None
    while pending:
        ready, _ = ray.wait(list(pending), timeout=_WAIT_S)
        for call in ready:
            rank = pending.pop(call)
            try:
                reports, ended = ray.get(call)
            except ray.exceptions.RayActorError as error:
                return _lost(error, rank)
            for report in reports if on_progress is not None else ():
                on_progress({"start": start, **report})
            if ended is None:
                pending[actors[rank].news.remote()] = rank
            elif ended.code != 0:
                return ended
            elif rank == 0:
                chief = ended
    return chief


def _lost(error, rank: int) -> Ended:
    """How a worker ended whose actor died: Ray knows whether its machine was taken away on purpose."""
    code = PREEMPTED if getattr(error, "preempted", False) else _LOST
    return Ended(rank, code, lines=tuple(str(error).splitlines()))


def _end(ray, actors: list, grace_s: float) -> None:
    stops = [actor.stop.remote() for actor in actors]
    try:
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=grace_s + 5)
    finally:
        for actor in actors:
            ray.kill(actor)


def _no_room(ray, bundle: dict, count: int, placement: str, timeout_s: float) -> MachineError:
    asked = ", ".join(f"{number:g} {name}" for name, number in bundle.items())
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = "; ".join(", ".join(f"{m.get(name, 0):g} {name}" for name in bundle) for m in machines)
    free = ", ".join(f"{ray.available_resources().get(name, 0):g} {name}" for name in bundle)
    return MachineError(
        f"Ray did not have the resources within startup_timeout_s={timeout_s:g}. Asked for: {count} workers with "
        f"{asked} each, placement {placement}. The cluster's machines have: {has}; free at the moment: {free}. "
        "Ask for less, wait for other jobs to end, or add machines."
    )

"""Training on a Ray cluster: one actor per worker in a placement group; TensorFlow runs in the actor's child process.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfgpu.errors import MachineError, positive, required, unknown
from tfgpu.launch.functions.group import Progress, run_until_done, work_of
from tfgpu.launch.functions.relay import EngineLink, Message, Relay, Work
from tfgpu.launch.restarts import PREEMPTED

PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_WAIT_S = 1.0
_CLOSE_S = 10.0


def ray_job(
    train: Callable[..., object] | str | Path,
    workers: int = 2,
    *,
    arguments: Sequence[object] = (),
    cpus_per_worker: float = 1,
    gpus_per_worker: int | None = None,
    placement: str = "SPREAD",
    max_restarts: int = 0,
    startup_timeout_s: float = 60.0,
    heartbeat_timeout_s: float = 60.0,
    grace_period_s: float = 10.0,
    logs: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """Trains on a Ray cluster, and returns when the training is done.

    Joins the cluster that `RAY_ADDRESS` names, or starts one on this machine, unless `ray.init` was called before.
    Every worker runs `train` in its own process with its own TF_CONFIG, so `tfgpu.strategy()` finds the others.
    The first worker that fails, or whose actor dies, ends the group (SIGTERM, grace period, SIGKILL). The group is
    restarted, and `train` resumes from its checkpoint if it saves any. No process outlives this call.

    Args:
        train: a function, or the path of a script that all machines can read.
        workers: processes that train, the chief included.
        arguments: arguments of the function or the script.
        cpus_per_worker: CPUs to reserve for each worker.
        gpus_per_worker: GPUs of each worker; None divides the cluster's GPUs among them.
        placement: `"SPREAD"` over the machines, `"PACK"` onto few, or one of these with `"STRICT_"` before it.
        max_restarts: restarts of the group after failures. A preemption uses none.
        startup_timeout_s: seconds to wait for the resources, for the actors, and for workers to find each other.
        heartbeat_timeout_s: the heartbeat timeout in seconds; 0: none.
        grace_period_s: seconds that workers get to save after a request to stop that no failure caused.
        logs: folder for a log file of each worker, on its machine; the output also goes to Ray's logs.
        environment: environment variables of every worker.
        runtime_env: Ray's runtime environment of the actors, such as `{"working_dir": "."}`.
        on_progress: called in this process with each report that the chief makes by `tfgpu.callbacks.Report()` or
            `tfgpu.launch.report`; `"start"` holds the number of the attempt, from 0.

    Returns:
        What the chief's function returned; None for a script.

    Raises:
        InputError: Ray is not installed, a setting is out of range, the function cannot be pickled, or a worker found
            wrong input.
        MachineError: the cluster does not have the resources in time, or a worker failed and no restart is left.

    Example:
        history = tfgpu.launch.ray_job(train, workers=4, gpus_per_worker=1, max_restarts=3, on_progress=print)
    """
    ray = required("ray", "`ray_job` needs Ray", "Run: pip install 'tfgpu[ray]'")
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    positive("cpus_per_worker", cpus_per_worker)
    settings = {"max_restarts": max_restarts, "logs": logs, "environment": environment}
    settings |= {"startup_timeout_s": startup_timeout_s, "heartbeat_timeout_s": heartbeat_timeout_s}
    settings |= {"workers": workers, "gpus_per_worker": gpus_per_worker}
    work = work_of(train, arguments, grace_period_s=grace_period_s, **settings)
    with _joined(ray):
        gpus = work.job.gpus_per_worker
        if gpus is None:
            gpus = int(ray.cluster_resources().get("GPU", 0)) // work.job.workers
        work = dataclasses.replace(work, job=dataclasses.replace(work.job, gpus_per_worker=gpus))
        bundle = {"CPU": cpus_per_worker, **({"GPU": gpus} if gpus else {})}
        options = {"num_cpus": cpus_per_worker, "num_gpus": gpus, "runtime_env": dict(runtime_env or {})}
        return run_until_done(work, lambda _: _connected(ray, work, bundle, placement, options), on_progress)


class Worker:
    """The actor of one worker. Ray runs its methods in threads, so `send` does not wait for `receive`."""

    def start(self, work: Work, rank: int) -> list[Message]:
        """Starts the worker's supervisor."""
        import ray

        self._relay = Relay(work, rank, ray.util.get_node_ip_address())
        return []

    def receive(self) -> list[Message] | None:
        """Waits for messages to the launching program; None: the supervisor has ended."""
        return self._relay.receive()

    def send(self, do: str, facts: Mapping[str, Any]) -> None:
        """Forwards a message of the launching program."""
        self._relay.send(do, facts)

    def close(self) -> None:
        """Ends the supervisor."""
        self._relay.close()


class RayLink(EngineLink):
    """The connection to a worker's supervisor through the methods of its actor."""

    def __init__(self, rank: int, actor: Any):
        super().__init__(rank)
        self.actor = actor

    def send(self, do: str, **facts: Any) -> None:
        self.actor.send.remote(do, facts)


@contextlib.contextmanager
def _joined(ray):
    """Joins or starts a cluster unless the program has, and then leaves it."""
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _connected(ray, work: Work, bundle: dict, placement: str, options: dict) -> Iterator[list[RayLink]]:
    """Starts an actor with a supervisor for each worker; ends them all."""
    count, timeout_s = work.job.workers, work.job.startup_timeout_s
    group = ray.util.placement_group([bundle] * count, strategy=placement)
    actors = []
    try:
        if not group.wait(timeout_s):
            raise _no_room(ray, bundle, count, placement, timeout_s)
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for rank in range(count):
            place = where(group, placement_group_bundle_index=rank)
            actor = ray.remote(Worker).options(max_concurrency=4, scheduling_strategy=place, **options)
            actors.append(actor.remote())
        starts = [actor.start.remote(work, rank) for rank, actor in enumerate(actors)]
        if ray.wait(starts, num_returns=count, timeout=timeout_s)[1]:
            raise MachineError(
                f"Ray reserved the resources, but its actors did not start within startup_timeout_s={timeout_s:g}. A "
                "new `runtime_env` may take longer to set up: increase the timeout, or check Ray's logs."
            )
        links = [RayLink(rank, actor) for rank, actor in enumerate(actors)]
        with _pumped(ray, dict(zip(starts, links, strict=True))):
            yield links
        ray.wait([actor.close.remote() for actor in actors], num_returns=count, timeout=_CLOSE_S)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


@contextlib.contextmanager
def _pumped(ray, calls: dict[Any, RayLink]) -> Iterator[None]:
    """Delivers the actors' messages to their links, in a thread.

    Args:
        calls: the pending first call of each link's actor.
    """
    done = threading.Event()

    def pump() -> None:
        while calls and not done.is_set():
            for call in ray.wait(list(calls), timeout=_WAIT_S)[0]:
                link = calls.pop(call)
                try:
                    messages = ray.get(call)
                except ray.exceptions.RayError as error:
                    # Ray knows whether a machine was removed on purpose.
                    code = PREEMPTED if getattr(error, "preempted", False) else 1
                    link.lose(str(error).splitlines(), code)
                    continue
                link.put(messages)
                if messages is not None:
                    calls[link.actor.receive.remote()] = link

    thread = threading.Thread(target=pump, name="tfgpu-ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _no_room(ray, bundle: dict, count: int, placement: str, timeout_s: float) -> MachineError:
    asked = ", ".join(f"{number:g} {name}" for name, number in bundle.items())
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = "; ".join(", ".join(f"{m.get(name, 0):g} {name}" for name in bundle) for m in machines)
    free = ", ".join(f"{ray.available_resources().get(name, 0):g} {name}" for name in bundle)
    return MachineError(
        f"Ray did not have the resources within startup_timeout_s={timeout_s:g}. Asked for: {count} workers with "
        f"{asked} each, placement {placement}. The cluster's machines have: {has}; free at the moment: {free}. "
        "Request less, wait for other jobs to end, or add machines."
    )

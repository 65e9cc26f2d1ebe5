"""Who am I, and who are my peers: the facts of a cluster, read once from the environment.

Example:
    >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> cluster = Cluster.from_environment({"TF_CONFIG": text})
    >>> cluster.size, cluster.rank, cluster.is_chief
    (2, 1, False)

This module needs the standard library alone, so that a launcher can use it without starting TensorFlow.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfgpu.errors import InputError, unknown

JOBS = ("chief", "worker", "ps", "evaluator")
EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
# A name or IPv4 address without a scheme, or an IPv6 address in brackets; then the port.
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]@]+):([0-9]{1,5})")
_QUOTED_CHARACTERS = 2000


@dataclass(frozen=True)
class Cluster:
    """The processes of one training job, and this process's place among them.

    Args:
        workers: `host:port` of every process that trains, the chief first. Empty: one process, no network.
        rank: this process's position in `workers`; -1 for a parameter server or an evaluator.
        task_type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`, as in TF_CONFIG.
        task_index: the position within that kind of task.
        parameter_servers: `host:port` of every parameter server.
        evaluators: `host:port` of every evaluator; may be empty although this task is one.
        source: where the facts come from: `"none"` or `"TF_CONFIG"`.
        has_chief: whether TF_CONFIG has a `"chief"` job; then `workers[0]` is it and `worker` 0 has rank 1.

    Raises:
        InputError: the facts contradict each other, or an address is not `host:port`.
    """

    workers: tuple[str, ...] = ()
    rank: int = 0
    task_type: str = "worker"
    task_index: int = 0
    parameter_servers: tuple[str, ...] = ()
    evaluators: tuple[str, ...] = ()
    source: str = "none"
    has_chief: bool = False

    def __post_init__(self):
        _check_addresses(self.workers + self.parameter_servers + self.evaluators)
        if self.task_type not in JOBS:
            raise unknown("task type", self.task_type, JOBS)
        expected = _rank(self.task_type, self.task_index, self.has_chief)
        if self.rank != expected:
            raise InputError(
                f"`rank` must be the task's position in `workers`. Received: rank={self.rank}; "
                f"expected {expected} for {self.task_type} {self.task_index}."
            )
        _check_task(self)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Cluster":
        """Reads the cluster from TF_CONFIG; without it, or with an empty one, this is the only process.

        Args:
            environ: environment variables by name; `None` means this process's.

        Returns:
            The cluster. Equal on every process but for the fields that say who this one is.

        Raises:
            InputError: TF_CONFIG is malformed; the message quotes it and shows a right one.

        Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
        """
        text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
        if not text.strip():
            return cls()
        try:
            return _parse(text)
        except InputError as error:
            quoted = text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."
            raise InputError(
                f"TF_CONFIG is malformed: {error} Received: {quoted!r}. "
                f"Expected a value such as {EXAMPLE}. Mend it, or unset it to train in one process."
            ) from None

    @property
    def size(self) -> int:
        """The number of processes that train, this one included: at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files and logs; exactly one of those that train does."""
        return self.rank == 0

    @property
    def is_multi_worker(self) -> bool:
        """Whether this process trains together with other processes (an evaluator does not)."""
        return len(self.workers) > 1 and self.rank >= 0

    def jobs(self) -> dict[str, list[str]]:
        """Returns the addresses by kind of task, as TF_CONFIG and `tf.train.ClusterSpec` want them."""
        first = int(self.has_chief)
        jobs = {
            "chief": self.workers[:first],
            "worker": self.workers[first:],
            "ps": self.parameter_servers,
            "evaluator": self.evaluators,
        }
        return {name: list(addresses) for name, addresses in jobs.items() if addresses}

    def tf_config(self) -> str:
        """Returns the value of TF_CONFIG that says the same: `os.environ["TF_CONFIG"] = cluster.tf_config()`.

        Example:
            >>> Cluster(workers=("a:1", "b:1"), rank=1, task_index=1).tf_config()
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        """
        jobs = self.jobs()
        if not jobs:
            return "{}"
        return json.dumps({"cluster": jobs, "task": {"type": self.task_type, "index": self.task_index}})


def _parse(text: str) -> Cluster:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON ({str(error).replace(chr(10), ' ')}).") from None
    if not isinstance(config, dict):
        raise InputError("it must be a JSON object with the keys `cluster` and `task`.")
    jobs = _jobs({} if config.get("cluster") is None else config["cluster"])
    if not jobs:
        # Some platforms set TF_CONFIG on a single machine too, with no cluster in it.
        return Cluster()
    if config.get("rpc_layer") not in (None, "", "grpc"):
        raise InputError(f"`rpc_layer` must be 'grpc', got {config['rpc_layer']!r}.")
    task_type, task_index = _task(config.get("task"))
    chief = jobs.get("chief", ())
    return Cluster(
        workers=chief + jobs.get("worker", ()),
        rank=_rank(task_type, task_index, bool(chief)),
        task_type=task_type,
        task_index=task_index,
        parameter_servers=jobs.get("ps", ()),
        evaluators=jobs.get("evaluator", ()),
        source="TF_CONFIG",
        has_chief=bool(chief),
    )


def _jobs(section: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(section, dict):
        raise InputError("`cluster` must be an object of address lists by job.")
    jobs = {}
    for name, addresses in section.items():
        job = _job(name)
        if not isinstance(addresses, list):
            raise InputError(f"`cluster.{name}` must be a list of 'host:port', got {addresses!r}.")
        if job in jobs:
            raise InputError("`cluster` has both a `chief` and a `master`; keep one.")
        jobs[job] = tuple(addresses)
    if len(jobs.get("chief", ())) > 1:
        raise InputError(f"`cluster` must have one chief, got {len(jobs['chief'])}.")
    return {job: addresses for job, addresses in jobs.items() if addresses}


def _task(section: object) -> tuple[str, int]:
    if not isinstance(section, dict):
        raise InputError("`task` must say who this process is, by `type` and `index`.")
    for key in ("type", "index"):
        if key not in section:
            raise InputError(f"`task.{key}` is missing.")
    index = section["index"]
    # Shell templates often leave the index quoted; TensorFlow takes that too.
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise InputError(f"`task.index` must be a whole number from 0, got {index!r}.")
    return _job(section["type"]), index


def _job(name: object) -> str:
    if name == "master":  # The name that older platforms give the chief.
        return "chief"
    if name not in JOBS:
        raise unknown("task type", name, JOBS)
    return name


def _rank(task_type: str, task_index: int, has_chief: bool) -> int:
    if task_type == "worker":
        return task_index + int(has_chief)
    return task_index if task_type == "chief" else -1


def _check_addresses(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if not match:
            raise InputError(f"an address must be 'host:port' without a scheme, got {address!r}.")
        if not 1 <= int(match[2]) <= 65535:
            raise InputError(f"a port must be from 1 to 65535, got {address!r}.")
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated:
        raise InputError(f"every task needs its own address, but {repeated[0]!r} stands there twice.")


def _check_task(cluster: Cluster) -> None:
    jobs = cluster.jobs()
    if not jobs:
        if (cluster.task_type, cluster.task_index, cluster.has_chief) != ("worker", 0, False):
            raise InputError("a cluster without addresses is one process: worker 0.")
        return
    addresses = jobs.get(cluster.task_type, [])
    if cluster.task_type == "evaluator" and not addresses:
        return  # An evaluator talks to nobody, so TensorFlow's own guides leave it out of `cluster`.
    if not addresses:
        raise InputError(f"the task is a {cluster.task_type}, but `cluster` has none.")
    if cluster.task_index >= len(addresses):
        raise InputError(
            f"the task is {cluster.task_type} {cluster.task_index} (counted from 0), "
            f"but `cluster` has {len(addresses)} of them."
        )

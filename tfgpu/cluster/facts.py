"""`Cluster`: the processes of one training job, and this process's place among them."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tfgpu.cluster import kubernetes, slurm, tf_config, values
from tfgpu.cluster.values import JOBS, quoted, rank_of
from tfgpu.errors import InputError, unknown

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
"""The variables in which Open MPI, MVAPICH, and MPICH with its relatives tell the number of processes."""
# A name or IPv4 address without a scheme, or an IPv6 address in brackets; then the port.
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]@]+):([0-9]{1,5})")


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
        source: where the facts come from: `"none"`, `"TF_CONFIG"`, `"Slurm"`, `"Kubernetes"`, `"Ray"` or `"Spark"`.
        has_chief: whether there is a `"chief"` job; then `workers[0]` is it and `worker` 0 has rank 1.
        local_rank: this process's position among the job's processes on its machine, if the source provides it.
        local_size: how many of the job's processes run on its machine, if the source provides it.
        gpus: this process's own GPUs, for CUDA_VISIBLE_DEVICES; None means all visible ones.

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
    local_rank: int = 0
    local_size: int = 1
    gpus: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_addresses(self.workers + self.parameter_servers + self.evaluators)
        if self.task_type not in JOBS:
            raise unknown("task type", self.task_type, JOBS)
        expected = rank_of(self.task_type, self.task_index, self.has_chief)
        if self.rank != expected:
            why = "`rank` must be the task's position in `workers`. Received:"
            raise InputError(f"{why} rank={self.rank}; expected {expected} for {self.task_type} {self.task_index}.")
        _check_task(self)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Cluster":
        """Reads the cluster from TF_CONFIG, Slurm or Kubernetes, in this order; else this is the only process.

        If TF_CONFIG is set, it decides, even if it contains no cluster. Slurm applies inside an `srun` with several
        tasks. Kubernetes applies if the manifest of an indexed Job sets TFGPU_WORKERS, or a Kubeflow TrainJob sets
        PET_NNODES. tfgpu's Spark and Ray launchers set TF_CONFIG.

        Args:
            environ: environment variables by name; `None` means this process's.

        Returns:
            The cluster. It is equal on every process except for the fields that identify this process.

        Raises:
            InputError: a variable is malformed; the message quotes it and shows a valid value.

        Example:
            >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
            >>> step |= {"SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2,1", "TFGPU_PORT": "2222"}
            >>> Cluster.from_environment(step).workers
            ('gpu01:2222', 'gpu01:2223', 'gpu02:2224')

        Source: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
        """
        environ = os.environ if environ is None else environ
        text = environ.get("TF_CONFIG", "")
        try:
            return cls(**_read(environ))
        except InputError as error:
            if not text.strip():
                raise
            raise InputError(
                f"TF_CONFIG is malformed: {error} Its value: {quoted(text)}. "
                f"Expected a value such as {tf_config.EXAMPLE}. Correct it, or unset it to train in one process."
            ) from None

    @property
    def size(self) -> int:
        """The number of processes that train, including this one: at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files and logs; exactly one training process does."""
        return self.rank == 0

    @property
    def is_multi_worker(self) -> bool:
        """Whether this process trains together with other processes (an evaluator does not)."""
        return len(self.workers) > 1 and self.rank >= 0

    def jobs(self) -> dict[str, list[str]]:
        """Returns the addresses by kind of task, as TF_CONFIG and `tf.train.ClusterSpec` want them."""
        first = int(self.has_chief)
        training = {"chief": self.workers[:first], "worker": self.workers[first:]}
        jobs = {**training, "ps": self.parameter_servers, "evaluator": self.evaluators}
        return {name: list(addresses) for name, addresses in jobs.items() if addresses}

    def tf_config(self) -> str:
        """Returns this cluster as a value of TF_CONFIG: `os.environ["TF_CONFIG"] = cluster.tf_config()`.

        Example:
            >>> Cluster(workers=("a:1", "b:1"), rank=1, task_index=1).tf_config()
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        """
        jobs = self.jobs()
        if not jobs:
            return "{}"
        return json.dumps({"cluster": jobs, "task": {"type": self.task_type, "index": self.task_index}})


def _check_addresses(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if not match:
            raise InputError(f"an address must be 'host:port' without a scheme, got {address!r}.")
        if not 1 <= int(match[2]) <= 65535:
            raise InputError(f"a port must be from 1 to 65535, got {address!r}.")
    repeated = sorted(address for address, count in Counter(addresses).items() if count > 1)
    if repeated:
        raise InputError(f"every task needs its own address, but {repeated[0]!r} is listed twice.")


def _check_task(cluster: Cluster) -> None:
    jobs = cluster.jobs()
    if not jobs:
        if (cluster.task_type, cluster.task_index, cluster.has_chief) != ("worker", 0, False):
            raise InputError("a cluster without addresses is one process: worker 0.")
        return
    addresses = jobs.get(cluster.task_type, [])
    if cluster.task_type == "evaluator" and not addresses:
        return  # An evaluator communicates with no other task, so TensorFlow's guides omit it from `cluster`.
    if not addresses:
        raise InputError(f"the task is a {cluster.task_type}, but `cluster` has none.")
    if cluster.task_index >= len(addresses):
        task = f"{cluster.task_type} {cluster.task_index}"
        raise InputError(f"the task is {task} (counted from 0), but `cluster` has only {len(addresses)}.")


def _read(environ: Mapping[str, str]) -> dict:
    """Tries TF_CONFIG, Slurm and Kubernetes in this order; the first that describes a cluster is used.

    A TF_CONFIG without a cluster means one process.

    Returns:
        Keyword arguments of `Cluster`; empty for one process.

    Raises:
        InputError: a variable is malformed, or `mpirun` started the processes.
    """
    if environ.get("TF_CONFIG", "").strip():
        return tf_config.read(environ["TF_CONFIG"])
    found = slurm.read(environ) or kubernetes.read(environ) or {}
    count = len(found["workers"]) + len(found["parameter_servers"]) if found else 1
    size = next((text for name in _MPI_SIZES if (text := values.text(environ, name))), "1")
    # Inside a Slurm job, `mpirun` starts helpers by `srun`, whose step is not the training's.
    if size not in ("1", str(count)):
        raise InputError(
            f"`mpirun` started this process as one of {size}, and does not tell the addresses of the others. Start "
            f"them with `srun` or `tfgpu launch -n {size}` (--hosts for several machines). To train one model in each "
            "process, set TF_CONFIG='{}'."
        )
    return found

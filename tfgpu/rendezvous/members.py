"""The members of a rendezvous: chief, workers and parameter servers.

`note_lost` names the lost one, which TensorFlow's errors hide in a long text or do not mention.
"""

import re
from dataclasses import dataclass

from tfgpu.cluster import Cluster
from tfgpu.errors import silent_task

_TASK = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")
_BROKEN = re.compile(rf"remote target {_TASK.pattern}")  # gRPC's message on a broken connection


@dataclass(frozen=True)
class Member:
    """A process of the cluster: its task, and the address at which TensorFlow will listen."""

    name: str
    address: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def members(cluster: Cluster) -> tuple[list[Member], int]:
    """The processes that start together, and this one's position among them; -1 if it is not one of them."""
    names = ["chief"] * cluster.has_chief + [f"worker {index}" for index in range(len(cluster.workers))]
    found = [Member(name, address) for name, address in zip(names, cluster.workers, strict=False)]
    found += [Member(f"parameter server {index}", each) for index, each in enumerate(cluster.parameter_servers)]
    if cluster.task_type == "ps":
        return found, len(cluster.workers) + cluster.task_index
    return found, cluster.rank if cluster.workers else -1


def note_lost(error: Exception, cluster: Cluster) -> None:
    """Adds the name of the lost process to an error of TensorFlow, if it is about one.

    Args:
        error: the error of a script.
        cluster: the facts of the cluster.
    """
    if not type(error).__module__.startswith("tensorflow."):
        return
    text = str(error)
    silent, broken = silent_task(text), _BROKEN.search(text)
    if silent is None and broken and type(error).__name__ != "UnavailableError" and "grpc_status:14" not in text:
        return  # a living peer has answered with an error
    if silent or (silent is None and broken):
        job, index = (_TASK.fullmatch(silent) if silent else broken).groups()
        rank = int(index) + (job == "worker" and cluster.has_chief)
    elif silent == "":
        job, rank = "worker", 0
    else:
        return
    everyone, me = members(cluster)
    if job in ("chief", "worker") and rank < len(cluster.workers) and rank != me:
        error.add_note(f"{everyone[rank]} no longer answers: it has ended, is stopped, or has lost its network.")

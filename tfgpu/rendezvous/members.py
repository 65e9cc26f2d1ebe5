"""The members of a rendezvous: chief, workers and parameter servers."""

from dataclasses import dataclass

from tfgpu.cluster import Cluster


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
    first = int(cluster.has_chief)
    found = [
        Member(f"worker {rank - first}" if rank >= first else "chief", address)
        for rank, address in enumerate(cluster.workers)
    ]
    found += [Member(f"parameter server {index}", each) for index, each in enumerate(cluster.parameter_servers)]
    if cluster.task_type == "ps":
        return found, len(cluster.workers) + cluster.task_index
    return found, cluster.rank if cluster.workers else -1

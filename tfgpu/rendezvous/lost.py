"""Which peer is gone: TensorFlow's errors name it in the middle of much else, or do not name it at all."""

import re

from tfgpu.cluster import Cluster
from tfgpu.rendezvous.members import members

_TASK = r"/job:(\w+)/replica:0/task:(\d+)"
# What the coordination service says, 10 s after a task's last heartbeat, and what gRPC says of a broken connection.
_SAID = re.compile(rf"stopped sending heartbeats\):\n{_TASK}|remote target {_TASK}")
# The service runs in the first task, so this is how the others learn that this one is gone.
_FIRST = "/tensorflow.CoordinationService/Heartbeat"


def note(error: Exception, cluster: Cluster) -> None:
    """Adds to an error of TensorFlow the name of the process that no longer answers, where it is about one.

    Args:
        error: what a script has failed with.
        cluster: the facts of the cluster.
    """
    if not type(error).__module__.startswith("tensorflow."):
        return
    text = str(error)
    said = _SAID.search(text)
    if said and said[1] is None and type(error).__name__ != "UnavailableError" and "grpc_status:14" not in text:
        return  # a peer that lives has answered with an error
    if said:
        job, index = (part for part in said.groups() if part is not None)
        rank = int(index) + (job == "worker" and cluster.has_chief)
    elif _FIRST in text:
        job, rank = "worker", 0
    else:
        return
    everyone, me = members(cluster)
    if job in ("chief", "worker") and rank < len(cluster.workers) and rank != me:
        error.add_note(f"{everyone[rank]} no longer answers: it has ended, is stopped, or has lost its network.")

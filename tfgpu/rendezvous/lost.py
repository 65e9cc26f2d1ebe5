"""Names the lost peer, which TensorFlow's errors hide in a long text or do not mention."""

import re

from tfgpu.cluster import Cluster
from tfgpu.rendezvous.members import members

_TASK = r"/job:(\w+)/replica:0/task:(\d+)"
# The message of the coordination service 10 s after a task's last heartbeat, and gRPC's on a broken connection.
_SAID = re.compile(rf"stopped sending heartbeats\):\n{_TASK}|remote target {_TASK}")
# The service runs in the first task; the others fail to reach it when that task is gone.
_FIRST = "/tensorflow.CoordinationService/Heartbeat"


def note(error: Exception, cluster: Cluster) -> None:
    """Adds the name of the lost process to an error of TensorFlow, if it is about one.

    Args:
        error: the error of a script.
        cluster: the facts of the cluster.
    """
    if not type(error).__module__.startswith("tensorflow."):
        return
    text = str(error)
    said = _SAID.search(text)
    if said and said[1] is None and type(error).__name__ != "UnavailableError" and "grpc_status:14" not in text:
        return  # a living peer has answered with an error
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

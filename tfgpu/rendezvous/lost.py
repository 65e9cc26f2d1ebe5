"""Names the lost peer, which TensorFlow's errors hide in a long text or do not mention."""

import re

from tfgpu.cluster import Cluster
from tfgpu.errors import silent_task
from tfgpu.rendezvous.members import members

_TASK = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")
_BROKEN = re.compile(rf"remote target {_TASK.pattern}")  # gRPC's message on a broken connection


def note(error: Exception, cluster: Cluster) -> None:
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

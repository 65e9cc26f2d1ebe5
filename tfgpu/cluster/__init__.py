"""The processes of a cluster, and this process's place among them, read once from the environment.

Example:
    >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> cluster = Cluster.from_environment({"TF_CONFIG": text})
    >>> cluster.size, cluster.rank, cluster.is_chief
    (2, 1, False)

`facts.py` holds `Cluster`; each other module reads what one kind of launcher leaves in the environment. All of it needs
the standard library alone, so that a launcher can use it without starting TensorFlow.
"""

from tfgpu.cluster.facts import Cluster

__all__ = ["Cluster"]

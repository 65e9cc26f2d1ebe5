"""The processes of a cluster, and this process's place among them, read once from the environment.

Example:
    >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> cluster = Cluster.from_environment({"TF_CONFIG": text})
    >>> cluster.size, cluster.rank, cluster.is_chief
    (2, 1, False)

`facts.py` holds `Cluster`; each other module reads what one kind of launcher sets in the environment. The package uses
only the standard library, so a launcher can import it without starting TensorFlow.
"""

from tfgpu.cluster.facts import Cluster

__all__ = ["Cluster"]

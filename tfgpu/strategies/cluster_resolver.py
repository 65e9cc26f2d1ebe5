"""A cluster as TensorFlow's strategies take it, and as error messages name it."""

import tensorflow as tf

from tfgpu.cluster import Cluster


def make_resolver(
    cluster: Cluster, jobs: dict[str, list[str]], *, gpus: int = 0
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Makes the cluster resolver that TensorFlow's strategies take.

    Args:
        cluster: the facts of the cluster.
        jobs: the addresses of the tasks that take part, by job.
        gpus: GPUs of this process.
    """
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": gpus},
        rpc_layer="grpc",
    )


def describe_task(cluster: Cluster) -> str:
    """Describes this process and its cluster, for error messages.

    Example:
        >>> describe_task(Cluster(workers=("a:1", "b:1"), rank=1, task_index=1))
        'worker 1 of a cluster of 2 worker'
    """
    if not cluster.jobs():
        return "one process and no cluster"
    sizes = ", ".join(f"{len(addresses)} {job}" for job, addresses in cluster.jobs().items())
    return f"{cluster.task_type} {cluster.task_index} of a cluster of {sizes}"

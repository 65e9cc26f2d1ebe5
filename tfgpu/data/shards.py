"""How the training examples are divided among workers: by data or by file.

By data, each worker reads its rows of every global batch, so the result equals one device's. By file, each worker reads
only its own files, in its own order. Each example is still read once per epoch, but which examples share a batch, and
the size of the last batch, depend on the number of workers.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.data.examples import Examples
from tfgpu.errors import InputError, unknown

CHOICES = ("data", "file", "auto")


@dataclass(frozen=True)
class Share:
    """One worker's part of each training epoch.

    Attributes:
        by: `"data"` or `"file"`.
        indices: int64, the examples, in the source's order.
        first: the position in the epoch of the worker's first example, counted over all workers; it keeps random
            numbers distinct.
        batch: examples in each batch of this dataset. When sharding by file, TensorFlow splits each batch into as many
            steps as there are workers, so the workers' parts of a step add up to a global batch.
        steps: batches in an epoch over all replicas.
        reason: why this sharding was chosen, for the log.
    """

    by: str
    indices: np.ndarray
    first: int
    batch: int
    steps: int
    reason: str


def check(sharding: str) -> None:
    """Raises `InputError` for an unknown choice."""
    if sharding not in CHOICES:
        raise unknown("sharding", sharding, CHOICES)


def share(examples: Examples, indices: np.ndarray, *, sharding: str, global_batch: int, cluster: Cluster) -> Share:
    """Finds a worker's part of the training examples.

    Args:
        examples: the source.
        indices: the training examples.
        sharding: `"data"`; `"file"`; or `"auto"`: by data, since every source is read by place.
        global_batch: examples in a batch over all replicas.
        cluster: the workers, and which of them this is.

    Returns:
        The part. A single worker gets everything, whatever `sharding` says.

    Raises:
        InputError: an unknown choice, or files that cannot be divided among the workers.

    Example:
        >>> examples = Examples("a", np.zeros(6), (2,), ("a",), file_of=np.array([0, 0, 1, 1, 2, 3]))
        >>> workers = [Cluster(("a:1", "b:1"), rank=i, task_index=i) for i in (0, 1)]
        >>> shares = [share(examples, np.arange(6), sharding="file", global_batch=2, cluster=w) for w in workers]
        >>> [share.indices.tolist() for share in shares]
        [[0, 1, 4], [2, 3, 5]]
    """
    check(sharding)
    count, workers = len(indices), max(cluster.size, 1)
    everything = Share("data", indices, 0, global_batch, -(-count // global_batch), "")
    if workers == 1:
        return everything
    if sharding != "file":
        reason = _of_coordinator(cluster) or "each worker reads its rows of every global batch"
        return Share(**{**vars(everything), "reason": reason})
    problem = _problem(examples, cluster)
    if problem is None:
        files, file_of = np.unique(examples.file_of[indices], return_inverse=True)
        owner = plan(np.bincount(file_of), workers)
        counts = np.bincount(owner[file_of], minlength=workers)
        if len(files) < workers or not counts.all():
            problem = f"{len(files)} files are too few for {workers} workers"
    if problem is not None:
        raise InputError(f"{examples.name} cannot be sharded by file: {problem}. Use sharding='data'.")
    elements = -(-int(counts.max()) // global_batch)
    return Share(
        by="file",
        indices=indices[owner[file_of] == cluster.rank],
        first=int(counts[: cluster.rank].sum()),
        batch=-(-int(counts[cluster.rank]) // elements),
        steps=elements * workers,
        reason=f"{len(files)} files, {counts.min()} to {counts.max()} examples per worker",
    )


def own(batches: tf.data.Dataset, part: Share) -> tf.data.Dataset:
    """Turns off TensorFlow's sharding for a dataset that is already sharded by file.

    TensorFlow then splits each of its batches into as many steps as there are workers. The cardinality is hidden,
    because Keras would take it for the number of steps.
    """
    if part.by == "data":
        return batches
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return batches.filter(lambda *_: True).with_options(options)


def plan(counts: np.ndarray, workers: int) -> np.ndarray:
    """Assigns files to workers so that they get about as many examples: the largest first, to the least loaded worker.

    Args:
        counts: examples in each file.
        workers: how many workers.

    Returns:
        int64, the worker of each file; the same on every worker.

    Source: R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: at most 4/3 of the best possible.

    Example:
        >>> plan(np.array([5, 1, 1, 3]), 2).tolist()
        [0, 1, 1, 1]
    """
    owner = np.zeros(len(counts), np.int64)
    loads = [(0, 0, worker) for worker in range(workers)]  # examples, files, worker
    for file in np.argsort(-np.asarray(counts), kind="stable"):
        examples, files, worker = loads[0]
        owner[file] = worker
        heapq.heapreplace(loads, (examples + int(counts[file]), files + 1, worker))
    return owner


def _problem(examples: Examples, cluster: Cluster) -> str | None:
    if examples.file_of is None:
        return "it is not read from files at random, as TFRecord files, image folders and tfds are"
    return _of_coordinator(cluster)


def _of_coordinator(cluster: Cluster) -> str | None:
    if cluster.parameter_servers or cluster.rank < 0:
        return "the coordinator distributes the data to a parameter server's workers"
    return None

"""Who reads what: the training examples of one worker, shared out by data or by file, never both.

By data, every worker makes every global batch and keeps its rows, so the result is the one device's; each worker reads
everything. By file, each worker reads its own files only, in an order of its own. Each example is still read once an
epoch, but which examples meet in a batch depends on the number of workers, as the rounding of the batch does.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.data.examples import Examples
from tfgpu.errors import InputError, unknown

CHOICES = ("data", "file", "auto")
_EVEN = 1.05  # `auto` shares out files where no worker has more than 5% above the mean


@dataclass(frozen=True)
class Share:
    """What one worker trains on in each epoch.

    Attributes:
        by: `"data"` or `"file"`.
        indices: int64, the examples, in the source's order.
        first: the place in the epoch of the first, counted over all workers: it keeps random numbers apart.
        batch: examples in each of this data set's batches. By file TensorFlow cuts one into as many steps as there are
            workers, so that the workers' parts of a step add up to it.
        steps: batches in an epoch over all replicas.
        reason: why it is shared out so, for the log.
    """

    by: str
    indices: np.ndarray
    first: int
    batch: int
    steps: int
    reason: str


def share(examples: Examples, indices: np.ndarray, *, sharding: str, global_batch: int, cluster: Cluster) -> Share:
    """Finds a worker's part of the training examples.

    Args:
        examples: the source.
        indices: the training examples.
        sharding: `"data"`; `"file"`; or `"auto"`: by file where the examples are read from files as they are needed,
            and the files come out even to 5%.
        global_batch: examples in a batch over all replicas.
        cluster: the workers, and which of them this is.

    Returns:
        The part. On one worker it is everything, whatever `sharding` says.

    Raises:
        InputError: an unknown choice, or files that cannot be shared out among the workers.

    Example:
        >>> examples = Examples("a", np.zeros(6), (2,), ("a",), file_of=np.array([0, 0, 1, 1, 2, 3]))
        >>> workers = [Cluster(("a:1", "b:1"), rank=i, task_index=i) for i in (0, 1)]
        >>> shares = [share(examples, np.arange(6), sharding="file", global_batch=2, cluster=w) for w in workers]
        >>> [share.indices.tolist() for share in shares]
        [[0, 1, 4], [2, 3, 5]]
    """
    if sharding not in CHOICES:
        raise unknown("sharding", sharding, CHOICES)
    count, workers = len(indices), max(cluster.size, 1)
    everything = Share("data", indices, 0, global_batch, -(-count // global_batch), "")
    if workers == 1:
        return everything
    problem = "each worker keeps its rows of every global batch" if sharding == "data" else _problem(examples, cluster)
    if problem is None:
        files, file_of = np.unique(examples.file_of[indices], return_inverse=True)
        owner = plan(np.bincount(file_of), workers)
        counts = np.bincount(owner[file_of], minlength=workers)
        uneven = counts.max() * workers / count
        if len(files) < workers or not counts.all():
            problem = f"{len(files)} files are too few for {workers} workers"
        elif sharding == "auto" and uneven > _EVEN:
            problem = f"one worker would have {uneven - 1:.0%} more than the mean"
        elif sharding == "auto" and examples.load is None:
            problem = "all examples are in memory"
    if problem is not None:
        if sharding == "file":
            raise InputError(f"{examples.name} cannot be shared out by file: {problem}. Use sharding='data'.")
        return Share(**{**vars(everything), "reason": problem})
    elements = -(-int(counts.max()) // global_batch)
    return Share(
        by="file",
        indices=indices[owner[file_of] == cluster.rank],
        first=int(counts[: cluster.rank].sum()),
        batch=-(-int(counts[cluster.rank]) // elements),
        steps=elements * workers,
        reason=f"{len(files)} files, {counts.min()} to {counts.max()} examples a worker",
    )


def own(batches: tf.data.Dataset, part: Share) -> tf.data.Dataset:
    """Tells TensorFlow that a data set is this worker's alone, where it is shared out by file.

    TensorFlow then cuts each of its batches into as many steps as there are workers. So the number of batches, which
    Keras would take for that of the steps, is hidden.
    """
    if part.by == "data":
        return batches
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return batches.filter(lambda *_: True).with_options(options)


def plan(counts: np.ndarray, workers: int) -> np.ndarray:
    """Gives files to workers so that they have about as many examples: the largest file to whom has least, and so on.

    Args:
        counts: examples in each file.
        workers: how many workers.

    Returns:
        int64, the worker of each file. The same on every worker.

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
    if cluster.parameter_servers or cluster.rank < 0:
        return "parameter servers' workers are given their data by the coordinator"
    if examples.file_of is None:
        return "it is not read from files by place, as TFRecord files, image folders and tfds are"
    return None

"""Parameter servers: the chief schedules, workers compute, servers hold the variables; nobody waits for the slowest.

One script for all tasks of the cluster, started by `tfgpu launch --ps 1 -n 3 train.py` or with a TF_CONFIG each:

    strategy = tfgpu.strategy("parameter_server")  # workers and servers stay here until the chief is gone
    with strategy.scope():
        model = tfgpu.models.mlp(input_shape=(64,), classes=10)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=10, callbacks=[tfgpu.callbacks.Checkpoint("run/")])

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014;
https://www.tensorflow.org/tutorials/distribute/parameter_server_training
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfgpu import rendezvous, repairs
from tfgpu.callbacks.watcher import watching
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.parameter_server import embeddings, remote_steps, worker_data
from tfgpu.rendezvous import peers

Partitioner = Callable | str | None


def parameter_server(
    *,
    max_staleness: int | None = None,
    partitioner: Partitioner = "auto",
    watch: str | Path | None = None,
    cluster: Cluster | None = None,
) -> tf.distribute.ParameterServerStrategy:
    """Makes the chief's strategy; in a worker or a server it serves instead, and ends the process.

    Args:
        max_staleness: a closure starts when all but this many just before it are done. While one runs, at most twice as
            many others change the weights that it read. A closure is a few steps (`steps_per_execution`, or as many as
            a tenth of a second holds); `tfgpu.Trainer(model, steps_per_call=1)` makes it one. 0 runs one at a time,
            which is exactly one device's training; `None` (the default) lets the fastest worker run as far ahead as
            the data goes.
        partitioner: which embedding tables are cut by rows over the servers: `"auto"`, those of more than 256 KiB, over
            all servers; `None`, none; or one of `tf.distribute.experimental.partitioners`.
        watch: as for `serve`; the chief's own figures are those of `tfgpu.callbacks.Monitor(watch)`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        The strategy, on the chief. `model.fit`, `evaluate`, `predict` and `tfgpu.Trainer` work under it.

    Raises:
        InputError: the cluster lacks a chief, workers or parameter servers, or an option is out of range.
        MachineError: a worker or a server did not answer within `TFGPU_STARTUP_TIMEOUT` seconds (60).
        SystemExit: in a worker or a server: 0 once the chief is gone, 75 after SIGTERM.

    Source: the bound is that of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NeurIPS 2013.
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    jobs = cluster.jobs()
    missing = [job for job in ("chief", "worker", "ps") if job not in jobs]
    if missing:
        raise InputError(
            f"`parameter_server` needs a chief, workers and parameter servers. Found: {who(cluster)}; "
            f"missing: {', '.join(missing)}. Add them to TF_CONFIG, or use `multi_worker` or `mirrored`."
        )
    _check_staleness(max_staleness)
    partitioner = _partitioner(partitioner, len(cluster.parameter_servers))
    if cluster.task_type in ("worker", "ps"):
        serve(cluster, watch=watch)
    if cluster.task_type != "chief":
        raise InputError(
            f"`parameter_server` trains from the chief. Found: {who(cluster)}. "
            "Evaluate its checkpoints with `tfgpu.asynchronous.evaluate_checkpoints`."
        )
    peers.fail_fast()
    rendezvous.join(cluster)
    _wait_for_peers(cluster)  # their servers start now
    repairs.repair_keras()
    strategy = tf.distribute.ParameterServerStrategy(resolver(cluster, {k: jobs[k] for k in ("chief", "worker", "ps")}))
    remote_steps.set_settings(strategy, remote_steps.Settings(max_staleness))
    embeddings.set_partitioner(strategy, partitioner)
    return strategy


def serve(cluster: Cluster | None = None, *, watch: str | Path | None = None) -> None:
    """Runs a worker or a parameter server until its chief is gone, then ends the process with exit code 0.

    `tfgpu.strategy("parameter_server")` calls it in those tasks. SIGTERM ends it with code 75 ("asked to leave"), as
    a worker holds nothing that could be lost; a handler of the script's own stays in force.

    Args:
        cluster: the facts of the cluster; `None` reads them from the environment.
        watch: a folder for what this process takes of its machine, a row a second, as `tfgpu.callbacks.Monitor` writes
            it: `monitor-worker1.csv` for the first worker (the chief is 0), `monitor-ps0.csv` for the first server.

    Raises:
        InputError: this process is neither a worker nor a parameter server beside a chief.
        MachineError: the chief did not answer within `TFGPU_STARTUP_TIMEOUT` seconds (60).
        SystemExit: always, in the end.

    Example:
        cluster = tfgpu.Cluster.from_environment()
        if cluster.task_type in ("worker", "ps"):
            tfgpu.strategies.serve(cluster)
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    if cluster.task_type not in ("worker", "ps") or not cluster.has_chief or not cluster.parameter_servers:
        raise InputError(
            "`serve` is for the workers and parameter servers of a cluster with a chief. "
            f"Found: {who(cluster)}. Set TF_CONFIG's `task`; the chief calls `tfgpu.strategy()`."
        )
    peers.fail_fast()
    rendezvous.join(cluster)
    config = tf.compat.v1.ConfigProto()
    # TensorFlow's guide asks for more threads than workers, which a small machine would not have by itself.
    config.inter_op_parallelism_threads = max(cluster.size + 1, os.cpu_count() or 1)
    with peers.hearing_term(peers.leave), _watching(cluster, watch):
        server = tf.distribute.Server(
            tf.train.ClusterSpec({job: found for job, found in cluster.jobs().items() if job != "evaluator"}),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
            config=config,
        )
        peers.stay_with(cluster.workers[0], f"{cluster.task_type} {cluster.task_index}")
    del server
    sys.exit(0)


def on_workers(make: Callable[[tf.Tensor, int], tf.data.Dataset], *, batches: int) -> tf.data.Dataset:
    """Data for `fit` that the workers read themselves, where the chief's reading would bound the speed.

    Each worker reads its own data over and over; a closure takes the next batches of the worker that runs it, and an
    epoch ends after `batches` of all workers together. So the steps of an epoch are exact, but a fast worker reads more
    of its own data than a slow one, and a closure that runs again after a death takes other batches. A worker that
    comes back begins its data anew. For each example once an epoch, give `fit` a plain data set.

    Args:
        make: from a worker's index (int64 scalar tensor) and the number of workers to its data set of batches, such as
            `lambda index, count: files.shard(count, index)...batch(32)`. Files must lie where workers see them. The
            chief calls it too, for the shapes, with index 0.
        batches: steps of an epoch.

    Returns:
        What to give `fit` as `x`, unchanged. Under other strategies it is the first worker's data, of one.

    Raises:
        InputError: `batches` is no whole number from 1, or `make` returns no data set.

    Example:
        >>> def make(index, count):
        ...     return tf.data.Dataset.range(100).shard(count, index).batch(10)
        >>> len(list(on_workers(make, batches=4)))
        4
    """
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise InputError(f"`batches` must be a whole number from 1. Received: {batches!r}.")
    found = make(tf.constant(0, tf.int64), 1)
    if not isinstance(found, tf.data.Dataset):
        raise InputError(f"`make` must return a tf.data.Dataset. Received: {type(found).__name__}.")
    return worker_data.tag(found.repeat().take(batches), make, batches)


def _watching(cluster: Cluster, folder: str | Path | None) -> contextlib.AbstractContextManager[None]:
    if folder is None:
        return contextlib.nullcontext()
    name = f"ps{cluster.task_index}" if cluster.task_type == "ps" else f"worker{cluster.rank}"
    number = cluster.rank if cluster.rank >= 0 else cluster.size + cluster.task_index
    return watching(Path(folder) / f"monitor-{name}.csv", worker=number, workers=cluster.size)


def resolver(
    cluster: Cluster, jobs: dict[str, list[str]], *, gpus: int = 0
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """The facts of a cluster as TensorFlow's strategies take them."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        num_accelerators={"GPU": gpus},
        rpc_layer="grpc",
    )


def who(cluster: Cluster) -> str:
    """This process and its cluster in words, for errors."""
    if not cluster.jobs():
        return "one process and no cluster"
    sizes = ", ".join(f"{len(addresses)} {job}" for job, addresses in cluster.jobs().items())
    return f"{cluster.task_type} {cluster.task_index} of a cluster of {sizes}"


def _check_staleness(value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InputError(f"`max_staleness` must be a whole number from 0, or None for no bound. Received: {value!r}.")


def _partitioner(value: Partitioner, servers: int) -> Callable | None:
    if value == "auto":
        return tf.distribute.experimental.partitioners.MinSizePartitioner(max_shards=servers) if servers > 1 else None
    if value is not None and not callable(value):
        raise InputError(
            '`partitioner` must be "auto", None or one of tf.distribute.experimental.partitioners. '
            f"Received: {value!r}."
        )
    return value


def _wait_for_peers(cluster: Cluster) -> None:
    """TensorFlow alone waits for a missing process for ever, and does not say for which."""
    until = peers.deadline()
    for job in ("ps", "worker"):
        for index, address in enumerate(cluster.jobs()[job]):
            peers.wait_for(f"{job} {index}", address, until)

"""Parameter servers: the chief schedules, workers compute, servers hold the variables; nobody waits for the slowest.

All tasks of the cluster run one script, started by `tfgpu launch --ps 1 -n 3 train.py` or with a TF_CONFIG each:

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

from tfgpu import environment, rendezvous, repairs
from tfgpu.callbacks.watcher import watching
from tfgpu.cluster import Cluster
from tfgpu.compat.tensorflow import eager_context
from tfgpu.errors import InputError, whole_number
from tfgpu.parameter_server import embeddings, remote_steps
from tfgpu.rendezvous import peers
from tfgpu.strategies.cluster_resolver import describe_task, make_resolver

Partitioner = Callable | str | None
_JOBS = ("chief", "worker", "ps")


def parameter_server(
    *,
    max_staleness: int | None = None,
    partitioner: Partitioner = "auto",
    watch: str | Path | None = None,
    cluster: Cluster | None = None,
) -> tf.distribute.ParameterServerStrategy:
    """Makes the chief's strategy; in a worker or a parameter server, serves and ends the process.

    Args:
        max_staleness: a closure starts once all but the last `max_staleness` closures before it are done. While it
            runs, at most twice as many others change the weights that it has read. A closure is a few steps
            (`steps_per_execution`, or as many as fit into a tenth of a second); with
            `tfgpu.Trainer(model, steps_per_call=1)` it is one. 0 runs one closure at a time, which is exactly one
            device's training; `None` (the default) sets no bound.
        partitioner: which embedding tables are split by rows among the servers: `"auto"`, those of more than 256 KiB,
            among all servers; `None`, none; or one of `tf.distribute.experimental.partitioners`.
        watch: as for `serve`; on the chief, use `tfgpu.callbacks.Monitor(watch)`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        The strategy, on the chief. `model.fit`, `evaluate`, `predict` and `tfgpu.Trainer` work under it.

    Raises:
        InputError: the cluster lacks a chief, workers or parameter servers, or an option is out of range.
        MachineError: a worker or a server did not answer within `TFGPU_STARTUP_TIMEOUT` seconds (60).
        SystemExit: in a worker or a server: 0 once the chief is gone, 75 after SIGTERM.

    Example:
        strategy = tfgpu.strategies.parameter_server()  # in each process of `tfgpu launch --ps 1 -n 3 train.py`

    Source: the bound is that of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NeurIPS 2013.
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    jobs = cluster.jobs()
    missing = [job for job in _JOBS if job not in jobs]
    if missing:
        raise InputError(
            f"`parameter_server` needs a chief, workers and parameter servers. Found: {describe_task(cluster)}; "
            f"missing: {', '.join(missing)}. Add them to TF_CONFIG, or use `multi_worker` or `mirrored`."
        )
    if max_staleness is not None:
        whole_number("max_staleness", max_staleness, minimum=0)
    partitioner = _partitioner(partitioner, len(cluster.parameter_servers))
    if cluster.task_type in ("worker", "ps"):
        serve(cluster, watch=watch)
    if cluster.task_type != "chief":
        raise InputError(
            f"`parameter_server` trains from the chief. Found: {describe_task(cluster)}. "
            "To evaluate its checkpoints, use `tfgpu.asynchronous.evaluate_checkpoints`."
        )
    _join(cluster)
    _wait_for_peers(cluster)  # their servers start now
    repairs.repair_keras()
    strategy = tf.distribute.ParameterServerStrategy(make_resolver(cluster, {job: jobs[job] for job in _JOBS}))
    remote_steps.set_max_staleness(strategy, max_staleness)
    embeddings.set_partitioner(strategy, partitioner)
    return strategy


def serve(cluster: Cluster | None = None, *, watch: str | Path | None = None) -> None:
    """Runs a worker or a parameter server until its chief is gone, then ends the process with exit code 0.

    `tfgpu.strategy("parameter_server")` calls it in those tasks. SIGTERM ends it with exit code 75 (preempted):
    a worker holds no state that could be lost. A SIGTERM handler of the script stays in force.

    Args:
        cluster: the facts of the cluster; `None` reads them from the environment.
        watch: a folder for this process's use of its machine, a row per second, as `tfgpu.callbacks.Monitor` writes it:
            `monitor-worker1.csv` for the first worker (the chief is 0), `monitor-ps0.csv` for the first server.

    Raises:
        InputError: this process is neither a worker nor a parameter server of a cluster with a chief.
        MachineError: the chief did not answer within `TFGPU_STARTUP_TIMEOUT` seconds (60).
        SystemExit: always, at the end.

    Example:
        cluster = tfgpu.Cluster.from_environment()
        if cluster.task_type in ("worker", "ps"):
            tfgpu.strategies.serve(cluster)
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    if cluster.task_type not in ("worker", "ps") or not cluster.has_chief or not cluster.parameter_servers:
        raise InputError(
            "`serve` is for the workers and parameter servers of a cluster with a chief. "
            f"Found: {describe_task(cluster)}. Set TF_CONFIG's `task`; the chief calls `tfgpu.strategy()`."
        )
    _join(cluster)
    with peers.hearing_term(peers.leave), _watching(cluster, watch):
        server = _server(cluster)
        peers.stay_with(cluster.workers[0], f"{cluster.task_type} {cluster.task_index}")
    del server
    sys.exit(0)


def _server(cluster: Cluster) -> tf.distribute.Server:
    config = eager_context.context().config  # which devices are visible, and how they take memory
    # TensorFlow's guide asks for more threads than workers; the default on a small machine is lower.
    config.inter_op_parallelism_threads = max(cluster.size + 1, os.cpu_count() or 1)
    return tf.distribute.Server(
        tf.train.ClusterSpec({job: found for job, found in cluster.jobs().items() if job != "evaluator"}),
        job_name=cluster.task_type,
        task_index=cluster.task_index,
        protocol="grpc",
        config=config,
    )


def _join(cluster: Cluster) -> None:
    """Waits for the other tasks; leaves a machine's GPUs to its workers.

    A server sees no GPU, the others take memory as they need it. `tfgpu launch` gives each task its GPUs; tasks that
    were started otherwise all see all of them. What the script has set itself stays: memory limits, and devices that
    have started.
    """
    if not environment.is_initialized():
        if cluster.task_type == "ps":
            tf.config.set_visible_devices([], "GPU")
        for gpu in tf.config.get_visible_devices("GPU"):
            if not tf.config.get_logical_device_configuration(gpu):
                tf.config.experimental.set_memory_growth(gpu, True)
    peers.fail_fast()
    rendezvous.join(cluster)


def _watching(cluster: Cluster, folder: str | Path | None) -> contextlib.AbstractContextManager[None]:
    if folder is None:
        return contextlib.nullcontext()
    name = f"ps{cluster.task_index}" if cluster.task_type == "ps" else f"worker{cluster.rank}"
    number = cluster.rank if cluster.rank >= 0 else cluster.size + cluster.task_index
    return watching(Path(folder) / f"monitor-{name}.csv", worker=number, workers=cluster.size)


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
    """Names a process that is missing: TensorFlow would wait for it forever, silently."""
    until = peers.deadline()
    for job in ("ps", "worker"):
        for index, address in enumerate(cluster.jobs()[job]):
            peers.wait_for(f"{job} {index}", address, until)

"""Several workers (processes), with a replica on each device of each."""

import tensorflow as tf

from tfgpu import environment, rendezvous, repairs
from tfgpu.cluster import Cluster
from tfgpu.compat.worker_devices import devices_initialized, worker_devices
from tfgpu.consistency import agreement, settings  # noqa: F401 (watches every `fit`)
from tfgpu.core.dealing import sharing
from tfgpu.core.randomness import data_order
from tfgpu.core.row_mixing import choices
from tfgpu.environment import Device
from tfgpu.errors import InputError, MachineError
from tfgpu.repairs import batch_normalization
from tfgpu.strategies import communication
from tfgpu.strategies.cluster_resolver import describe_task, make_resolver
from tfgpu.strategies.devices import Devices, join_names


def multi_worker(
    devices: Devices = None,
    *,
    all_reduce: str = "auto",
    bytes_per_pack: int | None = None,
    reduce_dtype: str | None = None,
    top_k: float | None = None,
    batch_norm: str = "global",
    unproven: str = "gather",
    check_replicas: str | int = "auto",
    on_difference: str = "stop",
    python_data: str = "deal",
    cluster: Cluster | None = None,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Makes the strategy that keeps a copy of the model on every GPU of every worker; waits for all workers.

    The workers meet first (`tfgpu.rendezvous`), so that an error names one that is missing or differs. Call it before
    anything else that starts TensorFlow's devices. All workers must use the same number of devices.

    Args:
        devices: `None` for all GPUs of each worker, or all its logical CPU devices if it has none; a number to use only
            the first ones; or their names.
        all_reduce: `"auto"` (NCCL between physical GPUs, else the ring over gRPC), `"ring"` (which workers that share a
            GPU need), `"nccl"` (GPUs only), or `"hierarchical"`: each worker sums on its first device, and only those
            devices communicate, for workers of several devices on a slow network. All workers must choose the same.
        bytes_per_pack, reduce_dtype, top_k, batch_norm, unproven, check_replicas, on_difference, python_data: as for
            `strategy`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
        InputError: no cluster, a task that does not train, or an option that does not work on the devices.
        MachineError: a worker did not answer, TensorFlow has started its devices, or the process has joined another
            cluster.

    Example:
        strategy = tfgpu.strategies.multi_worker()  # in each process of `tfgpu launch -n 4 train.py`

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MultiWorkerMirroredStrategy
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    if not cluster.workers or cluster.rank < 0:
        raise InputError(
            f"`multi_worker` needs this process to be a worker of a cluster. Found: {describe_task(cluster)}. "
            "Set TF_CONFIG in each worker, or use `mirrored` or `one_device`."
        )
    checks = settings.check(check_replicas, on_difference)
    communication.check(all_reduce, bytes_per_pack, reduce_dtype, top_k)
    chosen = _worker_devices(devices)
    implementation = communication.choose_implementation(all_reduce, chosen)
    if implementation == tf.distribute.experimental.CommunicationImplementation.NCCL:
        communication.check_nccl_dtype(reduce_dtype)
    jobs = {name: addresses for name, addresses in cluster.jobs().items() if name in ("chief", "worker")}
    resolver = make_resolver(cluster, jobs, gpus=sum(device.kind == "GPU" for device in chosen))
    if not devices_initialized():  # Otherwise it has joined this cluster before, or TensorFlow refuses below.
        # `tfgpu run` has met the others at the start. Meet again: TensorFlow would wait an hour for one that is late.
        told = communication.facts(
            chosen,
            implementation,
            all_reduce="hierarchical" if all_reduce == "hierarchical" else None,
            bytes_per_pack=bytes_per_pack,
            reduce_dtype=reduce_dtype,
            top_k=top_k,
            batch_norm=batch_norm,
            unproven=unproven,
            check_replicas=check_replicas,
            on_difference=on_difference,
            python_data=python_data,
        )
        rendezvous.join(cluster, again=True, facts=data_order.facts() | told)
    repairs.repair_keras()
    made = _make(resolver, chosen, tf.distribute.experimental.CommunicationOptions(implementation=implementation))
    communication.set_up(made, all_reduce, bytes_per_pack, reduce_dtype, top_k)
    made = sharing.choose(batch_normalization.choose_moments(made, batch_norm), python_data)
    return settings.choose(choices.choose_unproven(made, unproven), checks)


def _make(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
    chosen: tuple[Device, ...],
    options: tf.distribute.experimental.CommunicationOptions,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    try:
        with worker_devices([device.name for device in chosen]):
            return tf.distribute.MultiWorkerMirroredStrategy(resolver, communication_options=options)
    except (RuntimeError, ValueError) as error:
        # TensorFlow's messages for "the devices have started" and "another cluster is configured".
        if "at program startup" not in str(error) and "already configured" not in str(error):
            raise
        raise MachineError(
            "`multi_worker` must be made before any other TensorFlow operation, for one cluster a process. "
            "Move `tfgpu.strategy(...)` above the first tensor, dataset or model; in a notebook, restart the "
            f"kernel first. ({error})"
        ) from None


def _worker_devices(devices: Devices) -> tuple[Device, ...]:
    if devices is None:
        return environment.accelerators()
    chosen = environment.select(devices)
    if chosen == environment.devices(chosen[0].kind)[: len(chosen)]:
        return chosen
    raise InputError(
        "`multi_worker` uses the first GPUs of each worker, or its first logical CPU devices. Received: "
        f"{join_names(chosen)}. Name them from 0 on, in order; choose other GPUs with "
        "`tfgpu.environment.set_visible_devices`."
    )

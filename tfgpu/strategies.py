"""One factory a strategy. Each returns a plain `tf.distribute.Strategy` and installs the Keras repairs.

Example:
    >>> import tfgpu
    >>> strategy = tfgpu.strategy()         # what the cluster and the devices of this process call for
    >>> with strategy.scope():
    ...     model = tfgpu.models.mlp(input_shape=(8,), classes=2)

Which option applies where:

| | one_device | mirrored | multi_worker | parameter_server |
|---|---|---|---|---|
| `devices` | one | any | the first GPUs, or the first logical CPU devices, of each worker | - |
| `all_reduce="nccl"` | - | physical GPUs | physical GPUs | - |
| `all_reduce="ring"`, `"hierarchical"` | - | - | yes | - |
| `all_reduce="hierarchical_copy"` | - | an even number | - | - |
| `all_reduce="reduction_to_one_device"` | - | yes | - | - |
| `bytes_per_pack` | - | - | yes | - |
| `reduce_dtype`, `top_k` | - | yes | yes | - |
| `max_staleness` | - | - | - | yes |
| `partitioner` | - | - | - | yes |

`averaging` is `mirrored` in one process and `multi_worker` on several, with their `devices`, `all_reduce` and
`bytes_per_pack`; `every`, `after` and `outer` are its own (`tfgpu.optim.averaging_strategy`).

An option that does not apply is an `InputError`, never ignored. `"auto"` and 0 leave it to TensorFlow.
"""

import logging
import numbers
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpu import environment, rendezvous, repairs
from tfgpu.cluster import Cluster
from tfgpu.compat.worker_devices import have_started, worker_devices
from tfgpu.core import collectives, data_order, replication
from tfgpu.environment import Device
from tfgpu.errors import InputError, MachineError, unknown
from tfgpu.optim import gradient_compression
from tfgpu.parallel import device_placement, remote_devices
from tfgpu.parameter_server.strategy import Partitioner, parameter_server, resolver, serve, who
from tfgpu.repairs import collective_keys

KINDS = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server", "averaging")
__all__ = ["describe", "mirrored", "multi_worker", "one_device", "parameter_server", "serve", "strategy"]
REDUCE_DTYPES = ("float16", "bfloat16")
ALL_REDUCE = ("auto", "nccl", "ring", "hierarchical", "hierarchical_copy", "reduction_to_one_device")
Devices = int | str | Iterable[str] | None
Outer = keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer] | None

_log = logging.getLogger(__name__)


def strategy(
    kind: str = "auto",
    devices: Devices = None,
    *,
    all_reduce: str = "auto",
    bytes_per_pack: int = 0,
    reduce_dtype: str | None = None,
    top_k: float | None = None,
    max_staleness: int | None = None,
    partitioner: Partitioner = "auto",
    watch: str | Path | None = None,
    every: int | None = None,
    after: int | None = None,
    outer: Outer = None,
    cluster: Cluster | None = None,
) -> tf.distribute.Strategy:
    """Makes the strategy of a name; `"auto"` chooses by the cluster and the devices.

    `auto` is `parameter_server` where the cluster has parameter servers, `multi_worker` where it has several
    workers, else `mirrored` for several devices and `one_device` for one. An evaluator runs by itself.
    `auto` uses several logical CPU devices only when `devices` asks for them.

    Args:
        kind: `"auto"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"parameter_server"` or `"averaging"`.
        devices: `None`, all GPUs, or the CPU where there is none; a number, the first so many GPUs, or
            logical CPU devices where there is no GPU; or names such as `["GPU:0", "GPU:1"]`.
        all_reduce: how replicas sum their gradients: `"auto"`, `"nccl"`, `"ring"`, `"hierarchical"`,
            `"hierarchical_copy"` or `"reduction_to_one_device"`. The module's table says which applies where.
        bytes_per_pack: bytes of gradients in one collective, for `multi_worker`; 0 puts all into one. Several can start
            while the backward pass still makes the rest.
        reduce_dtype: `"float16"` or `"bfloat16"`: gradients travel in it, half the bytes, for slow networks. Each
            replica's part is rounded before the sum, so the result is no longer that of one device: by about 1e-3
            (float16) or 1e-2 (bfloat16) of a gradient. Float16 is infinite above 65,504: use it with loss scaling.
        top_k: the part of each weight's gradient that a replica sends, above 0 and up to 1, such as 0.01: its largest
            numbers, with their places; the rest waits for the next steps (`docs/averaging.md`). The result is no
            longer that of one device.
        max_staleness, partitioner, watch: as for `tfgpu.parameter_server.strategy.parameter_server`.
        every, after, outer: for `averaging`: see `tfgpu.optim.averaging_strategy.averaging`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        A `tf.distribute.Strategy`. In a worker or a parameter server of `parameter_server` it does not return: the
        process serves until the chief is gone, and ends.

    Raises:
        InputError: an unknown name, more devices than exist, or an option that does not apply.
        MachineError: `multi_worker` after TensorFlow has started its devices.
    """
    if kind not in KINDS:
        raise unknown("strategy", kind, KINDS)
    cluster = Cluster.from_environment() if cluster is None else cluster
    if kind == "auto" or (kind == "parameter_server" and cluster.task_type == "evaluator"):
        kind = _choose(devices, cluster)
    if kind != "parameter_server" and cluster.task_type != "evaluator":
        _refuse(kind, "max_staleness", max_staleness, None, "`parameter_server`")
        _refuse(kind, "partitioner", partitioner, "auto", "`parameter_server`")
        _refuse(kind, "watch", watch, None, "`parameter_server`; elsewhere `tfgpu.callbacks.Monitor` watches")
    if kind == "averaging":
        return _averaging(
            devices,
            {"every": every, "after": after, "outer": outer},
            {"all_reduce": all_reduce, "bytes_per_pack": bytes_per_pack, "cluster": cluster},
            {"reduce_dtype": reduce_dtype, "top_k": top_k},
        )
    for name, value in (("every", every), ("after", after), ("outer", outer)):
        _refuse(kind, name, value, None, "`averaging`")
    if kind == "multi_worker":
        return multi_worker(
            devices,
            all_reduce=all_reduce,
            bytes_per_pack=bytes_per_pack,
            reduce_dtype=reduce_dtype,
            top_k=top_k,
            cluster=cluster,
        )
    _refuse(kind, "bytes_per_pack", bytes_per_pack, 0, "`multi_worker`")
    if kind == "mirrored":
        if cluster.is_multi_worker:
            _log.warning("The cluster has %d workers, but 'mirrored' trains in each by itself.", cluster.size)
        return mirrored(devices, all_reduce=all_reduce, reduce_dtype=reduce_dtype, top_k=top_k)
    _refuse(kind, "reduce_dtype", reduce_dtype, None, "`mirrored` and `multi_worker`")
    _refuse(kind, "top_k", top_k, None, "`mirrored` and `multi_worker`")
    _refuse(kind, "all_reduce", all_reduce, "auto", "`mirrored` and `multi_worker`")
    if kind == "one_device":
        return one_device(devices)
    _refuse(kind, "devices", devices, None, "the other strategies")
    return parameter_server(max_staleness=max_staleness, partitioner=partitioner, watch=watch, cluster=cluster)


def one_device(devices: Devices = None) -> tf.distribute.OneDeviceStrategy:
    """Makes the strategy that keeps variables and computation on one device.

    Args:
        devices: 1, or a name such as `"GPU:1"`; `None` is the first GPU, or the CPU where there is none.

    Raises:
        InputError: the device does not exist, or there are several.
    """
    chosen = environment.accelerators()[:1] if devices is None else environment.select(devices)
    if len(chosen) > 1:
        raise InputError(f"`one_device` takes one device. Received: {_names(chosen)}. Use `mirrored`.")
    repairs.repair_keras()
    return tf.distribute.OneDeviceStrategy(device_placement.full_name(chosen[0].name))


def mirrored(
    devices: Devices = None,
    *,
    all_reduce: str = "auto",
    reduce_dtype: str | None = None,
    top_k: float | None = None,
) -> tf.distribute.MirroredStrategy:
    """Makes the strategy that keeps a copy of the model on every device of this process.

    Args:
        devices: as for `strategy` (and `"1/GPU:0"`), but `None` is all logical CPU devices where there is no GPU.
        all_reduce: `"auto"`, `"nccl"` (physical GPUs only), `"hierarchical_copy"` (an even number of devices;
            made for eight GPUs linked as in a DGX-1) or `"reduction_to_one_device"`.
        reduce_dtype, top_k: as for `strategy`.

    Raises:
        InputError: more devices than exist, or an all-reduce that does not suit them.
    """
    _check_compression(reduce_dtype, top_k)
    chosen = environment.accelerators() if devices is None else environment.select(devices, remote_devices.names())
    operations, names = (
        _cross_device_ops(all_reduce, chosen),
        [device_placement.full_name(device.name) for device in chosen],
    )
    repairs.repair_keras()
    return _compressing(tf.distribute.MirroredStrategy(names, cross_device_ops=operations), reduce_dtype, top_k)


def multi_worker(
    devices: Devices = None,
    *,
    all_reduce: str = "auto",
    bytes_per_pack: int = 0,
    reduce_dtype: str | None = None,
    top_k: float | None = None,
    cluster: Cluster | None = None,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Makes the strategy that keeps a copy of the model on every GPU of every worker; waits for all workers.

    They meet first (`tfgpu.rendezvous`), so that one which is missing or differs is named. Must come before anything
    else that starts TensorFlow's devices. All workers must use equally many devices.

    Args:
        devices: `None`, all GPUs of each worker, or its first CPU device; or the first so many GPUs (logical CPU
            devices where there is no GPU), by number or name.
        all_reduce: `"auto"`, `"ring"`, `"nccl"` (GPUs only), or `"hierarchical"`: each worker adds up on its first
            device, and only those talk to each other, for workers of several devices and a slow network between them.
        bytes_per_pack, reduce_dtype, top_k: as for `strategy`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Raises:
        InputError: no cluster, a task that does not train, or an option that does not suit the devices.
        MachineError: a worker did not answer, TensorFlow has started its devices, or another cluster was joined before.
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    if not cluster.workers or cluster.rank < 0:
        raise InputError(
            f"`multi_worker` needs this process to be a worker of a cluster. Found: {who(cluster)}. "
            "Set TF_CONFIG in each worker, or use `mirrored` or `one_device`."
        )
    _check_compression(reduce_dtype, top_k)
    chosen = _worker_devices(devices)
    gpus = tuple(device for device in chosen if device.kind == "GPU")
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=_bytes(bytes_per_pack), implementation=_implementation(all_reduce, chosen)
    )
    jobs = {name: addresses for name, addresses in cluster.jobs().items() if name in ("chief", "worker")}
    found = resolver(cluster, jobs, gpus=len(gpus))
    if not have_started():  # Else it has joined this cluster before, or TensorFlow says below that it no longer can.
        # Again, where `tfgpu run` has done so at the start: one whose script has not come this far would be waited for
        # inside of TensorFlow, for an hour, and without a sign of life, since TensorFlow keeps Python from running.
        rendezvous.join(cluster, again=True, facts=data_order.facts())
    repairs.repair_keras()
    try:
        with worker_devices([device.name for device in chosen]):
            made = tf.distribute.MultiWorkerMirroredStrategy(found, communication_options=options)
    except (RuntimeError, ValueError) as error:
        # TensorFlow's two sentences for "the devices have started" and "another cluster is configured".
        if "at program startup" not in str(error) and "already configured" not in str(error):
            raise
        raise MachineError(
            "`multi_worker` must be made before any other TensorFlow operation, for one cluster a process. "
            "Move `tfgpu.strategy(...)` above the first tensor, dataset or model; in a notebook, restart the "
            f"kernel first. ({error})"
        ) from None
    if all_reduce == "hierarchical":
        collective_keys.add_within_first(made)
    return _compressing(made, reduce_dtype, top_k)


def describe(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Returns what a strategy is, as plain values for logs, reports and JSON.

    Args:
        strategy: any `tf.distribute.Strategy`, TensorFlow's default one too.

    Returns:
        `kind` (this module's name, `"default"`, or the class's name), `replicas` (that train in step),
        `workers` (processes that train) and `devices` (of this process; of its peers for `parameter_server`).

    Example:
        >>> describe(one_device("CPU:0"))
        {'kind': 'one_device', 'replicas': 1, 'workers': 1, 'devices': ['CPU:0']}
    """
    kind, workers = _kind(strategy), 1
    if kind == "parameter_server":
        # The strategy has no public word for its peers; TensorFlow lists their devices once it is connected.
        names = [device.name for device in tf.config.list_logical_devices() if "/job:chief/" not in device.name]
        workers = len({name.partition("/device:")[0] for name in names if "/job:worker/" in name})
    elif kind == "default":
        names = [environment.accelerators()[0].name]
    else:
        names = [device_placement.short_name(name) for name in strategy.extended.worker_devices]
    if replication.spans_processes(strategy):
        workers = strategy.num_replicas_in_sync // len(names)
    return {"kind": kind, "replicas": strategy.num_replicas_in_sync, "workers": workers, "devices": names}


def _averaging(devices: Devices, own: dict, communication: dict, refused: dict) -> tf.distribute.Strategy:
    from tfgpu.optim import averaging_strategy

    for name, value in refused.items():
        _refuse("averaging", name, value, None, "`mirrored` and `multi_worker`: weights are averaged as they are")
    return averaging_strategy.averaging(devices, **{k: v for k, v in own.items() if v is not None}, **communication)


def _choose(devices: Devices, cluster: Cluster) -> str:
    if cluster.parameter_servers and cluster.task_type != "evaluator":
        return "parameter_server"
    if cluster.is_multi_worker:
        return "multi_worker"
    chosen = environment.devices("GPU") if devices is None else environment.select(devices)
    return "mirrored" if len(chosen) > 1 else "one_device"


def _kind(strategy: tf.distribute.Strategy) -> str:
    classes = {
        "one_device": tf.distribute.OneDeviceStrategy,
        "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
        "mirrored": tf.distribute.MirroredStrategy,
        "parameter_server": tf.distribute.ParameterServerStrategy,
    }
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return "default"
    if replication.local_training_of(strategy) is not None:
        return "averaging"
    return next((name for name, made in classes.items() if isinstance(strategy, made)), type(strategy).__name__)


def _cross_device_ops(all_reduce: str, chosen: tuple[Device, ...]) -> tf.distribute.CrossDeviceOps | None:
    if all_reduce not in ALL_REDUCE:
        raise unknown("all-reduce", all_reduce, ALL_REDUCE)
    if all_reduce in ("ring", "hierarchical"):
        raise InputError(f"all_reduce={all_reduce!r} applies to `multi_worker`. With `mirrored` use 'auto' or 'nccl'.")
    if remote_devices.connection() is not None:
        if all_reduce not in ("auto", "reduction_to_one_device"):
            raise InputError(f"all_reduce={all_reduce!r} does not go with `tfgpu.parallel.connect`. Use 'auto'.")
        return tf.distribute.ReductionToOneDevice()
    if all_reduce == "nccl":
        _need_physical_gpus(chosen)
        return tf.distribute.NcclAllReduce()
    if all_reduce == "hierarchical_copy":
        # TensorFlow pairs the devices off: with 3 of them, 2.21 returns the sum of 2, without an error.
        if len(chosen) % 2:
            raise InputError(
                "all_reduce='hierarchical_copy' needs an even number of devices: TensorFlow leaves an odd "
                f"one out of the sum. Received: {_names(chosen)}. Use 'auto'."
            )
        return tf.distribute.HierarchicalCopyAllReduce()
    return tf.distribute.ReductionToOneDevice() if all_reduce == "reduction_to_one_device" else None


def _implementation(
    all_reduce: str, chosen: tuple[Device, ...]
) -> tf.distribute.experimental.CommunicationImplementation:
    choices = tf.distribute.experimental.CommunicationImplementation
    if all_reduce not in ALL_REDUCE:
        raise unknown("all-reduce", all_reduce, ALL_REDUCE)
    if all_reduce not in ("auto", "ring", "nccl", "hierarchical"):
        raise InputError(
            f"all_reduce={all_reduce!r} applies to `mirrored`. With `multi_worker` use 'auto' or 'hierarchical'."
        )
    if all_reduce == "nccl":
        _need_physical_gpus(chosen)
    return {"ring": choices.RING, "nccl": choices.NCCL}.get(all_reduce, choices.AUTO)


def _check_compression(reduce_dtype: str | None, top_k: float | None) -> None:
    if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
        raise unknown("reduce_dtype", reduce_dtype, REDUCE_DTYPES)
    is_number = isinstance(top_k, numbers.Real) and not isinstance(top_k, bool)
    if top_k is not None and not (is_number and 0 < top_k <= 1):
        raise InputError(f"`top_k` must be a number above 0 and up to 1, such as 0.01. Received: {top_k!r}.")
    if reduce_dtype is not None and top_k is not None:
        raise InputError(f"`top_k` and `reduce_dtype` exclude each other. Received: {top_k}, {reduce_dtype!r}.")
    for name, value in (("reduce_dtype", reduce_dtype), ("top_k", top_k)):
        if value is not None and not repairs.is_enabled():
            raise InputError(f"`{name}` needs the repairs of Keras, which TFGPU_REPAIR=0 leaves out. Unset that.")


def _compressing(
    strategy: tf.distribute.Strategy, reduce_dtype: str | None, top_k: float | None
) -> tf.distribute.Strategy:
    if reduce_dtype is not None:
        collectives.set_reduce_dtype(strategy, reduce_dtype)
    if top_k is not None:
        gradient_compression.send_largest(strategy, float(top_k))
    return strategy


def _need_physical_gpus(chosen: tuple[Device, ...]) -> None:
    if any(device.kind != "GPU" for device in chosen):
        raise InputError(f"all_reduce='nccl' works between GPUs only. Found: {_names(chosen)}. Use 'auto'.")
    if len({device.physical for device in chosen}) < len(chosen):
        raise InputError(
            "all_reduce='nccl' needs one physical GPU for each replica. "
            f"Found logical devices: {_names(chosen)}. Use 'auto'."
        )


def _worker_devices(devices: Devices) -> tuple[Device, ...]:
    if devices is None:
        # One replica where there is no GPU: more logical CPU devices must be asked for, as in `auto`.
        return environment.devices("GPU") or environment.devices("CPU")[:1]
    chosen = environment.select(devices)
    if chosen == environment.devices(chosen[0].kind)[: len(chosen)]:
        return chosen
    raise InputError(
        "`multi_worker` uses the first GPUs of each worker, or its first logical CPU devices. Received: "
        f"{_names(chosen)}. Name them from 0 on, in order; choose other GPUs by "
        "`tfgpu.environment.set_visible_devices`."
    )


def _refuse(kind: str, name: str, value: object, default: object, where: str) -> None:
    if value != default:
        raise InputError(f"`{name}` does not apply to `{kind}`. Received: {value!r}. Leave it out, or use {where}.")


def _bytes(bytes_per_pack: int) -> int:
    if isinstance(bytes_per_pack, bool) or not isinstance(bytes_per_pack, int) or bytes_per_pack < 0:
        raise InputError(f"`bytes_per_pack` must be a whole number of at least 0. Received: {bytes_per_pack!r}.")
    return bytes_per_pack


def _names(chosen: tuple[Device, ...]) -> str:
    return ", ".join(device.name for device in chosen)

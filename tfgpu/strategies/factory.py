"""`tfgpu.strategy`: makes the strategy of a name, or the one that the cluster and the devices call for."""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfgpu import environment
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, unknown
from tfgpu.strategies.averaging import Outer, averaging
from tfgpu.strategies.devices import Devices
from tfgpu.strategies.mirrored import mirrored
from tfgpu.strategies.multi_worker import multi_worker
from tfgpu.strategies.one_device import one_device
from tfgpu.strategies.parameter_server import Partitioner, parameter_server

_FACTORIES: dict[str, Callable[..., tf.distribute.Strategy]] = {
    make.__name__: make for make in (one_device, mirrored, multi_worker, parameter_server, averaging)
}
"""By name. The options that apply to a strategy are its factory's parameters."""
KINDS = ("auto", *_FACTORIES)

_log = logging.getLogger(__name__)


def strategy(
    kind: str = "auto",
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
    max_staleness: int | None = None,
    partitioner: Partitioner = "auto",
    watch: str | Path | None = None,
    every: int | None = None,
    after: int | None = None,
    outer: Outer = None,
    cluster: Cluster | None = None,
) -> tf.distribute.Strategy:
    """Makes a strategy by its name; `"auto"` chooses by the cluster and the devices.

    `auto` is `parameter_server` if the cluster has parameter servers, `multi_worker` if it has several workers, else
    `mirrored` for several devices and `one_device` for one. An evaluator process gets a strategy for its own devices.

    Args:
        kind: `"auto"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"parameter_server"` or `"averaging"`.
        devices: `None` for all GPUs, or all logical CPU devices if there is no GPU; a number to use only the first
            ones; or names such as `["GPU:0", "GPU:1"]`.
        all_reduce: how replicas sum their gradients: `"auto"`, `"nccl"`, `"ring"`, `"hierarchical"`,
            `"hierarchical_copy"` or `"reduction_to_one_device"`. The table in `tfgpu.strategies` says which applies
            where.
        bytes_per_pack: bytes of gradients in one collective; 0 puts all into one. Several packs can start while the
            backward pass still runs. `None`: 32 MiB on GPUs, one pack on CPUs.
        reduce_dtype: `"float16"` or, except between GPUs that use NCCL, `"bfloat16"`, to send gradients in half the
            bytes. Each replica's gradients are rounded before the sum, so the result differs from one device's, by
            about 1e-3 (float16) or 1e-2 (bfloat16) of a gradient. Float16 overflows above 65,504: use loss scaling.
        top_k: the fraction of each gradient that a replica sends, above 0 and up to 1, such as 0.01: the largest
            numbers and their positions. The rest is added to the next step's gradient (`docs/guides/averaging.md`).
            The result differs from one device's.
        batch_norm: `"global"`: BatchNormalization uses the whole batch, as on one device, with two collectives per
            layer. `"replica"`: it uses each replica's rows, as most multi-GPU recipes do, without collectives; the
            result differs from one device's.
        unproven: what to do with your own code if tfgpu cannot try whether it mixes rows of the batch. `"gather"`:
            compute it on all rows, as one device does, and send them. `"refuse"`: raise an error before the first step.
            `"warn"`: compute it on each replica's rows, so the result may differ from one device's.
        check_replicas: how often `fit` compares the weights and optimizer states of all replicas, bit by bit: `"auto"`,
            within 1 % of the training time; after this number of steps; or `"off"`. Except with `"off"`, it also
            compares before `Checkpoint`, `ModelCheckpoint` or `BackupAndRestore` saves. See
            `docs/guides/checkpoints.md`.
        on_difference: what to do if replicas differ: `"stop"` raises an error that names the replica and the variable;
            `"chief"` warns, and all continue from the chief's values.
        python_data: how several workers read a `PyDataset` or a generator. `"deal"`: one worker makes each batch and
            sends the others their rows (`docs/guides/data-workers.md`). `"everywhere"`: every worker makes whole
            batches.
        max_staleness, partitioner, watch: as for `tfgpu.strategies.parameter_server`.
        every, after, outer: as for `tfgpu.strategies.averaging`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        A `tf.distribute.Strategy`. In a worker or a parameter server of `parameter_server` the call does not return:
        the process serves until the chief ends.

    Raises:
        InputError: an unknown name, more devices than exist, or an option that does not apply.
        MachineError: `multi_worker` after TensorFlow has started its devices.

    Example:
        >>> import tfgpu
        >>> strategy = tfgpu.strategy("mirrored", devices=["CPU:0"])
        >>> tfgpu.strategies.describe(strategy)["kind"]
        'mirrored'

    Source: https://www.tensorflow.org/guide/distributed_training
    """
    given = {name: value for name, value in locals().items() if value != _DEFAULTS[name]}
    given.pop("kind", None)
    if kind not in KINDS:
        raise unknown("strategy", kind, KINDS)
    cluster = given["cluster"] = Cluster.from_environment() if cluster is None else cluster
    if cluster.task_type == "evaluator":
        for name in ("max_staleness", "partitioner", "watch"):  # meant for the coordinator, which runs the same script
            given.pop(name, None)
    if kind == "auto" or (kind == "parameter_server" and cluster.task_type == "evaluator"):
        kind = _choose(devices, cluster)
    make = _FACTORIES[kind]
    applicable = inspect.signature(make).parameters
    for name, value in given.items():
        if name not in applicable and name != "cluster":
            others = [f"`{other}`" for other, each in _FACTORIES.items() if name in inspect.signature(each).parameters]
            raise InputError(
                f"`{name}` does not apply to `{kind}`. Received: {value!r}. Remove it, or use {' or '.join(others)}."
            )
    if kind == "mirrored" and cluster.is_multi_worker:
        _log.warning("The cluster has %d workers, but 'mirrored' trains in each by itself.", cluster.size)
    return make(**{name: value for name, value in given.items() if name in applicable})


_DEFAULTS = {name: each.default for name, each in inspect.signature(strategy).parameters.items()}


def _choose(devices: Devices, cluster: Cluster) -> str:
    if cluster.parameter_servers and cluster.task_type != "evaluator":
        return "parameter_server"
    if cluster.is_multi_worker:
        return "multi_worker"
    chosen = environment.accelerators() if devices is None else environment.select(devices)
    return "mirrored" if len(chosen) > 1 else "one_device"

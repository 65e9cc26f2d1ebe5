"""`tfgpu.strategy`: makes the strategy of a name, or the one that the cluster and the devices call for."""

import logging
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfgpu import environment
from tfgpu.cluster import Cluster
from tfgpu.consistency import settings
from tfgpu.errors import InputError, unknown
from tfgpu.strategies.averaging import Outer, averaging
from tfgpu.strategies.devices import Devices
from tfgpu.strategies.mirrored import mirrored
from tfgpu.strategies.multi_worker import multi_worker
from tfgpu.strategies.one_device import one_device
from tfgpu.strategies.parameter_server import Partitioner, parameter_server

_CHECKS = frozenset({"check_replicas", "on_difference"})
_COMMUNICATION = _CHECKS | {"all_reduce", "bytes_per_pack", "reduce_dtype", "top_k", "batch_norm", "unproven"}
_FACTORIES: dict[str, tuple[Callable[..., tf.distribute.Strategy], frozenset[str]]] = {
    "one_device": (one_device, frozenset({"devices", "unproven"})),
    "mirrored": (mirrored, _COMMUNICATION | {"devices"}),
    "multi_worker": (multi_worker, _COMMUNICATION | {"devices", "python_data"}),
    "parameter_server": (parameter_server, frozenset({"max_staleness", "partitioner", "watch"})),
    "averaging": (averaging, frozenset({"devices", "all_reduce", "bytes_per_pack", "every", "after", "outer"})),
}
"""Each strategy's factory and the options that apply to it."""
_OF_CLUSTERS = ("multi_worker", "parameter_server", "averaging")
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
            within 1 % of the training time; after this number of steps; or `"off"`. A `Checkpoint` compares before it
            writes, except with `"off"`. See `docs/guides/checkpoints.md`.
        on_difference: what to do if replicas differ: `"stop"` raises an error that names the replica and the variable;
            `"chief"` warns, and all continue from the chief's values.
        python_data: how several workers read a `PyDataset` or a generator. `"deal"`: one worker makes each batch and
            sends the others their rows (`docs/guides/data.md`). `"everywhere"`: every worker makes whole batches.
        max_staleness, partitioner, watch: as for `tfgpu.strategies.parameter_server`.
        every, after, outer: as for `tfgpu.strategies.averaging`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        A `tf.distribute.Strategy`. In a worker or a parameter server of `parameter_server` the call does not return:
        the process serves until the chief ends.

    Raises:
        InputError: an unknown name, more devices than exist, or an option that does not apply.
        MachineError: `multi_worker` after TensorFlow has started its devices.
    """
    if kind not in KINDS:
        raise unknown("strategy", kind, KINDS)
    cluster = Cluster.from_environment() if cluster is None else cluster
    is_evaluator = cluster.task_type == "evaluator"
    if kind == "auto" or (kind == "parameter_server" and is_evaluator):
        kind = _choose(devices, cluster)
    options = {
        "devices": devices,
        "all_reduce": None if all_reduce == "auto" else all_reduce,
        "bytes_per_pack": bytes_per_pack,
        "reduce_dtype": reduce_dtype,
        "top_k": top_k,
        "every": every,
        "after": after,
        "outer": outer,
    }
    if not is_evaluator:  # it runs the script of the training, and ignores what is meant for the coordinator
        options |= {"max_staleness": max_staleness, "watch": watch}
    given = {name: value for name, value in options.items() if value is not None}
    named = {  # of which None is no default
        "batch_norm": (batch_norm, "global"),
        "unproven": (unproven, "gather"),
        "check_replicas": (check_replicas, settings.DEFAULT),
        "on_difference": (on_difference, "stop"),
        "python_data": (python_data, "deal"),
        "partitioner": ("auto" if is_evaluator else partitioner, "auto"),
    }
    given |= {name: value for name, (value, default) in named.items() if value != default}
    return _make(kind, given, cluster)


def _make(kind: str, given: dict[str, object], cluster: Cluster) -> tf.distribute.Strategy:
    make, applicable = _FACTORIES[kind]
    for name in given:
        if name not in applicable:
            raise InputError(_does_not_apply(kind, name, given[name]))
    if kind == "mirrored" and cluster.is_multi_worker:
        _log.warning("The cluster has %d workers, but 'mirrored' trains in each by itself.", cluster.size)
    return make(**given, **({"cluster": cluster} if kind in _OF_CLUSTERS else {}))


def _choose(devices: Devices, cluster: Cluster) -> str:
    if cluster.parameter_servers and cluster.task_type != "evaluator":
        return "parameter_server"
    if cluster.is_multi_worker:
        return "multi_worker"
    chosen = environment.accelerators() if devices is None else environment.select(devices)
    return "mirrored" if len(chosen) > 1 else "one_device"


def _does_not_apply(kind: str, name: str, value: object) -> str:
    others = " or ".join(f"`{other}`" for other, (_, applicable) in _FACTORIES.items() if name in applicable)
    return f"`{name}` does not apply to `{kind}`. Received: {value!r}. Remove it, or use {others}."

"""What a strategy is, in plain values."""

from typing import Any

import tensorflow as tf

from tfgpu import environment
from tfgpu.core import replication
from tfgpu.parallel import device_placement


def describe(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Returns what a strategy is, as plain values for logs, reports and JSON.

    Args:
        strategy: any `tf.distribute.Strategy`, including TensorFlow's default one.

    Returns:
        `kind` (the name of tfgpu's factory, `"default"`, or the name of the class), `replicas` (that train in
        lockstep), `workers` (processes that train) and `devices` (of this process; for `parameter_server`, of the other
        processes).

    Example:
        >>> from tfgpu.strategies import one_device
        >>> describe(one_device("CPU:0"))
        {'kind': 'one_device', 'replicas': 1, 'workers': 1, 'devices': ['CPU:0']}
    """
    kind, workers = _kind(strategy), 1
    if kind == "parameter_server":
        # The strategy has no public list of the other tasks; TensorFlow lists their devices once it is connected.
        names = [device.name for device in tf.config.list_logical_devices() if "/job:chief/" not in device.name]
        workers = len({name.partition("/device:")[0] for name in names if "/job:worker/" in name})
    elif kind == "default":
        names = [environment.accelerators()[0].name]
    else:
        names = [device_placement.short_name(name) for name in strategy.extended.worker_devices]
    if replication.spans_processes(strategy):
        workers = strategy.num_replicas_in_sync // len(names)
    return {"kind": kind, "replicas": strategy.num_replicas_in_sync, "workers": workers, "devices": names}


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

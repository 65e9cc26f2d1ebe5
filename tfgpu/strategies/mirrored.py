"""Several devices of one process, with a replica on each."""

import tensorflow as tf

from tfgpu import environment
from tfgpu.compat import distribute
from tfgpu.consistency import agreement, settings  # noqa: F401 (watches every `fit`)
from tfgpu.core.row_mixing import choices
from tfgpu.parallel import remote_devices, replicas
from tfgpu.repairs import batch_normalization
from tfgpu.strategies import communication
from tfgpu.strategies.devices import Devices


def mirrored(
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
) -> tf.distribute.MirroredStrategy:
    """Makes the strategy that keeps a copy of the model on every device of this process.

    Args:
        devices: as for `strategy` (and `"1/GPU:0"`).
        all_reduce: `"auto"`, `"nccl"` (physical GPUs only), `"hierarchical_copy"` (an even number of devices;
            designed for eight GPUs linked as in a DGX-1) or `"reduction_to_one_device"`.
        bytes_per_pack, reduce_dtype, top_k, batch_norm, unproven, check_replicas, on_difference: as for
            `strategy`.

    Returns:
        A `tf.distribute.MirroredStrategy`.

    Raises:
        InputError: more devices than exist, or an all-reduce that does not work on them.

    Example:
        strategy = tfgpu.strategies.mirrored()
        with strategy.scope():
            model = tfgpu.models.cnn((8, 8, 1), 10)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/MirroredStrategy
    """
    checks = settings.check(check_replicas, on_difference)
    communication.check(all_reduce, bytes_per_pack, reduce_dtype, top_k)
    chosen = environment.accelerators() if devices is None else environment.select(devices, remote_devices.names())
    operations = communication.choose_cross_device_ops(all_reduce, chosen)
    is_remote = remote_devices.connection() is not None
    has_nccl = operations is None and not is_remote and len(chosen) > 1 and communication.can_use_nccl(chosen)
    if has_nccl:
        communication.check_nccl_dtype(reduce_dtype)
    made = replicas.mirrored(chosen, operations)
    if has_nccl:
        distribute.use_nccl(made)
    communication.set_up(made, all_reduce, bytes_per_pack, reduce_dtype, top_k)
    made = choices.choose_unproven(batch_normalization.choose_moments(made, batch_norm), unproven)
    return settings.choose(made, checks)

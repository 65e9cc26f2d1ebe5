"""Several devices of one process, with a replica on each."""

import tensorflow as tf

from tfgpu import environment
from tfgpu.parallel import remote_devices, replicas
from tfgpu.repairs import batch_normalization
from tfgpu.strategies.communication import check_compression, choose_cross_device_ops, compress
from tfgpu.strategies.devices import Devices


def mirrored(
    devices: Devices = None,
    *,
    all_reduce: str = "auto",
    reduce_dtype: str | None = None,
    top_k: float | None = None,
    batch_norm: str = "global",
) -> tf.distribute.MirroredStrategy:
    """Makes the strategy that keeps a copy of the model on every device of this process.

    Args:
        devices: as for `strategy` (and `"1/GPU:0"`), but `None` is all logical CPU devices if there is no GPU.
        all_reduce: `"auto"`, `"nccl"` (physical GPUs only), `"hierarchical_copy"` (an even number of devices;
            designed for eight GPUs linked as in a DGX-1) or `"reduction_to_one_device"`.
        reduce_dtype, top_k, batch_norm: as for `strategy`.

    Raises:
        InputError: more devices than exist, or an all-reduce that does not work on them.
    """
    check_compression(reduce_dtype, top_k)
    chosen = environment.accelerators() if devices is None else environment.select(devices, remote_devices.names())
    operations = choose_cross_device_ops(all_reduce, chosen)
    made = batch_normalization.choose_moments(replicas.mirrored(chosen, operations), batch_norm)
    return compress(made, reduce_dtype, top_k)

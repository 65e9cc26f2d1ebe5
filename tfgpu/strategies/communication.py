"""How the replicas sum their gradients: which all-reduce, in which dtype, and how much of them."""

import numbers

import tensorflow as tf

from tfgpu import repairs
from tfgpu.compat import distribute
from tfgpu.compat.collectives import TwoLevelAllReduce
from tfgpu.core import collectives, replication, travel
from tfgpu.environment import Device
from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.optim import gradient_compression
from tfgpu.parallel import remote_devices
from tfgpu.strategies.devices import join_names

ALL_REDUCE = ("auto", "nccl", "ring", "hierarchical", "hierarchical_copy", "reduction_to_one_device")
REDUCE_DTYPES = ("float16", "bfloat16")


def choose_cross_device_ops(all_reduce: str, chosen: tuple[Device, ...]) -> tf.distribute.CrossDeviceOps | None:
    """Chooses the all-reduce of `mirrored` by name; None takes TensorFlow's collectives, with NCCL or the ring."""
    if all_reduce not in ALL_REDUCE:
        raise unknown("all-reduce", all_reduce, ALL_REDUCE)
    if all_reduce in ("ring", "hierarchical"):
        raise InputError(f"all_reduce={all_reduce!r} applies to `multi_worker`. With `mirrored` use 'auto' or 'nccl'.")
    if remote_devices.connection() is not None and all_reduce not in ("auto", "reduction_to_one_device"):
        raise InputError(f"all_reduce={all_reduce!r} does not work with `tfgpu.parallel.connect`. Use 'auto'.")
    if all_reduce == "nccl":
        _need_physical_gpus(chosen)
    if all_reduce == "hierarchical_copy":
        # TensorFlow pairs the devices: with 3 of them, 2.21 silently returns the sum of 2.
        if len(chosen) % 2:
            raise InputError(
                "all_reduce='hierarchical_copy' needs an even number of devices: TensorFlow leaves an odd "
                f"one out of the sum. Received: {join_names(chosen)}. Use 'auto'."
            )
        return tf.distribute.HierarchicalCopyAllReduce()
    return tf.distribute.ReductionToOneDevice() if all_reduce == "reduction_to_one_device" else None


def choose_implementation(
    all_reduce: str, chosen: tuple[Device, ...]
) -> tf.distribute.experimental.CommunicationImplementation:
    """Chooses what runs the collectives of `multi_worker`: NCCL wherever it can, unless the ring is asked for."""
    choices = tf.distribute.experimental.CommunicationImplementation
    if all_reduce not in ALL_REDUCE:
        raise unknown("all-reduce", all_reduce, ALL_REDUCE)
    if all_reduce not in ("auto", "ring", "nccl", "hierarchical"):
        raise InputError(
            f"all_reduce={all_reduce!r} applies to `mirrored`. With `multi_worker` use 'auto' or 'hierarchical'."
        )
    if all_reduce == "nccl":
        _need_physical_gpus(chosen)
    return choices.NCCL if all_reduce != "ring" and can_use_nccl(chosen) else choices.RING


def can_use_nccl(chosen: tuple[Device, ...]) -> bool:
    """Whether NCCL can connect these replicas of a process: each is a separate, undivided physical GPU.

    Example:
        >>> can_use_nccl((Device("GPU:0", "GPU", "GPU:0"), Device("GPU:1", "GPU", "GPU:1")))
        True
        >>> can_use_nccl((Device("GPU:0", "GPU", "GPU:0"), Device("GPU:1", "GPU", "GPU:0")))
        False
    """
    are_whole = all(device.kind == "GPU" and " MIG " not in f" {device.description} " for device in chosen)
    return are_whole and len({device.physical for device in chosen}) == len(chosen)


def facts(chosen: tuple[Device, ...], implementation, **options: object) -> dict[str, str]:
    """What all workers must choose identically, or their collectives would wait for each other.

    Args:
        chosen: the devices of this worker.
        implementation: from `choose_implementation`.
        options: the strategy's options; those that are None are left out.
    """
    told = [f"{name}={value}" for name, value in options.items() if value is not None]
    return {"communication": ", ".join([f"{len(chosen)} {chosen[0].kind}", implementation.value, *told])}


def set_up(
    strategy: tf.distribute.Strategy,
    all_reduce: str,
    bytes_per_pack: int | None,
    reduce_dtype: str | None,
    top_k: float | None,
) -> None:
    """Makes the replicas of a new strategy sum in these packs, and compress the gradients that they send.

    With `"hierarchical"` they sum within each process first, where processes have several devices.
    """
    replication.made.add(strategy)
    is_large = replication.spans_processes(strategy) and len(strategy.extended.worker_devices) > 1
    if all_reduce == "hierarchical" and is_large:
        distribute.set_cross_device_ops(strategy, TwoLevelAllReduce(strategy))
    if bytes_per_pack is not None:
        collectives.set_bytes_per_pack(strategy, bytes_per_pack)
    if reduce_dtype is not None:
        travel.set_reduce_dtype(strategy, reduce_dtype)
    if top_k is not None:
        gradient_compression.set_top_k(strategy, float(top_k))


def check(all_reduce: str, bytes_per_pack: int | None, reduce_dtype: str | None, top_k: float | None) -> None:
    """Raises `InputError` for values that are invalid, exclude each other, or need the repairs."""
    if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
        raise unknown("reduce_dtype", reduce_dtype, REDUCE_DTYPES)
    is_number = isinstance(top_k, numbers.Real) and not isinstance(top_k, bool)
    if top_k is not None and not (is_number and 0 < top_k <= 1):
        raise InputError(f"`top_k` must be a number above 0 and up to 1, such as 0.01. Received: {top_k!r}.")
    if reduce_dtype is not None and top_k is not None:
        raise InputError(f"`top_k` and `reduce_dtype` cannot be combined. Received: {top_k}, {reduce_dtype!r}.")
    for name, value in (("reduce_dtype", reduce_dtype), ("top_k", top_k)):
        if value is not None and not repairs.is_enabled():
            raise InputError(f"`{name}` needs the Keras repairs, which TFGPU_REPAIR=0 switches off. Unset it.")
    if bytes_per_pack is None:
        return
    whole_number("bytes_per_pack", bytes_per_pack, minimum=0)
    if all_reduce in ("hierarchical_copy", "reduction_to_one_device"):
        raise InputError(
            f"`bytes_per_pack` does not apply with all_reduce={all_reduce!r}, which makes no packs. Received: "
            f"{bytes_per_pack}. Remove it, or use all_reduce='auto'."
        )


def check_nccl_dtype(reduce_dtype: str | None) -> None:
    """Raises `InputError` for a dtype that replicas cannot send by NCCL."""
    if reduce_dtype == "bfloat16":
        raise InputError(
            "reduce_dtype='bfloat16' saves no bytes between GPUs: TensorFlow's NCCL has no bfloat16. Use "
            "reduce_dtype='float16', with keras.optimizers.LossScaleOptimizer against overflow, or remove it."
        )


def _need_physical_gpus(chosen: tuple[Device, ...]) -> None:
    if any(device.kind != "GPU" for device in chosen):
        raise InputError(f"all_reduce='nccl' works between GPUs only. Found: {join_names(chosen)}. Use 'auto'.")
    if len({device.physical for device in chosen}) < len(chosen):
        raise InputError(
            "all_reduce='nccl' needs one physical GPU for each replica. "
            f"Found logical devices: {join_names(chosen)}. Use 'auto'."
        )

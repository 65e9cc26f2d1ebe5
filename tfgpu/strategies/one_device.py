"""One device: variables and computation stay on it."""

import tensorflow as tf

from tfgpu import environment, repairs
from tfgpu.core.row_mixing import choices
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement
from tfgpu.strategies.devices import Devices, join_names


def one_device(devices: Devices = None, *, unproven: str = "gather") -> tf.distribute.OneDeviceStrategy:
    """Makes the strategy that keeps variables and computation on one device.

    Args:
        devices: 1, or a name such as `"GPU:1"`; `None` is the first GPU, or the CPU if there is none.
        unproven: as for `strategy`; one device computes everything on all rows.

    Returns:
        A `tf.distribute.OneDeviceStrategy`.

    Raises:
        InputError: the device does not exist, or several were given.

    Example:
        >>> one_device("CPU:0").num_replicas_in_sync
        1

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/OneDeviceStrategy
    """
    chosen = environment.accelerators()[:1] if devices is None else environment.select(devices)
    if len(chosen) > 1:
        raise InputError(f"`one_device` takes one device. Received: {join_names(chosen)}. Use `mirrored`.")
    repairs.repair_keras()
    made = tf.distribute.OneDeviceStrategy(device_placement.full_name(chosen[0].name))
    return choices.choose_unproven(made, unproven)

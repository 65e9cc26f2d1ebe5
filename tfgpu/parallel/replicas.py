"""The strategy whose replicas compute on chosen devices of this process and of connected ones."""

from collections.abc import Iterable

import tensorflow as tf

from tfgpu import repairs
from tfgpu.environment import Device
from tfgpu.parallel import device_placement, remote_devices


def mirrored(
    devices: Iterable[Device], cross_device_ops: tf.distribute.CrossDeviceOps | None = None
) -> tf.distribute.MirroredStrategy:
    """Repairs Keras and makes a `MirroredStrategy`.

    Args:
        devices: one per replica.
        cross_device_ops: the all-reduce; None leaves the choice to TensorFlow, except between connected processes,
            where its choice does not work.
    """
    if cross_device_ops is None and remote_devices.connection() is not None:
        cross_device_ops = tf.distribute.ReductionToOneDevice()
    repairs.repair_keras()
    names = [device_placement.full_name(device.name) for device in devices]
    return tf.distribute.MirroredStrategy(names, cross_device_ops=cross_device_ops)

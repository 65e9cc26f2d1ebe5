"""What every TensorFlow peer starts from: the same threads, devices and batches."""

import numpy as np
import tensorflow as tf

from benchmarks.peers.process import Task


def prepare(task: Task) -> None:
    """Sets TensorFlow's threads to this process's cores, and makes its logical devices."""
    cores = len(task.cores)
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, cores))  # one thread can block on a collective
    if task.topology.replicas > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(task.topology.replicas)]
        tf.config.set_logical_device_configuration(cpu, parts)


def stock_strategy(task: Task) -> tf.distribute.Strategy:
    """TensorFlow's own strategy for the topology."""
    if task.topology.strategy == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if task.topology.strategy == "mirrored":
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(task.topology.replicas)])
    return tf.distribute.get_strategy()


def tfgpu_strategy(task: Task) -> tf.distribute.Strategy:
    """tfgpu's strategy for the topology."""
    import tfgpu

    if task.topology.strategy == "workers":
        return tfgpu.strategy("multi_worker")
    if task.topology.strategy == "mirrored":
        return tfgpu.strategy("mirrored", devices=task.topology.replicas)
    return tfgpu.strategy("one_device")


def dataset(inputs: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    """Batches that lie in memory, over and over: what reading costs beyond that is another benchmark's matter."""
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat().prefetch(tf.data.AUTOTUNE)

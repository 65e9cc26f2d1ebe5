"""Makes CPU devices take the path of GPUs through the package.

GPUs get their rows from TensorFlow's distributed iterator, and sum in TensorFlow's collectives; CPUs of one process
shard a batch within the step, and sum in host memory. And where every device is a CPU, `MirroredStrategy` asks for the
ring in place of NCCL; TensorFlow runs a ring between CPUs whatever was asked for.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from tfgpu.core import replication

_OPTIONS = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
)


@contextlib.contextmanager
def gpu_way() -> Iterator[None]:
    """Within the block, strategies of CPU devices work as those of GPUs do. Make, train and use the model inside."""
    is_on_host, make = replication.is_on_host, MirroredExtended._make_collective_ops_with_fallbacks

    def make_for_gpus(self):
        found = make(self)
        self._communication_options = _OPTIONS
        for launcher in getattr(found, "_launchers", ()):
            launcher._options = _OPTIONS
        return found

    replication.is_on_host = lambda strategy: False
    MirroredExtended._make_collective_ops_with_fallbacks = make_for_gpus
    try:
        yield
    finally:
        replication.is_on_host = is_on_host
        MirroredExtended._make_collective_ops_with_fallbacks = make

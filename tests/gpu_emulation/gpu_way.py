"""Makes CPU devices take the path of GPUs through the package.

GPUs sum in TensorFlow's collectives; CPUs of one process sum in host memory. And where every device is a CPU,
`MirroredStrategy` asks for the ring in place of NCCL; TensorFlow runs a ring between CPUs whatever was asked for.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

from tfgpu import environment
from tfgpu.core import replication

_OPTIONS = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
)


@contextlib.contextmanager
def gpu_way(gpus: int = 0) -> Iterator[None]:
    """Within the block, strategies of CPU devices work as those of GPUs do. Make, train and use the model inside.

    Args:
        gpus: so many devices, `CPU:1` and on, are GPUs for `tfgpu.environment`, and so for `tfgpu.strategy`.
    """
    logical = environment._logical

    def with_gpus(kind: str) -> Iterator[environment.Device]:
        if kind == "GPU":
            return (environment.Device(f"CPU:{number + 1}", "GPU", f"GPU:{number}") for number in range(gpus))
        return logical(kind)

    make = MirroredExtended._make_collective_ops_with_fallbacks

    def make_for_gpus(self):
        found = make(self)
        self._communication_options = _OPTIONS
        for launcher in getattr(found, "_launchers", ()):
            launcher._options = _OPTIONS
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(replication, "is_on_host", lambda strategy: False))
        stack.enter_context(_replaced(MirroredExtended, make.__name__, make_for_gpus))
        stack.enter_context(_replaced(environment, "_logical", with_gpus))
        yield


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)

"""TensorFlow's multi-worker strategy on several logical CPU devices of each worker.

TensorFlow gives a worker all its GPUs but only one CPU, and has no public way to change that. With several CPU replicas
per worker, any machine can run what workers with several GPUs would.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tensorflow.python.eager import context

from tfgpu.compat.patch import wrapped

_one_at_a_time = threading.Lock()


def devices_initialized() -> bool:
    """Whether TensorFlow has initialized this process's devices; after that it joins no other cluster."""
    return bool(getattr(context.context(), "_initialized", False))


@contextmanager
def worker_devices(names: Sequence[str]) -> Iterator[None]:
    """Makes a `MultiWorkerMirroredStrategy` that is created inside use these devices in this worker.

    Every worker must use the same number. The strategy keeps its devices; TensorFlow is left unchanged.

    Args:
        names: logical devices of one kind, such as `["CPU:0", "CPU:1"]`. They must exist.

    Raises:
        MachineError: this TensorFlow lacks the function that is wrapped.

    Example:
        with worker_devices(["CPU:0", "CPU:1"]):
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
    """
    kind = names[0].partition(":")[0]

    def local_devices(stock, self, cluster_resolver, worker_device):
        return tuple(f"{worker_device}/device:{name}" for name in names), kind

    instead = "use one CPU device per worker"
    with (
        _one_at_a_time,
        wrapped("CollectiveAllReduceExtended.initialize_local_devices", local_devices, instead=instead),
    ):
        yield

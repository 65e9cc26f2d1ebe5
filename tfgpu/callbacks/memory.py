"""The memory that an epoch used: that of the process on the host, and that of each GPU."""

import resource
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

_PEAK = "_peak_bytes"
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux


class Memory(keras.callbacks.Callback):
    """Adds memory peaks to the logs at the end of each epoch; does nothing in single steps.

    | in the logs | |
    |---|---|
    | `host_peak_bytes` | the largest resident memory of this process since it started, in bytes |
    | `gpu0_peak_bytes`, ... | the most memory that TensorFlow has used on each GPU in this epoch, in bytes |

    A GPU's peak includes validation, but not memory that TensorFlow has reserved and does not use.

    On several workers, each worker has its own peaks in its own logs. Put it before callbacks that keep the logs
    (`MetricsFile`, `Checkpoint`, `EventsFile`). It resets TensorFlow's peak counters at the beginning of an epoch.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(tf.ones((2, 1)), tf.ones((2, 1)), callbacks=[Memory()], verbose=0)
        >>> history.history["host_peak_bytes"][0] > 2**20
        True

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental/get_memory_info
    """

    every_batch = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for device in _gpus():
            tf.config.experimental.reset_memory_stats(device)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(peaks())


def peaks() -> dict[str, int]:
    """The peaks as they are now, in bytes, by their names in the logs.

    Example:
        >>> peaks()["host_peak_bytes"] > 2**20
        True
    """
    found = {f"host{_PEAK}": _host()}
    for number, device in enumerate(_gpus()):
        found[f"gpu{number}{_PEAK}"] = int(tf.config.experimental.get_memory_info(device)["peak"])
    return found


def is_peak(name: str) -> bool:
    """Whether an entry of the logs is a peak of memory.

    Example:
        >>> is_peak("gpu0_peak_bytes")
        True
    """
    return name.endswith(_PEAK)


def _host() -> int:
    """Of this program: Linux's `ru_maxrss` counts what the process was before it, such as a larger parent's fork."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def _gpus() -> list[str]:
    """This process's GPUs, as TensorFlow's memory functions name them."""
    return [f"GPU:{number}" for number in range(len(tf.config.list_logical_devices("GPU")))]

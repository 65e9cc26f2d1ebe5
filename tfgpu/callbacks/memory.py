"""Peak memory of each epoch, on the host and on each GPU."""

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

_PEAK = "_peak_bytes"
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux


class Memory(keras.callbacks.Callback):
    """Adds memory peaks to the logs at the end of each epoch; does no work per step.

    | in the logs | |
    |---|---|
    | `host_peak_bytes` | the largest resident memory of this process since it started, in bytes |
    | `gpu0_peak_bytes`, ... | the most memory that TensorFlow has used on each GPU in this epoch, in bytes |

    A GPU's peak includes validation, but not memory that TensorFlow has reserved and does not use.

    On several workers, each worker logs its own peaks. Put this callback before those that store the logs
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
    """Returns the current peaks in bytes, by their names in the logs.

    Example:
        >>> peaks()["host_peak_bytes"] > 2**20
        True
    """
    found = {f"host{_PEAK}": _host()}
    for number, device in enumerate(_gpus()):
        found[f"gpu{number}{_PEAK}"] = int(tf.config.experimental.get_memory_info(device)["peak"])
    return found


def is_peak(name: str) -> bool:
    """Returns whether an entry of the logs is a memory peak.

    Example:
        >>> is_peak("gpu0_peak_bytes")
        True
    """
    return name.endswith(_PEAK)


def _host() -> int:
    """The peak of this program. Linux's `ru_maxrss` also counts the time before `exec`, such as a larger parent's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def _gpus() -> list[str]:
    """This process's GPUs, as TensorFlow's memory functions name them."""
    return [f"GPU:{number}" for number in range(len(tf.config.list_logical_devices("GPU")))]

"""Which files a step passes through: those of tfgpu on the stack from `model.fit` to the optimizer's `update_step`.

These are the files that a reader who follows a step needs. More files are entered on the way: code that has returned,
and extensions that had nothing to do.

python -m benchmarks.route
"""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Route:
    """The way from `fit` to the weight update.

    Attributes:
        stack: file (below `tfgpu/`) and function of each frame of tfgpu, from `fit` inward.
        entered: the files in which any function was called since `fit` began, in that order.
    """

    stack: tuple[tuple[str, str], ...]
    entered: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files on the stack, in the order in which a reader meets them."""
        return tuple(dict.fromkeys(file for file, _ in self.stack))


def follow(strategy: Any) -> Route:
    """Trains a dense layer for two steps and records the way to the first weight update."""
    import keras
    import numpy as np

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    package, entered, stack = f"{Path(sys.modules['tfgpu'].__file__).parent}/", {}, []
    caller = threading.get_ident()

    def frames(frame: FrameType | None) -> list[tuple[str, str]]:
        found = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(package):
                found.append((frame.f_code.co_filename.removeprefix(package), frame.f_code.co_name))
            frame = frame.f_back
        return found[::-1]

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or stack:
            return
        if frame.f_code.co_filename.startswith(package):
            entered.setdefault(frame.f_code.co_filename.removeprefix(package))
        elif frame.f_code.co_name == "update_step":
            # A replica runs in a thread of its own, and the thread that called `fit` waits for it.
            outer = [] if threading.get_ident() == caller else frames(sys._current_frames()[caller])
            stack.extend(outer + frames(frame))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        model.fit(np.ones((16, 4), "float32"), np.ones((16, 3), "float32"), batch_size=8, verbose=0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Route(tuple(stack), tuple(entered))


def main() -> None:
    import tensorflow as tf

    import tfgpu

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    found = follow(tfgpu.strategy(devices=["CPU:0", "CPU:1"]))
    for file, function in found.stack:
        print(f"{file}: {function}")
    print(f"{len(found.files)} files on the stack, {len(found.entered)} entered")


if __name__ == "__main__":
    main()

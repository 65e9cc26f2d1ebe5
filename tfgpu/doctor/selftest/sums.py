"""Measures all-reduces between the devices of this process."""

import time
from collections.abc import Callable
from dataclasses import asdict

from tfgpu.measure import rates

BYTES = 64 * 2**20
_REPEATS = 5
_SUMS = 5


def _sums(**_) -> dict:
    """All-reduces over all GPUs; without GPUs, over two logical CPU devices, compared with a memory copy."""
    import tensorflow as tf

    from tfgpu import environment

    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) == 1:
        return {"devices": 1}
    if not gpus:
        environment.set_logical_devices(2)
    devices = [device.name for device in environment.accelerators()]
    strategy = tf.distribute.MirroredStrategy(devices)
    runs = {"sum": of_strategy(tf, strategy, BYTES, _SUMS)}
    if not gpus:
        runs["copy"] = _copies(BYTES)
    for run in runs.values():
        run()
    measured = rates.alternate(runs, repeats=_REPEATS)
    facts = {name: asdict(rate) for name, rate in measured.items()}
    return {"devices": len(devices), "kind": "GPU" if gpus else "CPU", "bytes": BYTES, **facts}


def of_strategy(tf: object, strategy: object, size: int, count: int) -> Callable[[], float]:
    """Returns a function that measures a strategy's all-reduce once, in bytes per second over the busiest link.

    Any all-reduce over n devices moves 2 (n - 1) / n of its bytes over each link:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    replicas = strategy.num_replicas_in_sync
    moved = 2 * (replicas - 1) / replicas * size

    @tf.function
    def add_up():
        def one():
            own = tf.ones([size // 4])
            for _ in range(count):
                # Divided, so that the values stay constant.
                own = tf.distribute.get_replica_context().all_reduce("sum", own) / replicas
            return own[0]

        return strategy.reduce("mean", strategy.run(one), axis=None)

    def measure() -> float:
        began = time.perf_counter()
        result = float(add_up())
        seconds = time.perf_counter() - began
        if abs(result - 1) > 1e-6:
            raise ArithmeticError(f"an all-reduce of ones, divided by the number of replicas, returned {result}")
        return moved * count / seconds

    return measure


def _copies(size: int) -> Callable[[], float]:
    import numpy as np

    here, there = np.ones(size, "uint8"), np.empty(size, "uint8")

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(_SUMS):
            np.copyto(there, here)
        return _SUMS * size / (time.perf_counter() - began)

    return measure


QUESTIONS = {"sums": _sums}

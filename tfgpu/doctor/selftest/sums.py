"""How many bytes a second an all-reduce moves, between the devices of this process."""

import time
from collections.abc import Callable
from dataclasses import asdict

from tfgpu.measure import rates

BYTES = 64 * 2**20
_REPEATS = 5
_SUMS = 5


def _sums(**_) -> dict:
    """Sums over all GPUs, or over two logical CPU devices where there is none, beside a plain copy of memory."""
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
    """A function that measures a strategy's sums once, in bytes a second over the busiest link.

    A sum over n devices moves 2 (n - 1) / n of its bytes over each link, however it is made:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    replicas = strategy.num_replicas_in_sync
    moved = 2 * (replicas - 1) / replicas * size

    @tf.function
    def add_up():
        def one():
            own = tf.ones([size // 4])
            for _ in range(count):
                # Halved, so that the sum's numbers stay where they are.
                own = tf.distribute.get_replica_context().all_reduce("sum", own) / replicas
            return own[0]

        return strategy.reduce("mean", strategy.run(one), axis=None)

    def measure() -> float:
        began = time.perf_counter()
        result = float(add_up())
        seconds = time.perf_counter() - began
        if abs(result - 1) > 1e-6:
            raise ArithmeticError(f"an all-reduce of ones, divided by their number, is {result}")
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

"""Measures the rates of matrix products, and of all-reduces between the devices of this process."""

import time
from collections.abc import Callable
from dataclasses import asdict

from tfgpu.measure import rates

_SIZE = {"GPU": 8192, "CPU": 1024}
_PRODUCTS = {"GPU": 20, "CPU": 10}
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


def _multiply(**_) -> dict:
    """Multiplies square matrices on each GPU; on a CPU also with numpy for comparison."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    found = []
    for device in gpus or tf.config.list_logical_devices("CPU")[:1]:
        kind = device.device_type
        types = ("float32", "bfloat16") if kind == "GPU" else ("float32",)
        runs = {name: _products(tf, device.name, name, _SIZE[kind], _PRODUCTS[kind]) for name in types}
        if kind == "CPU":
            runs["numpy"] = _numpy_products(_SIZE[kind], _PRODUCTS[kind])
        for run in runs.values():
            run()  # warm-up
        measured = rates.alternate(runs, repeats=_REPEATS)
        found.append({"device": device.name, "kind": kind, **{name: asdict(each) for name, each in measured.items()}})
    return {"devices": found, "tf32": tf.config.experimental.tensor_float_32_execution_enabled()}


def _products(tf: object, device: str, dtype: str, size: int, count: int) -> Callable[[], float]:
    """Returns a function that measures once, in operations per second."""
    with tf.device(device):
        # Normalized rows keep the products bounded.
        matrix = tf.cast(tf.linalg.l2_normalize(tf.random.normal([size, size]), axis=1), dtype)

        @tf.function
        def multiply(start):
            product = start
            for _ in range(count):
                product = tf.matmul(product, matrix)
            return tf.reduce_sum(product[:1, :1])

    def measure() -> float:
        with tf.device(device):
            began = time.perf_counter()
            multiply(matrix).numpy()  # Waits for all products.
            return 2 * size**3 * count / (time.perf_counter() - began)

    return measure


def _numpy_products(size: int, count: int) -> Callable[[], float]:
    import numpy as np

    matrix = np.random.default_rng(0).normal(size=(size, size)).astype("float32") / size**0.5

    def measure() -> float:
        product, began = matrix, time.perf_counter()
        for _ in range(count):
            product = product @ matrix
        return 2 * size**3 * count / (time.perf_counter() - began)

    return measure


QUESTIONS = {"multiply": _multiply, "sums": _sums}

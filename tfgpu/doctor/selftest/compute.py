"""Measures the rate of matrix products."""

import time
from collections.abc import Callable
from dataclasses import asdict

from tfgpu.measure import rates

_SIZE = {"GPU": 8192, "CPU": 1024}
_PRODUCTS = {"GPU": 20, "CPU": 10}
_REPEATS = 5


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


QUESTIONS = {"multiply": _multiply}

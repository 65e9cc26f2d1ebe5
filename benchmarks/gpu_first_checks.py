"""One check of benchmarks/gpu_first.py in a process of its own; prints a line of JSON.

`python -m benchmarks.gpu_first_checks NAME [--on-cpu]`. With one GPU two replicas are its two halves.
"""

import collections
import functools
import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.measure.profiling import trace

ROWS, SIDE, CLASSES = 32, 16, 10
X = np.random.default_rng(0).normal(size=(4 * ROWS, SIDE, SIDE, 3)).astype("float32")
Y = np.random.default_rng(1).integers(0, CLASSES, 4 * ROWS)


def devices(on_cpu: bool, count: int = 2) -> list[str]:
    """The names of the devices, before TensorFlow starts them."""
    gpus = tf.config.list_physical_devices("GPU")
    if on_cpu:
        tfgpu.environment.set_logical_devices(count)
    elif len(gpus) < count:
        tfgpu.environment.set_logical_devices(count, "GPU", memory_bytes=8 << 30)
    else:
        tfgpu.environment.set_memory_growth()
    return [f"{'CPU' if on_cpu else 'GPU'}:{number}" for number in range(count)]


def network(*, classes: int = CLASSES, **compiled) -> keras.Model:
    """A small network with what replicas must share: BatchNormalization, draws, a mean over rows."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    body = [layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2)]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(classes)]
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), *body, *head])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": loss, "jit_compile": False, **compiled})
    return model


def data(rows: int = ROWS) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows, drop_remainder=True)


def products(on_cpu: bool) -> dict:
    """A product with one term in each sum has no rounding but its own: the bits left say what TF32 takes."""
    (device,) = devices(on_cpu, 1)
    column = np.random.default_rng(0).normal(size=(2, 1)).astype("float32")
    row = np.random.default_rng(1).normal(size=(1, 4096)).astype("float32")
    exact, found = column.astype("float64") * row, {}
    for is_allowed in (True, False):
        tf.config.experimental.enable_tensor_float_32_execution(is_allowed)
        with tf.device(device):
            value = tf.linalg.matmul(column, row).numpy()
        found[f"tensorflow, TF32 {'on' if is_allowed else 'off'}"] = _bits(value, exact)
    if importlib.util.find_spec("torch"):
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True
        place = "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"
        value = (torch.tensor(column, device=place) @ torch.tensor(row, device=place)).cpu().numpy()
        found[f"torch on {place}, TF32 on"] = _bits(value, exact)
    return {"bits": found}


def _bits(value: np.ndarray, exact: np.ndarray) -> float:
    error = np.abs((value - exact) / exact).max()
    return 53.0 if error == 0 else round(-math.log2(error), 1)


def placement(on_cpu: bool) -> dict:
    """Reads TensorFlow's own log of one step."""
    (device,) = devices(on_cpu, 1)
    tf.debugging.set_log_device_placement(True)
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2), os.dup(1)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        with tfgpu.strategy("one_device", devices=device).scope():
            network(metrics=["accuracy"]).fit(data().take(1), verbose=0)
        for stream, old in zip((2, 1), kept, strict=True):
            os.dup2(old, stream)
        log.seek(0)
        text = log.read().decode(errors="replace")
    placed = re.findall(r"\((\w+)\): .*?/device:(\w+):\d+", text)
    kinds = collections.defaultdict(collections.Counter)
    for operation, kind in placed:
        kinds[kind][operation] += 1
    return {"operations": {kind: dict(found.most_common(80)) for kind, found in kinds.items()}, "lines": len(placed)}


def copies(on_cpu: bool) -> dict:
    """Adds up the copies to the host that the profiler sees in 20 steps."""
    (device,) = devices(on_cpu, 1)
    found = {}
    for name, metrics in (("without accuracy", []), ("with accuracy", ["accuracy"]), ("by hand", None)):
        with tfgpu.strategy("one_device", devices=device).scope():
            model = network(metrics=metrics)
        run = _by_hand(model, device) if metrics is None else functools.partial(model.fit, data(), verbose=0)
        run(epochs=1)
        with tempfile.TemporaryDirectory() as folder:
            tf.profiler.experimental.start(folder)
            run(epochs=5)
            tf.profiler.experimental.stop()
            read = trace.read(folder)
        events = [event for lines in read.devices.values() for line in lines for event in line.events]
        sizes = [_copied(event) for event in events if re.search("D2H|DtoH", f"{event.name} {event.stats}")]
        found[name] = {"copies a step": len(sizes) / 20, "bytes a step": sum(sizes) / 20, "largest": max([0, *sizes])}
    return {"to the host": found, "kernels seen": not on_cpu and bool(events)}


def _by_hand(model: keras.Model, device: str) -> Callable:
    """The loop that a user would write for one GPU: an epoch a call, the loss read once an epoch."""

    @tf.function
    def epoch(batches):
        loss = 0.0
        for x, y in batches:
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    model.optimizer.build(model.trainable_variables)
    batches = data().apply(tf.data.experimental.prefetch_to_device(f"/{device}", 2))
    return lambda epochs: [float(epoch(batches)) for _ in range(epochs)]


def _copied(event: trace.Event) -> int:
    size = re.search(r"size:(\d+)", str(event.stats.get("memcpy_details", "")))
    return int(size.group(1)) if size else 0


def attention(on_cpu: bool) -> dict:
    """One causal attention layer with padding, forward and backward: whole and by blocks."""
    from benchmarks import attention as benchmark

    devices(on_cpu, 1)
    lengths = (256, 512) if on_cpu else (1024, 2048, 4096, 8192)
    return _peaks(on_cpu, benchmark.WAYS, lengths, lambda length, way: benchmark.step(length, way, 512, 8))


def vocabulary(on_cpu: bool) -> dict:
    """A tied embedding's logits and their cross-entropy, forward and backward: whole, and by chunks of some MiB."""
    from benchmarks import vocabulary as benchmark

    devices(on_cpu, 1)
    sizes = (1000, 2000) if on_cpu else (32_000, 256_000)
    tokens = 256 if on_cpu else 4096

    def make(size: int, way: str) -> Callable:
        chunk = None if way == "whole" else max(1, min((int(way.split()[0]) << 20) // (4 * size), tokens))
        return benchmark.step(tokens, "whole" if chunk is None else "chunks", 512, size, chunk)

    ways, found = ("whole", *(f"{mib} MiB" for mib in (64, 128, 256, 512, 1024))), {}
    for policy in ("float32", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        found[policy] = _peaks(on_cpu, ways, sizes, make)
    return found


def _peaks(on_cpu: bool, ways: tuple[str, ...], sizes: tuple[int, ...], make: Callable) -> dict:
    """The GPU's peak above what was allocated before a step, and a step's median time, TF32 off."""
    device = f"{'CPU' if on_cpu else 'GPU'}:0"
    tf.config.experimental.enable_tensor_float_32_execution(False)
    found: dict = {"MiB": {}, "milliseconds": {}}
    for way in ways:
        for size in sizes:
            try:
                with tf.device(device):
                    run = make(size, way)
                    tf.nest.flatten(run())[-1].numpy()
                    peak = None if on_cpu else _peak_bytes(run)
                    times = []
                    for _ in range(3 if on_cpu else 15):
                        began = time.perf_counter()
                        tf.nest.flatten(run())[-1].numpy()
                        times.append(time.perf_counter() - began)
                found["MiB"][f"{way} {size}"] = None if on_cpu else round(peak / 2**20, 1)
                found["milliseconds"][f"{way} {size}"] = round(1000 * statistics.median(times), 3)
            except tf.errors.ResourceExhaustedError:
                found["MiB"][f"{way} {size}"] = "out of memory"
    return found


def _peak_bytes(run: Callable) -> int:
    held = tf.config.experimental.get_memory_info("GPU:0")["current"]
    tf.config.experimental.reset_memory_stats("GPU:0")
    tf.nest.flatten(run())[-1].numpy()
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] - held


def one_device(on_cpu: bool) -> dict:
    (device,) = devices(on_cpu, 1)
    tfgpu.precision.use("float32")
    ways = {
        "one_device": lambda: tfgpu.strategy("one_device", devices=device),
        "mirrored": lambda: tfgpu.strategy("mirrored", devices=[device]),
        "mirrored, bfloat16 sums": lambda: tfgpu.strategy("mirrored", devices=[device], reduce_dtype="bfloat16"),
    }
    found = {}
    for name, make in ways.items():
        try:
            with make().scope():
                model = network()
            model.fit(data(), epochs=2, verbose=0)
            began = time.perf_counter()
            model.fit(data(), epochs=10, verbose=0)
            found[name] = round((time.perf_counter() - began) / 40, 6)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return {"seconds a step": found}


def equality(on_cpu: bool) -> dict:
    return _beside_one(
        on_cpu,
        {
            "even": {},
            "uneven": {"rows": 27},
            "accumulation": {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
            "sum of rows": {"loss": keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")},
        },
    )


def collectives(on_cpu: bool) -> dict:
    def momentum():  # Adam would divide by gradients that BatchNormalization makes nothing but rounding
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def shard(stage):
        return lambda model: tfgpu.parallel.shard(model, stage=stage)

    return _beside_one(
        on_cpu,
        {
            "circle": {"loss": keras.losses.Circle()},
            "ZeRO 2": {"optimizer": momentum, "then": shard(2)},
            "ZeRO 3": {"optimizer": momentum, "then": shard(3)},
        },
    )


def _beside_one(on_cpu: bool, cases: dict) -> dict:
    names, found = devices(on_cpu), {}
    tfgpu.precision.use("float32")  # TF32 off
    for name, case in cases.items():
        try:
            alone = _trained(tfgpu.strategy("one_device", devices=names[0]), **{**case, "then": None})
            spread = _trained(tfgpu.strategy("mirrored", devices=names), **case)
            found[name] = max(float(np.abs(a - b).max()) for a, b in zip(alone, spread, strict=True))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return {"difference": found, "devices": names}


def _trained(strategy, *, rows: int = ROWS, optimizer=None, loss=None, then=None) -> list[np.ndarray]:
    with strategy.scope():
        given = {"optimizer": optimizer() if optimizer else None, "loss": loss}
        model = network(**{name: value for name, value in given.items() if value is not None})
        if then:
            then(model)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows)
    model.fit(batches, epochs=2, verbose=0)
    return model.get_weights()


def seeds(on_cpu: bool) -> dict:
    (device,) = devices(on_cpu, 1)
    made = {}
    for place in (device, "CPU:0"):
        with tf.device(place):
            keras.utils.set_random_seed(3)
            weights = [keras.initializers.get(name)((64, 64)) for name in ("glorot_uniform", "he_normal", "orthogonal")]
            mask = keras.random.dropout(tf.ones((64, 64)), 0.3, seed=5)
            made[place, len(made)] = [np.asarray(each) for each in (*weights, mask)]
    one, other = made.values()
    names = ("glorot_uniform", "he_normal", "orthogonal", "dropout")
    return {
        "equal bits": {name: bool(np.array_equal(a, b)) for name, a, b in zip(names, one, other, strict=True)},
        "difference": {name: float(np.abs(a - b).max()) for name, a, b in zip(names, one, other, strict=True)},
    }


def sensors(on_cpu: bool) -> dict:
    (device,) = devices(on_cpu, 1)
    command = [sys.executable, "-m", "tfgpu", "doctor", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    with tfgpu.strategy("one_device", devices=device).scope():
        model = network()
    with tempfile.TemporaryDirectory() as folder:
        monitor = tfgpu.callbacks.Monitor(Path(folder), every_s=0.2)
        model.fit(data().repeat(50), epochs=2, verbose=0, callbacks=[monitor])
        rows = monitor.epochs
    shown = {name: value for name, value in rows[-1].items() if name.startswith(("gpu", "limit", "why", "input_wait"))}
    return {"doctor": json.loads(told), "monitor": shown}


if __name__ == "__main__":
    answer = globals()[sys.argv[1].replace(" ", "_")]("--on-cpu" in sys.argv)
    print(json.dumps(answer), flush=True)
    os._exit(0)

"""Peak memory and time of a step with and without `recompute`, each measurement in a process of its own.

On a CPU the peak is the process's resident memory above what it was before the first step; on a GPU it is what
TensorFlow has used at most.

python benchmarks/recompute.py transformer --repeats 3
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Annotated

import typer

# Builder, input shape, classes, options, global batch: a deep and narrow model each, whose memory is activations.
WORKS = {
    "resnet": ("resnet", (32, 32, 3), 10, {"depth": 18}, 32),
    "transformer": ("transformer", (256,), 64, {"width": 64, "depth": 8, "dropout": 0.1}, 16),
}


def measure(work: str, recompute: bool, jit: bool, steps: int) -> dict[str, float]:
    """Trains in this process; returns MiB at the peak and milliseconds a step after the first."""
    import keras
    import numpy as np
    import psutil
    import tensorflow as tf

    import tfgpu
    from tfgpu.callbacks.memory import peaks

    builder, shape, classes, options, batch = WORKS[work]
    random = np.random.default_rng(0)
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("one_device").scope():
        options = {**options, "recompute": recompute}
        model = tfgpu.models.build(builder, input_shape=shape, classes=classes, options=options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=jit)
    x = random.integers(0, classes, (batch, *shape)) if work == "transformer" else random.random((batch, *shape))
    y = random.integers(0, classes, model.compute_output_shape((batch, *shape))[:-1])
    x, y = x.astype(model.inputs[0].dtype), y.astype("int32")
    data = tf.data.Dataset.from_tensors((x, y))
    before = psutil.Process().memory_info().rss
    model.fit(data, shuffle=False, verbose=0)
    begun, busy = time.perf_counter(), time.process_time()
    model.fit(data.repeat(steps), shuffle=False, verbose=0)
    seconds, busy = time.perf_counter() - begun, time.process_time() - busy
    found = peaks()
    gpu = found.get("gpu0_peak_bytes")
    return {
        "peak_mib": (gpu or found["host_peak_bytes"] - before) / 2**20,
        "step_ms": seconds / steps * 1e3,
        "step_cpu_ms": busy / steps * 1e3,  # of the processor, whatever else the machine does
    }


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "least": round(min(values), 1),
        "most": round(max(values), 1),
    }


def versions() -> dict[str, object]:
    import keras
    import tensorflow as tf

    gpus = [
        tf.config.experimental.get_device_details(g).get("device_name") for g in tf.config.list_physical_devices("GPU")
    ]
    return {
        "device": gpus or f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def main(
    work: Annotated[str, typer.Argument(help="resnet (18 layers, 32x32) or transformer (8 blocks, length 256).")],
    repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind; they take turns.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one that is not.")] = 3,
    jit: Annotated[bool, typer.Option(help="Compile the step with XLA.")] = False,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prints JSON: medians, least and most, and the ratios."""
    if work not in WORKS:
        raise typer.BadParameter(f"{work!r} is not one of {', '.join(WORKS)}")
    if only:
        print(json.dumps(measure(work, only == "recompute", jit, steps)))
        return
    found: dict[str, list[dict[str, float]]] = {"plain": [], "recompute": []}
    for number in range(repeats):
        for name in list(found)[:: 1 if number % 2 else -1]:
            options = [f"--only={name}", f"--steps={steps}", *(["--jit"] if jit else [])]
            command = [sys.executable, __file__, work, *options]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    table = {n: {key: spread([row[key] for row in rows]) for key in rows[0]} for n, rows in found.items()}
    ratios = {k: round(table["recompute"][k]["median"] / table["plain"][k]["median"], 3) for k in table["plain"]}
    builder, shape, classes, options, batch = WORKS[work]
    about = {"model": builder, "input_shape": shape, "options": options, "batch": batch, "jit": jit, "repeats": repeats}
    print(json.dumps({**about, **versions(), **table, "recompute / plain": ratios}, indent=2))


if __name__ == "__main__":
    typer.run(main)

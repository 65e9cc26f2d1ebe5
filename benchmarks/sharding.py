"""A sharded optimizer beside plain `mirrored`: bytes on each device, bytes that a step sends, and relative times.

The ways take turns, so that what else the machine does falls on all of them. Where the devices are one machine's CPUs,
all share its memory and cores: bytes are exact, times only say what the pieces cost there.

python -m benchmarks.sharding --replicas 4 --repeats 5
"""

import statistics
import time
from typing import Annotated

import typer

WAYS = {
    "mirrored": None,
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, offload": {"stage": 2, "offload": True},
    "stage 3": {"stage": 3},
    "stage 3, offload": {"stage": 3, "offload": True},
}


def made(strategy, how: dict | None, width: int, depth: int):
    """An MLP of `depth` square layers, with AdamW."""
    import keras

    import tfgpu

    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(width, "relu") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
        if how is not None:
            model = tfgpu.parallel.shard(model, **how)
        model.compile(keras.optimizers.AdamW(1e-3), "mse")
    return model


def figures(replicas: int, steps: int, repeats: int, width: int, depth: int) -> list[list[str]]:
    """A row for each way: bytes of the first replica's device, of the host, sent in a step, and the time."""
    import numpy as np

    import tfgpu
    from tfgpu.environment import accelerators

    devices = [device.name for device in accelerators()][-replicas:]
    models = {name: made(tfgpu.strategy("mirrored", devices=devices), how, width, depth) for name, how in WAYS.items()}
    x, y = np.ones((64 * steps, width), "float32"), np.ones((64 * steps, 1), "float32")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            began = time.perf_counter()
            model.fit(x, y, 64, shuffle=False, verbose=0)
            if repeat:
                seconds[name].append((time.perf_counter() - began) / steps)
    rows = []
    for name, model in models.items():
        sizes = tfgpu.parallel.memory_by_device(model)
        own, host = sizes[devices[0]], sizes.get("CPU:0", {})
        host = sum(host.values()) if "CPU:0" not in devices else 0
        ratios = [mine / plain for mine, plain in zip(seconds[name], seconds["mirrored"], strict=True)]
        sent = model.train_function.traffic.bytes / model.train_function.done
        mebibytes = [own["weights"], own["optimizer"], own["pieces"], host, sent]
        times = [statistics.median(ratios), min(ratios), max(ratios)]
        rows.append(
            [name, *(f"{value / 2**20:.2f}" for value in mebibytes), "{:.2f} ({:.2f} to {:.2f})".format(*times)]
        )
    return rows


def main(
    replicas: Annotated[int, typer.Option(min=2, help="Devices; without GPUs, logical CPU devices.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="In a repeat.")] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Turns that are timed, after one that is not.")] = 5,
    width: Annotated[int, typer.Option(min=1)] = 512,
    depth: Annotated[int, typer.Option(min=1)] = 6,
) -> None:
    """Prints a table."""
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * (replicas + 1))
    print(
        "| | weights, MiB | slots, MiB | pieces, MiB | on the host, MiB | handed over in a step, MiB | time / plain |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in figures(replicas, steps, repeats, width, depth):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    typer.run(main)

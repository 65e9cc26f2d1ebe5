"""Steps of models over several devices with XLA and without: `jit_compile=True` compiles the calls of their layers.

The two ways take turns, so that what else the machine does falls on both. The time that XLA takes to compile is apart.

python -m benchmarks.compiled --repeats 5
"""

import statistics
import time
from typing import Annotated

import typer

LAYOUTS = {
    "tensor 2": {"tensor": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "ZeRO 3, data 2": {"data": 2, "zero": 3},
}


def made(layout: str, jit: bool, width: int, depth: int):
    """An MLP with normalization, in pairs of layers that tensor parallelism splits, on the mesh of a layout."""
    import keras

    import tfgpu

    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((width,))
    for _ in range(depth):
        x = keras.layers.Dense(width, "gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Dense(width)(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    sizes = dict(LAYOUTS[layout])
    zero = sizes.pop("zero", 0)
    more = {"microbatches": 4} if "pipeline" in sizes else {}
    model = tfgpu.parallel.apply(model, tfgpu.parallel.Mesh(**sizes), zero=zero, **more)
    model.compile(keras.optimizers.AdamW(1e-3), "mse", jit_compile=jit)
    return model


def row(layout: str, steps: int, repeats: int, width: int, depth: int) -> list[str]:
    """The layout, ms a step without XLA and with it, the ratio with its least and most, and the seconds to begin."""
    import numpy as np

    models = {jit: made(layout, jit, width, depth) for jit in (False, True)}
    x, y = np.ones((64 * steps, width), "float32"), np.ones((64 * steps, 1), "float32")
    seconds: dict[bool, list[float]] = {jit: [] for jit in models}
    begin = {}
    for repeat in range(repeats + 1):
        for jit, model in models.items():
            began = time.perf_counter()
            model.fit(x, y, 64, shuffle=False, verbose=0)
            took = time.perf_counter() - began
            if repeat:
                seconds[jit].append(took / steps)
            else:
                begin[jit] = took
    ratios = [mine / plain for mine, plain in zip(seconds[True], seconds[False], strict=True)]
    times = [f"{1e3 * statistics.median(seconds[jit]):.1f}" for jit in (False, True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [layout, *times, spread, f"{begin[False]:.1f}", f"{begin[True]:.1f}"]


def main(
    steps: Annotated[int, typer.Option(min=1, help="In a repeat.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Turns that are timed, after one that is not.")] = 5,
    width: Annotated[int, typer.Option(min=1)] = 256,
    depth: Annotated[int, typer.Option(min=1, help="Pairs of layers.")] = 3,
) -> None:
    """Prints a table."""
    import contextlib
    import io

    import tfgpu

    tfgpu.environment.set_logical_devices(4)
    print("| layout | ms a step | with XLA | with / without (least to most) | first fit, s | with XLA, s |")
    print("|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        with contextlib.redirect_stdout(io.StringIO()):  # the table of what is split
            found = row(layout, steps, repeats, width, depth)
        print("| " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)

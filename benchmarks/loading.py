"""How much memory a process takes to load a file of weights, beside what the model holds already.

Each way runs in a process of its own: `tfgpu.parallel.load_weights`, stock Keras and safetensors. The model is a
stack of square Dense layers of float32, whose variables are in the memory of the host (logical CPU devices), so the
model itself is there before. Run with MALLOC_MMAP_THRESHOLD_=65536: otherwise freed memory stays with the process, and
counts.

    MALLOC_MMAP_THRESHOLD_=65536 python -m benchmarks.loading
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

NAMES = {"safetensors": "model.safetensors", "keras": "model.keras"}
LAYOUTS = ("one device", "ZeRO 3 on 4")


def made(layout: str, width: int, depth: int):
    import keras

    import tfgpu

    is_sharded = layout != "one device"
    devices = [f"CPU:{at}" for at in range(4)] if is_sharded else "CPU:0"
    with tfgpu.strategy("mirrored" if is_sharded else "one_device", devices=devices).scope():
        layers = [keras.layers.Dense(width, name=f"layer_{at}") for at in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *layers], name="stack")
    return tfgpu.parallel.shard(model, 3) if is_sharded else model


def write(path: Path, width: int, depth: int) -> None:
    """Writes the file of a model whose layer n has kernels of the number n."""
    import keras
    import numpy as np
    import safetensors.numpy

    model = made("one device", width, depth)
    for at, layer in enumerate(model.layers):
        layer.kernel.assign(keras.ops.full((width, width), at))
    if path.suffix == ".keras":
        model.save(path)
    else:
        safetensors.numpy.save_file({v.path: np.array(v.numpy()) for v in model.weights}, path)


def measured(path: Path, layout: str, stock: bool, width: int, depth: int) -> dict:
    import psutil
    import safetensors.numpy

    import tfgpu

    tfgpu.environment.set_logical_devices(4)
    model = made(layout, width, depth)
    small = tfgpu.parallel.load_weights(made("one device", 8, 1), _small(path))  # imports do not count
    small.layers[0].kernel.numpy()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    if not stock:
        tfgpu.parallel.load_weights(model, path)
    elif path.suffix == ".keras":
        model.load_weights(path)
    else:
        arrays = safetensors.numpy.load_file(path)
        model.set_weights(
            [arrays[f"stack/{layer.name}/{kind}"] for layer in model.layers for kind in ("kernel", "bias")]
        )
    seconds = time.perf_counter() - began
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    values = [float(kernel[0, 0]) for kernel in model.get_weights()[::2]]
    if values != list(range(depth)):
        raise RuntimeError(f"the model has kernels of {values}")
    sizes = {"model_bytes": 4 * depth * (width * width + width), "largest_bytes": 4 * width * width}
    return sizes | {"load_bytes": peak - before, "seconds": seconds}


def _small(path: Path) -> Path:
    """The same kind of file, of a tiny model."""
    small = path.with_name(f"small-{path.name}")
    write(small, 8, 1)
    return small


def main(
    file: Annotated[str | None, typer.Option(help="safetensors or keras; both by default.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Of a layer.")] = 2048,
    depth: Annotated[int, typer.Option(min=1, help="Layers.")] = 12,
    one: Annotated[str | None, typer.Option(help="A path, a layout and stock or load: run it here.")] = None,
    json_in: Annotated[
        str | None, typer.Option("--json", help="Measure load with ZeRO 3, files in this folder.")
    ] = None,
) -> None:
    """Prints a table, or JSON."""
    if one is not None:
        path, layout, how = one.split(":")
        if how == "write":
            write(Path(path), width, depth)
        else:
            print(json.dumps(measured(Path(path), layout, how == "stock", width, depth)))
        return
    folder = Path(json_in or tempfile.mkdtemp())
    for kind in [file] if file else NAMES:
        path = folder / NAMES[kind]
        _child(path, "", "write", width, depth)
        for layout in LAYOUTS[1:] if json_in else LAYOUTS:
            for how in ("load",) if json_in else ("load", "stock"):
                found = json.loads(_child(path, layout, how, width, depth).splitlines()[-1])
                if json_in:
                    print(json.dumps(found))
                else:
                    mebibytes = [
                        f"{found[name] / 2**20:.0f}" for name in ("model_bytes", "largest_bytes", "load_bytes")
                    ]
                    print(f"| {kind} | {layout} | {how} | {' | '.join(mebibytes)} | {found['seconds']:.2f} |")


def _child(path: Path, layout: str, how: str, width: int, depth: int) -> str:
    command = [sys.executable, "-m", "benchmarks.loading", "--one", f"{path}:{layout}:{how}"]
    command += ["--width", str(width), "--depth", str(depth)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout


if __name__ == "__main__":
    typer.run(main)

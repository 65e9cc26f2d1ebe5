"""Beside Keras on JAX with `keras.distribution`: `python -m benchmarks.beside_jax` (needs KerasHub and JAX).

A small Llama 3 of KerasHub's with the same weights and tokens in a process for each way, on two CPU devices: the
largest difference of a weight from stock Keras on one device, the bytes of weights and optimizer slots on the device
that has the most of them, and the median time of a step with its quartiles. All ways compile: JAX always does, and
TensorFlow here by `jit_compile`.

The first three steps of Adam see each token once, the next three see tokens that repeat. There TensorFlow and JAX
differ: on TensorFlow the gradient of an embedding is one slice for each token of the batch, and Keras's Adam adds the
squares of the slices of a row. On JAX it squares their sum, as for every other weight.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import children

DEVICES = 2
WAYS = {
    "stock Keras, one device": ("tensorflow", "stock"),
    "tfgpu, mirrored": ("tensorflow", "mirrored"),
    "tfgpu, ZeRO 3": ("tensorflow", "zero3"),
    "tfgpu, tensor": ("tensorflow", "tensor"),
    "JAX, `DataParallel`": ("jax", "data"),
    "JAX, `ModelParallel` with KerasHub's map": ("jax", "model"),
}
WORDS, LENGTH, ROWS = 512, 64, 8  # a batch has as many tokens as the vocabulary


def model_of(width: int, depth: int) -> Any:
    """The language model, with weights that are the same on every backend."""
    import keras_hub

    heads = {"num_query_heads": 4, "num_key_value_heads": 2}
    backbone = keras_hub.models.Llama3Backbone(WORDS, depth, hidden_dim=width, intermediate_dim=2 * width, **heads)
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    draw = np.random.default_rng(0)
    for weight in model.weights:
        is_scale = len(weight.shape) == 1
        weight.assign(np.ones(weight.shape) if is_scale else draw.normal(0, 0.05, weight.shape))
    return model


def compiled(model: Any, *, jit: bool) -> Any:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-4), loss, jit_compile=jit)
    return model


def on_tensorflow(way: str, width: int, depth: int) -> Any:
    import tensorflow as tf

    host, devices = tf.config.list_physical_devices("CPU")[0], [f"CPU:{at}" for at in range(DEVICES)]
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    if way == "stock":
        return compiled(model_of(width, depth), jit=True)
    import tfgpu
    from tfgpu.parallel import Mesh, apply

    axes = {"tensor": DEVICES} if way == "tensor" else {"data": DEVICES}
    if way in ("tensor", "zero3"):
        given = {"zero": 3} if way == "zero3" else {}
        return compiled(apply(model_of(width, depth), Mesh(**axes, devices=devices), **given), jit=True)
    with tfgpu.strategy("mirrored", devices=devices).scope():
        return compiled(model_of(width, depth), jit=True)


def on_jax(way: str, width: int, depth: int) -> Any:
    import keras
    import keras_hub

    if way == "data":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    elif way == "model":
        mesh = keras.distribution.DeviceMesh((1, DEVICES), ["batch", "model"], keras.distribution.list_devices())
        layout = keras_hub.models.Llama3Backbone.get_layout_map(mesh)
        spread = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
        keras.distribution.set_distribution(spread)
    return compiled(model_of(width, depth), jit=True)


def held_bytes(model: Any, backend: str, way: str) -> int:
    """The bytes of weights and slots on the device that has the most of them."""
    if backend == "tensorflow" and way != "stock":
        from tfgpu.parallel import memory_by_device

        return max(sum(sizes.values()) for sizes in memory_by_device(model).values())
    found: dict[Any, int] = {}
    for variable in {id(each): each for each in [*model.variables, *model.optimizer.variables]}.values():
        shards = getattr(variable.value, "addressable_shards", None)
        parts = [(shard.device, shard.data.nbytes) for shard in shards] if shards else [(None, variable.numpy().nbytes)]
        for device, size in parts:
            found[device] = found.get(device, 0) + size
    return max(found.values())


def measure(way: str, folder: Path, width: int, depth: int, steps: int) -> dict[str, Any]:
    """Trains; writes the weights, and returns bytes and seconds."""
    backend, how = WAYS[way]
    model = (on_jax if backend == "jax" else on_tensorflow)(how, width, depth)
    draw = np.random.default_rng(1)
    data = {"once": draw.permutation(WORDS), "repeated": draw.integers(0, WORDS, ROWS * LENGTH)}

    def fit(tokens: np.ndarray, epochs: int) -> None:
        tokens = tokens.reshape(ROWS, LENGTH)
        given = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, np.roll(tokens, -1, 1)
        model.fit(*given, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0)

    for name, tokens in data.items():
        fit(tokens, 3)
        np.savez(folder / f"{list(WAYS).index(way)}-{name}.npz", *model.get_weights())
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        fit(data["repeated"], 1)
        seconds.append(time.perf_counter() - began)
    return {"bytes": held_bytes(model, backend, how), "seconds": statistics.quantiles(seconds, n=4)}


def main(
    width: Annotated[int, typer.Option()] = 128,
    depth: Annotated[int, typer.Option()] = 2,
    steps: Annotated[int, typer.Option(help="Steps whose times count.")] = 15,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if child:
        at, folder, *sizes = child.split(",")
        print(json.dumps(measure(list(WAYS)[int(at)], Path(folder), *map(int, sizes))))
        return
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    print("| way | difference, each token once | tokens that repeat | MiB on a device | ms a step |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for at, (way, (backend, _)) in enumerate(WAYS.items()):
            os.environ["KERAS_BACKEND"] = backend
            found: Any = children.answer("benchmarks.beside_jax", at, folder, width, depth, steps)
            cells = [way, *(f"{_apart(Path(folder), at, name):.0e}" for name in ("once", "repeated"))]
            low, middle, high = (1e3 * each for each in found["seconds"])
            cells += [f"{found['bytes'] / 2**20:.2f}", f"{middle:.0f} ({low:.0f} to {high:.0f})"]
            print(f"| {' | '.join(cells)} |", flush=True)


def _apart(folder: Path, at: int, name: str) -> float:
    one, own = (np.load(folder / f"{number}-{name}.npz") for number in (0, at))
    return max(float(np.abs(one[key] - own[key]).max()) for key in one.files)


if __name__ == "__main__":
    typer.run(main)

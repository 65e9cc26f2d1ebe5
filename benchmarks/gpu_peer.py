"""One cell of benchmarks/gpu.py in a process of its own; prints a line of JSON.

The runner starts `python -m benchmarks.gpu_peer JSON` with "cell", the fields of `GpuCell`; "began", when it started
it in seconds since 1970; "seconds" and "repeats", how long to measure at most; and "tiny".
"""

import json
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import keras
import tensorflow as tf

from benchmarks.gpu_cells import GpuCell

_IMAGES = 2048  # JPEG files; 100 different ones
_FIRST_EPOCHS = 2  # that do not count: tracing, compiling, the input finding its pace


class Clock(keras.callbacks.Callback):
    """Times epochs, and ends when there are enough or the time is up."""

    every_batch = False

    def __init__(self, began: float, seconds: float, repeats: int):
        super().__init__()
        self.first_s, self.times, self._left = None, [], _FIRST_EPOCHS
        self._began, self._seconds, self._repeats = began, seconds, repeats

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        if self.add(time.perf_counter() - self._start):
            self.model.stop_training = True

    def add(self, seconds: float) -> bool:
        """Takes in an epoch; whether it was the last."""
        if self.first_s is None:
            self.first_s, self._until = time.time() - self._began, time.monotonic() + self._seconds
        self._left -= 1
        if self._left < 0:
            self.times.append(seconds)
        return bool(self.times) and (len(self.times) >= self._repeats or time.monotonic() > self._until)


def main() -> None:
    given = json.loads(sys.argv[1])
    cell = GpuCell(**given["cell"])
    with tempfile.TemporaryDirectory() as folder:
        found = measure(cell, Path(folder), given)
    print(json.dumps(found), flush=True)
    os._exit(0)


def measure(cell: GpuCell, folder: Path, given: dict) -> dict:
    """Measures; halves the batch where memory runs out.

    Returns:
        "images_per_s", a number an epoch, "batch", "first_epoch_s", "peak_gpu_bytes", and the device's facts.
    """
    tiny, batch = given["tiny"], 4 if given["tiny"] else cell.batch
    device, facts = _device(cell, tiny)
    from tfgpu import precision

    precision.use(cell.precision)
    side, depth = (32, 8) if tiny else (224, 50)
    steps = 2 if tiny else (20 if device.startswith("GPU") else 2)
    while True:
        clock = Clock(given["began"], given["seconds"], given["repeats"])
        try:
            _run(cell, folder, clock, batch, side, depth, steps, device)
            break
        except tf.errors.ResourceExhaustedError:
            batch //= 2
            keras.backend.clear_session()
            if not batch:
                raise
    memory = tf.config.experimental.get_memory_info("GPU:0")["peak"] if device.startswith("GPU") else None
    rates = [steps * batch / seconds for seconds in clock.times]
    found = {"images_per_s": rates, "batch": batch, "steps": steps, "first_epoch_s": clock.first_s}
    return found | {"peak_gpu_bytes": memory, "facts": facts}


def _device(cell: GpuCell, tiny: bool) -> tuple[str, dict]:
    gpus = tf.config.list_physical_devices("GPU")
    versions = {name: metadata.version(name) for name in ("tensorflow", "keras")}
    if cell.device == "cpu" or (tiny and not gpus):
        return "CPU:0", {"device": f"{os.cpu_count()} CPU cores", "versions": versions}
    if not gpus:
        raise SystemExit("TensorFlow sees no GPU. Run with --tiny to try the script, or see `tfgpu doctor`.")
    tf.config.set_visible_devices(gpus[:1], "GPU")
    tf.config.experimental.set_memory_growth(gpus[0], True)
    details, build = tf.config.experimental.get_device_details(gpus[0]), tf.sysconfig.get_build_info()
    versions |= {"CUDA": build.get("cuda_version", "?"), "cuDNN": build.get("cudnn_version", "?")}
    capability = ".".join(map(str, details.get("compute_capability", ())))
    device = f"{details.get('device_name', 'GPU')} (compute capability {capability})"
    return "GPU:0", {"device": device, "versions": versions | {"driver": _driver()}}


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "?"


def _run(cell: GpuCell, folder: Path, clock: Clock, batch: int, side: int, depth: int, steps: int, device: str) -> None:
    data = _jpeg(folder, batch, side) if cell.data == "jpeg" else _synthetic(batch, side)
    if cell.path == "input":
        _drain(data, steps, clock)
    elif cell.path == "hand":
        _by_hand(cell, data, clock, side, depth, steps, device)
    else:
        _by_fit(cell, data, clock, side, depth, steps)


def _synthetic(batch: int, side: int) -> tf.data.Dataset:
    x = tf.cast(tf.random.stateless_uniform([batch, side, side, 3], [0, 1], 0, 255, tf.int32), tf.uint8)
    y = tf.random.stateless_uniform([batch], [1, 2], 0, 1000, tf.int32)
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)


def _jpeg(folder: Path, batch: int, side: int) -> tf.data.Dataset:
    """Files of the model's size through `tfgpu.data.load`; float32 from 0 to 1."""
    from benchmarks import input_jpeg
    from tfgpu import data

    if not any(folder.iterdir()):
        input_jpeg.write(folder, 32 if side < 224 else _IMAGES, side, side)
    return data.load(str(folder), global_batch=batch, cache="none", validation=0, test=0, seed=1).train.repeat()


def _model(data: tf.data.Dataset, side: int, depth: int) -> keras.Model:
    """ResNet-50 version 1.5, as in the published figures; bytes are scaled in the model."""
    from tfgpu import models

    inputs = keras.Input((side, side, 3), dtype=data.element_spec[0].dtype.name)
    x = keras.layers.Rescaling(1 / 255)(inputs) if data.element_spec[0].dtype == tf.uint8 else inputs
    return keras.Model(inputs, models.resnet((side, side, 3), 1000, depth=depth)(x))


def _drain(data: tf.data.Dataset, steps: int, clock: Clock) -> None:
    iterator = iter(data)
    while True:
        start = time.perf_counter()
        for _ in range(steps):
            next(iterator)
        if clock.add(time.perf_counter() - start):
            return


def _by_fit(cell: GpuCell, data: tf.data.Dataset, clock: Clock, side: int, depth: int, steps: int) -> None:
    import tfgpu

    strategy = tf.distribute.get_strategy() if cell.path == "stock" else tfgpu.strategy("one_device")
    with strategy.scope():
        model = _model(data, side, depth)
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=cell.xla,
        )
    model.fit(data, steps_per_epoch=steps, epochs=1_000_000, verbose=0, callbacks=[clock])


def _by_hand(
    cell: GpuCell, data: tf.data.Dataset, clock: Clock, side: int, depth: int, steps: int, device: str
) -> None:
    model = _model(data, side, depth)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if cell.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    losses, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    _ = losses.variables, accuracy.variables

    @tf.function(jit_compile=cell.xla)
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.update_state(loss)
        accuracy.update_state(y, logits)

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            step(*iterator.get_next())

    if device.startswith("GPU"):
        data = data.apply(tf.data.experimental.prefetch_to_device(f"/{device}", 2))
    iterator, steps = iter(data), tf.constant(steps)
    while True:
        start = time.perf_counter()
        loop(iterator, steps)
        _ = float(losses.result()), float(accuracy.result())
        if clock.add(time.perf_counter() - start):
            return


if __name__ == "__main__":
    main()

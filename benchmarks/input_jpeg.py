"""Real JPEGs through `tfgpu.data.load` against hand-written tf.data code for the same work.

The pictures are synthesized (waves, edges and noise, so that they compress as photographs do) and encoded by
TensorFlow. Both sides shuffle the whole epoch, read, decode, (resize,) batch and scale to [0, 1]; they take turns.

python benchmarks/input_jpeg.py --images 2000 --repeats 7
"""

import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import tensorflow as tf
import typer

import tfgpu
from tfgpu.measure.rates import Rate

SIDE = 224


def picture(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Draws waves of several sizes, some edges, and a little noise: about 60 KB a JPEG at 500 by 375."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    image = np.full([height, width, 3], 128, np.float32)
    for _ in range(8):
        across, down = random.uniform(0.004, 0.2, 2)
        wave = np.sin(x * across + y * down + random.uniform(0, 6))
        image += wave[..., None] * random.uniform(4, 30, 3)
    for _ in range(6):
        center, radius = random.uniform(0, [height, width]), random.uniform(10, 80)
        inside = (y - center[0]) ** 2 + (x - center[1]) ** 2 < radius**2
        image[inside] += random.uniform(-60, 60, 3)
    image += random.normal(0, 4, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def write(folder: Path, images: int, height: int, width: int) -> int:
    """Writes the pictures by class; returns their bytes."""
    random, total = np.random.default_rng(0), 0
    different = [tf.io.encode_jpeg(picture(random, height, width), quality=90).numpy() for _ in range(min(images, 100))]
    for i in range(images):
        path = folder / "ab"[i % 2] / f"{i:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(different[i % len(different)])
        total += path.stat().st_size
    return total


def ours(folder: Path, batch: int, resized: bool) -> tf.data.Dataset:
    size = SIDE if resized else None
    return tfgpu.data.load(
        str(folder), global_batch=batch, image_size=size, cache="none", validation=0, test=0, seed=1
    ).train


def by_hand(folder: Path, batch: int, resized: bool) -> tf.data.Dataset:
    """The quickest tf.data code that was found for this work; the resizing gives the same pixels."""
    paths = sorted(str(path) for path in folder.rglob("*.jpg"))
    labels = [0 if Path(path).parent.name == "a" else 1 for path in paths]

    def load(path, label):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        if resized:
            image = tf.image.resize(image, [SIDE, SIDE], antialias=True)
        return tf.ensure_shape(image, [SIDE, SIDE, 3]), label

    def scale(x, y):
        return tf.cast(x, tf.float32) / 255.0, y

    files = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths), seed=1)
    loaded = files.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(batch)
    return loaded.map(scale, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def read(dataset: tf.data.Dataset, images: int) -> tuple[float, float]:
    """Reads an epoch; returns images a second and microseconds of processor time an image."""
    begun, busy = time.perf_counter(), time.process_time()
    for _ in dataset:
        pass
    return images / (time.perf_counter() - begun), (time.process_time() - busy) / images * 1e6


def compare(images: int, batch: int, repeats: int, height: int, width: int, resized: bool) -> dict:
    """Measures both sides in turn on one folder."""
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder), images, height, width)
        sides = {"tfgpu": ours(Path(folder), batch, resized), "by_hand": by_hand(Path(folder), batch, resized)}
        found: dict[str, list] = {name: [] for name in sides}
        for number in range(repeats + 1):  # The first does not count: tf.data finds its numbers.
            for name in list(sides)[:: 1 if number % 2 else -1]:
                found[name].append(read(sides[name], images))
    rates = {name: Rate(tuple(rate for rate, _ in each[1:])) for name, each in found.items()}
    busy = {name: Rate(tuple(cpu for _, cpu in each[1:])) for name, each in found.items()}
    return {
        "work": f"{height}x{width} JPEG" + (f", resized to {SIDE}" if resized else ""),
        "bytes_per_image": size // images,
        "images_per_s": {name: rate.facts() for name, rate in rates.items()},
        "cpu_us_per_image": {name: rate.facts() for name, rate in busy.items()},
        "speed_ratio": round(rates["tfgpu"].median / rates["by_hand"].median, 3),
        "cpu_ratio": round(busy["tfgpu"].median / busy["by_hand"].median, 3),
    }


def main(
    images: Annotated[int, typer.Option(min=10, help="Files in a folder.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Epochs of each side, after one that does not count.")] = 7,
) -> None:
    """Prints JSON: pictures of the model's size, and larger ones that are resized."""
    works = [(SIDE, SIDE, False), (375, 500, True), (900, 1200, True)]
    print(
        json.dumps(
            {
                "results": [compare(images, batch, repeats, *work) for work in works],
                "images": images,
                "batch": batch,
                "cores": os.cpu_count(),
                "machine": platform.machine(),
                "tensorflow": tf.__version__,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    typer.run(main)

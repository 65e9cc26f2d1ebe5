"""What a `fit` reads, and how long it takes, before it trains again at 10 % and at 90 % of an epoch.

A source that is read by place (`tfgpu.data`) begins there; a plain tf.data is read up to there. Both decode the same
JPEGs, each decoding is counted. In each repeat every source is resumed from every place, in turn, by one model whose
step is compiled; the first repeat warms up and is left out.

python -m benchmarks.resume --repeats 9            # JSON
python -m benchmarks.resume --repeats 9 --table    # the table of docs/measured/checkpoints.md
"""

import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import machine

PLACES = (0.1, 0.9)
_SIDE, _BATCH = 96, 8


class _Enough(Exception):
    """Ends a `fit`, as any error does."""


class Pictures:
    """JPEGs on the disk, and how many were decoded."""

    def __init__(self, folder: Path, count: int):
        import tensorflow as tf

        draw = np.random.default_rng(0)
        self.paths, self.labels, self.decoded = [], np.arange(count) % 3, 0
        for at in range(count):
            self.paths.append(folder / f"{at}.jpg")
            picture = draw.integers(0, 256, [_SIDE, _SIDE, 3], dtype=np.uint8)
            self.paths[-1].write_bytes(tf.io.encode_jpeg(picture).numpy())

    def load(self, index: Any) -> Any:
        """A picture, in a function of tf.data."""
        import tensorflow as tf

        def decode(number):
            self.decoded += 1
            return tf.io.decode_jpeg(self.paths[number].read_bytes()).numpy()

        found = tf.numpy_function(decode, [index], tf.uint8, stateful=False)
        return tf.ensure_shape(found, [_SIDE, _SIDE, 3])

    def by_place(self) -> Any:
        """As `tfgpu.data` reads them."""
        import tfgpu
        from tfgpu.data.examples import Examples

        own = {"train": np.arange(len(self.paths))}
        source = Examples("pictures", self.labels, (_SIDE, _SIDE, 3), ("a", "b", "c"), load=self.load, own=own)
        return tfgpu.data.load(source, global_batch=_BATCH, seed=1, cache="none").train

    def plain(self) -> Any:
        """Reads them as a user's script does."""
        import tensorflow as tf

        order = tf.data.Dataset.range(len(self.paths)).shuffle(len(self.paths), seed=1)
        labels = tf.constant(self.labels)

        def read(index):
            return tf.cast(self.load(index), tf.float32) / 255, labels[index]

        return order.map(read, num_parallel_calls=tf.data.AUTOTUNE).batch(_BATCH).prefetch(tf.data.AUTOTUNE)


def prepare(folder: Path, steps: int) -> Callable[[str, float], dict]:
    """Writes the pictures and a checkpoint for each source and place; returns what resumes from one.

    Args:
        folder: where they go.
        steps: of an epoch.
    """
    import keras

    import tfgpu

    pictures = Pictures(folder, steps * _BATCH)
    sources = {"tfgpu.data, by place": pictures.by_place, "plain tf.data": pictures.plain}
    with tfgpu.strategy("one_device").scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((_SIDE, _SIDE, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    class First(keras.callbacks.Callback):
        """Ends with the first step, or the one after a number of steps."""

        def __init__(self, last: int = 0):
            super().__init__()
            self.last = last

        def on_epoch_begin(self, epoch, logs=None):
            self.begun, self.before = time.perf_counter(), pictures.decoded

        def on_train_batch_end(self, batch, logs=None):
            if not self.last:
                self.found = {"seconds": time.perf_counter() - self.begun, "decoded": pictures.decoded - self.before}
                self.found["step"] = batch
            if batch >= self.last:  # a checkpoint is written when all callbacks have seen its step
                raise _Enough  # an epoch that `stop_training` ends is over

    def fit(name: str, directory: Path, ends: First, **options: Any) -> None:
        saves = tfgpu.callbacks.Checkpoint(directory, **options)
        with contextlib.suppress(_Enough):
            model.fit(sources[name](), epochs=1, callbacks=[saves, ends], verbose=0)

    kept = {}
    for name in sources:
        for place in PLACES:
            kept[name, place] = folder / f"{len(kept)}"
            fit(name, kept[name, place], First(round(place * steps)), every_steps=round(place * steps))

    def resume(name: str, place: float) -> dict:
        ends, copy = First(), folder / "copy"
        shutil.copytree(kept[name, place], copy)
        try:
            fit(name, copy, ends)
        finally:
            shutil.rmtree(copy)
        assert ends.found["step"] == round(place * steps), ends.found
        return ends.found

    return resume


def main(
    repeats: Annotated[int, typer.Option(min=3, help="Measured resumes of each source from each place.")] = 9,
    steps: Annotated[int, typer.Option(min=20, help=f"Batches of {_BATCH} pictures in an epoch.")] = 100,
    table: Annotated[bool, typer.Option(help="Print the page's table instead of JSON.")] = False,
) -> None:
    """Prints JSON, or the table: seconds and decoded pictures until the first step has been trained."""
    with tempfile.TemporaryDirectory() as folder:
        resume = prepare(Path(folder), steps)
        cases = [(name, place) for name in ("tfgpu.data, by place", "plain tf.data") for place in PLACES]
        found: dict = {case: [] for case in cases}
        for repeat in range(repeats + 1):
            for case in cases if repeat % 2 else reversed(cases):
                if (said := resume(*case)) and repeat:
                    found[case].append(said)
    rows = [_row(*case, each) for case, each in found.items()]
    facts = {**machine.facts(), "repeats": repeats, "pictures": steps * _BATCH, "batch": _BATCH}
    print(_table(rows, facts) if table else json.dumps({**facts, "resumes": rows}, indent=2))


def _row(name: str, place: float, each: list[dict]) -> dict:
    low, middle, high = statistics.quantiles([one["seconds"] for one in each], n=4)
    decoded = sorted(one["decoded"] for one in each)
    return {
        "source": name,
        "place": place,
        "seconds": {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]},
        "decoded": {"least": decoded[0], "most": decoded[-1]},
    }


def _table(rows: list[dict], facts: dict) -> str:
    lines = [
        f"`python -m benchmarks.resume --repeats {facts['repeats']} --table`: {facts['pictures']} JPEGs of {_SIDE} by "
        f"{_SIDE} in batches of {facts['batch']}, {facts['device']}, {facts['all_cores']} cores, TensorFlow "
        f"{facts['versions']['tensorflow']}, Keras {facts['versions']['keras']}, {facts['date']}, median of "
        f"{facts['repeats']} and quartiles.",
        "",
        "| source | resumed at | seconds until the first step is trained | pictures decoded until then |",
        "|---|---|---|---|",
    ]
    for row in rows:
        seconds, decoded = row["seconds"], row["decoded"]
        low, high = seconds["quartiles"]
        counted = f"{decoded['least']}" + (f" to {decoded['most']}" if decoded["most"] > decoded["least"] else "")
        lines.append(
            f"| {row['source']} | {row['place']:.0%} of the epoch | {seconds['median']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {counted} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)

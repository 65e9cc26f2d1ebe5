"""What the cross-entropy by chunks costs and saves: `python -m benchmarks.vocabulary`.

An embedding, a Dense layer and logits by the tied embedding; forward and backward, on one CPU device. Memory: how far
the process's peak grows from a step with few tokens to one with all, in a process for each vocabulary and way. Time:
both ways take turns in one process; printed is the median of the ratios with the least and the most.
"""

import json
import os
import resource
import statistics
import time
from typing import Annotated

import typer

from benchmarks import children

WAYS = ("whole", "chunks")


def step(tokens: int, way: str, width: int, vocabulary: int, chunk: int | None = None):
    """A function that does one training step; `chunk` tokens at a time, or as many as the loss chooses."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu

    tfgpu.repair_keras()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(vocabulary, width)
    model = keras.Model(inputs, table(keras.layers.Dense(width)(table(inputs)), reverse=True))
    whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = tfgpu.losses.ChunkedCrossentropy(chunk) if way == "chunks" else whole

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            value = loss(x, model(x))
        gradients = tape.gradient(value, model.trainable_variables)
        return value, [tf.reduce_sum(tf.convert_to_tensor(each)) for each in gradients]

    text = np.random.default_rng(0).integers(0, vocabulary, (1, tokens))
    run(tf.constant(text[:, :8], tf.int32))
    return lambda: run(tf.constant(text, tf.int32))


def memory(tokens: int, way: str, width: int, vocabulary: int) -> None:
    """Prints the MiB by which the peak grows from a few tokens to all."""
    run = step(tokens, way, width, vocabulary)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def in_process(*words: object) -> float:
    return children.answer("benchmarks.vocabulary", *words)


def main(
    tokens: Annotated[int, typer.Option()] = 2048,
    width: Annotated[int, typer.Option()] = 128,
    vocabularies: Annotated[str, typer.Option(help="By comma.")] = "16384,65536,262144",
    timed: Annotated[int, typer.Option(help="The vocabulary for the time.")] = 65536,
    rounds: Annotated[int, typer.Option()] = 5,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if child:
        at, way, *sizes = child.split(",")
        memory(int(at), way, *map(int, sizes))
        return
    print(f"{tokens} tokens, width {width}; peak of the process over its peak before, MiB")
    for way in WAYS:
        found = (f"{size}: {in_process(tokens, way, width, size):.0f}" for size in map(int, vocabularies.split(",")))
        print(f"{way:8}", *found, flush=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runs, ratios = {way: step(tokens, way, width, timed) for way in WAYS}, []
    for number in range(rounds + 1):
        seconds = {}
        for way in WAYS if number % 2 else WAYS[::-1]:
            began = time.perf_counter()
            runs[way]()
            seconds[way] = time.perf_counter() - began
        ratios += [seconds["chunks"] / seconds["whole"]] if number else []
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"step of {timed}: {middle:.2f} of the whole logits' time ({low:.2f} to {high:.2f}), {rounds} rounds")


if __name__ == "__main__":
    typer.run(main)

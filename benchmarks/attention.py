"""What attention by blocks costs and saves: `python -m benchmarks.attention`.

One causal attention layer, or with `--hub` a block of a language model of KerasHub's, forward and backward, on one CPU
device. Memory: how far the process's peak grows in a
step, with a mask for padding too, in a process for each length and way. Time: both ways take turns in one process;
printed is the median of the ratios with the least and the most.
"""

import functools
import json
import os
import resource
import statistics
import time
from typing import Annotated

import typer

from benchmarks import children
from benchmarks.sequence import HUB, hub_model

WAYS = ("plain", "blocks")


def step(length: int, way: str, width: int, heads: int, padding: int = 3):
    """A function that does one training step."""
    import keras
    import numpy as np
    import tensorflow as tf

    _choose(way)
    layer = keras.layers.MultiHeadAttention(heads, width // heads)
    x = tf.constant(np.random.default_rng(0).normal(size=(1, length, width)), tf.float32)
    seen = tf.sequence_mask([length - padding], length) if padding else None
    layer(x, x, use_causal_mask=True)

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            output = layer(x, x, key_mask=seen, value_mask=seen, use_causal_mask=True)
            loss = tf.reduce_sum(output**2)
        return tape.gradient(loss, layer.trainable_variables)

    run()  # traced while the way is chosen
    return run


def hub_step(length: int, way: str, width: int, heads: int, family: str):
    """A function that does one training step of a model of KerasHub's with one block, without logits."""
    import tensorflow as tf

    _choose(way)
    backbone = hub_model(family, length, width, heads, 1).backbone
    tokens = tf.ones([1, length], tf.int32)
    seen = tf.cast(tf.sequence_mask([length - 3], length), tf.int32)

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            output = backbone({"token_ids": tokens, "padding_mask": seen}, training=True)
            loss = tf.reduce_sum(output**2)
        return tape.gradient(loss, backbone.trainable_variables)

    run()
    return run


def _choose(way: str) -> None:
    import keras

    import tfgpu

    tfgpu.repair_keras()
    (keras.config.enable_flash_attention if way == "blocks" else keras.config.disable_flash_attention)()
    keras.utils.set_random_seed(0)


def memory(length: int, way: str, width: int, heads: int, hub: str = "") -> None:
    """Prints the MiB by which the peak grows from a short sequence to this one."""
    make = functools.partial(hub_step, family=hub) if hub else step
    make(64, way, width, heads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    make(length, way, width, heads)()
    print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def in_process(*words: object) -> float:
    return children.answer("benchmarks.attention", *words)


def main(
    lengths: Annotated[str, typer.Option(help="Lengths for the memory, by comma.")] = "1024,2048,4096",
    length: Annotated[int, typer.Option(help="Length for the time.")] = 1024,
    width: Annotated[int, typer.Option()] = 512,
    heads: Annotated[int, typer.Option()] = 8,
    rounds: Annotated[int, typer.Option()] = 15,
    hub: Annotated[str, typer.Option(help=f"A family of KerasHub's: {', '.join(HUB)}.")] = "",
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if child:
        at, way, *sizes, hub = child.split(",")
        memory(int(at), way, *map(int, sizes), hub)
        return
    kind = f"{hub}, " if hub else ""
    print(f"{kind}{heads} heads, width {width}, one sequence; peak of the process over its peak before, MiB")
    for way in WAYS:
        found = {at: in_process(at, way, width, heads, hub) for at in map(int, lengths.split(","))}
        print(f"{way:8}", *(f"{at}: {grown:.0f}" for at, grown in found.items()), flush=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for padding in (0, 3):
        if hub and not padding:
            continue
        runs = {
            way: hub_step(length, way, width, heads, hub) if hub else step(length, way, width, heads, padding)
            for way in WAYS
        }
        ratios = []
        for number in range(rounds):
            seconds = {}
            for way in WAYS if number % 2 else WAYS[::-1]:
                began = time.perf_counter()
                runs[way]()
                seconds[way] = time.perf_counter() - began
            ratios.append(seconds["blocks"] / seconds["plain"])
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        masks = "causal and padding" if padding else "causal"
        print(f"step at {length}, {masks}: {middle:.2f} of the plain time ({low:.2f} to {high:.2f}), {rounds} rounds")


if __name__ == "__main__":
    typer.run(main)

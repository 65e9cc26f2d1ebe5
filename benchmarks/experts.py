"""What each device holds and sends along `expert`: `python -m benchmarks.experts`.

Blocks with `tfgpu.layers.MixtureOfExperts`, or with `--dense` experts that compute every token, as KerasHub's do. Bytes
of weights and of Adam's slots are counted on each device, exchanges in the graph of a training step, and the bytes that
a device sends to others in one such step, which runs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

WORDS = 101


@dataclass(frozen=True)
class Found:
    """Of the device that holds or sends most.

    Attributes:
        experts: bytes of the experts' weights.
        held: bytes of all weights and slots.
        exchanges: of a step, in the forward and the backward pass.
        sent: bytes of a step, to the experts, back, and the same of the backward pass.
    """

    experts: int
    held: int
    exchanges: tuple[int, int]
    sent: tuple[int, int, int, int]


def measured(devices: int, *, width: int, hidden: int, experts: int, depth: int, rows: int, length: int, dense: bool):
    """What devices hold and send.

    Args:
        devices: along `expert`; 1 is one device.
        width, hidden, experts, depth: of the model.
        rows, length: of the batch.
        dense: experts that compute every token.
    """
    import keras
    import numpy as np

    import tfgpu
    from tfgpu.parallel import memory_by_device

    keras.utils.set_random_seed(0)
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(WORDS, width)(inputs)
    layers = [_dense(experts, hidden) if dense else _sparse(experts, hidden) for _ in range(depth)]
    for layer in layers:
        x = x + layer(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(WORDS)(x))
    if devices > 1:
        names = [f"CPU:{at}" for at in range(devices)]
        model = tfgpu.parallel.apply(model, tfgpu.parallel.Mesh(expert=devices, devices=names))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    tokens = np.random.default_rng(0).integers(0, WORDS, (rows, length))
    model.fit(tokens, tokens, batch_size=rows, verbose=0)
    held = max(sum(sizes.values()) for sizes in memory_by_device(model).values())
    of_experts = sum(int(np.prod(each.shape)) * 4 for layer in layers for each in layer.experts.weights)
    exchanges, sent = _step(model, tokens) if devices > 1 else ((0, 0), (0, 0, 0, 0))
    return Found(of_experts, held, exchanges, sent)


def _sparse(experts: int, hidden: int):
    import tfgpu

    return tfgpu.layers.MixtureOfExperts(experts, hidden)


def _dense(experts: int, hidden: int):
    """A router, and experts of which each computes every token."""
    import keras
    from keras import ops

    import tfgpu

    class Experts(keras.layers.Layer):
        def build(self, shape):
            self.up = self.add_weight(shape=(experts, shape[-1], hidden), name="up")
            self.down = self.add_weight(shape=(experts, hidden, shape[-1]), name="down")

        def call(self, tokens):
            return ops.einsum("eti,eio->eto", ops.gelu(ops.einsum("td,edi->eti", tokens, self.up)), self.down)

    class Dense(keras.layers.Layer):
        def build(self, shape):
            self.router, self.experts = keras.layers.Dense(experts), Experts()
            self.router.build(shape)
            self.experts.build(shape)

        def call(self, x):
            flat = ops.reshape(x, (-1, x.shape[-1]))
            scores = ops.softmax(self.router(flat))
            best = ops.sum(ops.one_hot(ops.top_k(scores, 2)[1], experts), 1)
            made = ops.einsum("te,etd->td", scores * best, self.experts(flat))
            return ops.reshape(made, ops.shape(x))

    tfgpu.parallel.register_plan(Experts, {"up": 0, "down": 0, "call": 0})
    return Dense()


def _step(model, tokens) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """The exchanges of a training step, and the bytes of the device that sends most."""
    import tensorflow as tf

    from tfgpu.parallel.expert.groups import FROM_EXPERTS, TO_EXPERTS, Groups

    ways = (TO_EXPERTS, FROM_EXPERTS, f"{TO_EXPERTS}_back", f"{FROM_EXPERTS}_back")
    strategy, sizes, calls = model.distribute_strategy, {way: [] for way in ways}, dict.fromkeys(ways, 0)
    stock = Groups._swapped

    def swapped(groups, strategy, columns, name):
        sent = [strategy.experimental_local_results(column) for column in columns]
        calls[name] += 1
        sizes[name].append([_bytes_sent(sent, at) for at in range(len(sent))])
        return stock(groups, strategy, columns, name)

    def step(x):
        strategy.run(model.train_step, args=((x, x),))
        return [tf.reduce_max(tf.add_n(list(map(tf.stack, sizes[way])))) for way in ways]

    with _replaced(Groups, "_swapped", swapped):
        sent = tf.function(step, autograph=False)(tf.constant(tokens))
    forward, backward = calls[TO_EXPERTS] + calls[FROM_EXPERTS], sum(calls[way] for way in ways[2:])
    return (forward, backward), tuple(int(each) for each in sent)


def _bytes_sent(sent: list, at: int):
    """What device number `at` sends to others, of tensors by receiver and then by sender."""
    import tensorflow as tf

    found = [by_sender[at] for receiver, by_sender in enumerate(sent) if receiver != at]
    return tf.add_n([tf.size(each, tf.int64) * each.dtype.size for each in found])


class _replaced:
    """In the block, a class has another method."""

    def __init__(self, owner: type, name: str, method: Callable):
        self._owner, self._name, self._method = owner, name, method

    def __enter__(self) -> None:
        self._stock = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._method)

    def __exit__(self, *_) -> None:
        setattr(self._owner, self._name, self._stock)


def main(
    width: Annotated[int, typer.Option()] = 256,
    hidden: Annotated[int, typer.Option()] = 1024,
    experts: Annotated[int, typer.Option()] = 8,
    depth: Annotated[int, typer.Option()] = 2,
    rows: Annotated[int, typer.Option()] = 8,
    length: Annotated[int, typer.Option()] = 64,
    devices: Annotated[str, typer.Option(help="Sizes of `expert`, by comma.")] = "1,2,4",
    dense: Annotated[bool, typer.Option(help="Experts that compute every token.")] = False,
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tfgpu

    counts = [int(each) for each in devices.split(",")]
    tfgpu.environment.set_logical_devices(max(counts))
    print("| `expert` | experts, MiB | all weights and slots, MiB | exchanges, forward and back | sent, KiB |")
    print("|---|---|---|---|---|")
    for count in counts:
        sizes = {"width": width, "hidden": hidden, "experts": experts, "depth": depth, "rows": rows, "length": length}
        found = measured(count, **sizes, dense=dense)
        sent = " + ".join(f"{each / 1024:,.0f}" for each in found.sent)
        row = f"{found.experts / 2**20:.2f} | {found.held / 2**20:.2f} | {found.exchanges[0]}, {found.exchanges[1]} "
        print(f"| {count} | {row}| {sent if count > 1 else 0} |", flush=True)


if __name__ == "__main__":
    typer.run(main)

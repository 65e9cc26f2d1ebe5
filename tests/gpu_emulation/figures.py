"""What a training step of two known models does on GPUs, as the table of docs/explained/gpu.md.

python tests/gpu_emulation/figures.py            # prints the table
python tests/gpu_emulation/figures.py --write    # writes it into docs/explained/gpu.md
python tests/gpu_emulation/figures.py --chain    # prints how many collectives of ResNet-50 wait for each other
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "explained" / "gpu.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
ROWS = 13
TOKENS, WORDS = 17, 8_000


def resnet():
    import keras

    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=1000, classifier_activation=None)
    return model, (32, 32, 3), "float32", ()


def transformer():
    import keras

    layers, width, blocks = keras.layers, 512, 6
    words = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(WORDS, width)(words)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(8, width // 8)(normal, normal, use_causal_mask=True)])
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dense(width)(layers.Dense(4 * width, "gelu")(normal))])
    return keras.Model(words, layers.Dense(WORDS)(layers.LayerNormalization()(x))), (TOKENS,), "int32", (TOKENS,)


def facts_of(make, devices: int, **options):
    """The facts of a training step on so many replicas, and the bytes of the model's weights."""
    calls, model = traced(make, devices, **options)
    return calls.step(rows=ROWS), 4 * sum(variable.shape.num_elements() for variable in _shapes(model))


def traced(make, devices: int, **options):
    """The functions of a `fit` on so many replicas, and the model."""
    import gpu_way
    import keras
    import numpy as np
    import tensorflow as tf
    import tracer

    import tfgpu

    names = [f"CPU:{number + 1}" for number in range(devices)]
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("one_device" if devices == 1 else "mirrored", devices=names, **options)
        with strategy.scope():
            model, shape, dtype, of_labels = make()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
        rows = ROWS * devices
        arrays = np.zeros((rows, *shape), dtype), np.zeros((rows, *of_labels), "int32")
        with tracer.recording() as calls:
            model.fit(tf.data.Dataset.from_tensor_slices(arrays).batch(rows, drop_remainder=True), verbose=0)
    return calls, model


def chain(nodes: list) -> tuple[int, int]:
    """The collectives of the first GPU in a flat graph, and those on the longest path on which each needs the last.

    Those beside the path could share one with a collective on it.
    """
    on_first = {node for node in nodes if node.type.startswith("CollectiveReduce") and "CPU:1" in node.device}
    depths: dict = {}
    for node in nodes:
        before = (depths.get(source, 0) for source, output in node.inputs if source.outputs[output][0] != "resource")
        depths[node] = max(before, default=0) + (node in on_first)
    return len(on_first), max(depths[node] for node in on_first)


def _shapes(model):
    return [variable.value for variable in model.trainable_variables]


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| model | replicas | weights | collectives | bytes handed over | batch to the GPU | back to the host |",
        "|---|---|---|---|---|---|---|",
    ]
    cases = [
        ("ResNet-50", resnet, 1, {}),
        ("ResNet-50", resnet, 2, {}),
        ('ResNet-50, `batch_norm="replica"`', resnet, 2, {"batch_norm": "replica"}),
        ("transformer, 6 blocks of 512", transformer, 1, {}),
        ("transformer, 6 blocks of 512", transformer, 2, {}),
    ]
    for name, make, devices, options in cases:
        facts, weights = facts_of(make, devices, **options)
        sent = facts.collectives.get("GPU:0", [])
        to_device, to_host = (facts.bytes_moved(way, has_rows=True) / devices for way in ("to device", "to host"))
        lines.append(
            f"| {name} | {devices} | {_mib(weights)} | {len(sent)} | {_mib(sum(each.bytes or 0 for each in sent))} "
            f"| {_mib(to_device)} | {_mib(to_host)} |"
        )
    return "\n".join(lines)


def _mib(count: float) -> str:
    if count >= 2**20:
        return f"{count / 2**20:.2f} MiB"
    return f"{count / 2**10:.1f} KiB" if count >= 2**10 else f"{count:.0f} B"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="write the table into docs/explained/gpu.md")
    options.add_argument("--chain", action="store_true", help="count the collectives of ResNet-50 that could be one")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
    import tensorflow as tf

    given = options.parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
    )
    if given.chain:
        from flat_graph import flatten

        count, longest = chain(flatten(traced(resnet, 2)[0].largest.function.graph))
        print(f"ResNet-50, 2 replicas: {count} collectives, {longest} on the longest path")
        return
    found = table()
    if not given.write:
        print(found)
        return
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{found}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

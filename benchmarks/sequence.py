"""What each device keeps of a step along `sequence`: `python -m benchmarks.sequence`.

A decoder of Keras's layers, one training step, traced and not run: the bytes of the activations that the backward pass
reads, by device. Weights, gradients and what an operation needs while it runs come on top.
"""

import os
from typing import Annotated

import typer

TOKENS = 101


def kept_bytes(mesh, *, length: int, width: int, heads: int, depth: int, batch: int) -> dict[int, int]:
    """The bytes that the backward pass reads, by the number of the device.

    Args:
        mesh: with devices; of one copy of the model.
        length, width, heads, depth, batch: of the model and its input.
    """
    import keras
    import tensorflow as tf

    import tfgpu

    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(TOKENS, width)(inputs)
    for _ in range(depth):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * width, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(y)
    model = tfgpu.parallel.apply(keras.Model(inputs, keras.layers.Dense(TOKENS)(x)), mesh)
    loss, ends = keras.losses.SparseCategoricalCrossentropy(from_logits=True), []

    def step(x):
        with tf.GradientTape() as tape:
            value = loss(x, model(x, training=True))
        ends.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(value, model.trainable_variables)

    run = tf.function(lambda x: model.distribute_strategy.run(step, (x,)))
    graph = run.get_concrete_function(tf.TensorSpec([batch, length], tf.int32)).graph
    operations, results = graph.get_operations(), tf.nest.flatten(graph.structured_outputs, expand_composites=True)
    needed = _needed(each.op for each in results)
    forward, backward = ({*part} & needed for part in (operations[: ends[0]], operations[ends[0] :]))
    read = {id(each): each for operation in backward for each in operation.inputs if each.op in forward}
    weights, found = {tuple(variable.shape) for variable in model.trainable_variables}, {}
    for tensor in read.values():
        if (tensor.shape.rank or 0) > 1 and tuple(tensor.shape) not in weights:
            device = tensor.device or mesh.device()  # the loss has no device of its own
            at = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/device:{device}").device_index
            found[at] = found.get(at, 0) + (tensor.shape.num_elements() or 0) * tensor.dtype.size
    return found


def _needed(operations) -> set:
    """The operations, and all that they depend on."""
    found, wait = set(), list(operations)
    while wait:
        operation = wait.pop()
        if operation not in found:
            found.add(operation)
            wait += [tensor.op for tensor in operation.inputs]
    return found


def main(
    length: Annotated[int, typer.Option()] = 2048,
    width: Annotated[int, typer.Option()] = 512,
    heads: Annotated[int, typer.Option()] = 8,
    depth: Annotated[int, typer.Option()] = 4,
    batch: Annotated[int, typer.Option()] = 1,
    devices: Annotated[str, typer.Option(help="Sizes of `sequence`, by comma.")] = "1,2,4",
    blocks: Annotated[bool, typer.Option(help="Attention by blocks, on one device, too.")] = False,
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import keras
    import tensorflow as tf

    import tfgpu

    tfgpu.repair_keras()
    (keras.config.enable_flash_attention if blocks else keras.config.disable_flash_attention)()
    sizes, host = [int(each) for each in devices.split(",")], tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * max(sizes))
    print(f"{depth} blocks, width {width}, {heads} heads, {batch} x {length} tokens; kept for the backward pass, MiB")
    for size in sizes:
        mesh = tfgpu.parallel.Mesh(sequence=size, devices=[f"CPU:{at}" for at in range(size)])
        found = kept_bytes(mesh, length=length, width=width, heads=heads, depth=depth, batch=batch)
        print(f"sequence={size}:", *(f"{found[at] / 2**20:.0f}" for at in sorted(found)), flush=True)


if __name__ == "__main__":
    typer.run(main)

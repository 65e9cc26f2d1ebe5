"""What each device keeps of a step along `sequence`: `python -m benchmarks.sequence`.

A decoder of Keras's layers, or with `--hub` a language model of KerasHub's, one training step, traced and not run: the
bytes of the activations that the backward pass reads, by device. Weights, gradients and what an operation needs while
it runs come on top.
"""

import os
from typing import Annotated

import typer

TOKENS = 101


HUB = ("gemma", "gpt2", "llama", "qwen3", "mixtral")


def decoder(length: int, width: int, heads: int, depth: int):
    """A language model of Keras's layers: token numbers to logits."""
    import keras

    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(TOKENS, width)(inputs)
    for _ in range(depth):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * width, "gelu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(y)
    return keras.Model(inputs, keras.layers.Dense(TOKENS)(x))


def hub_model(family: str, length: int, width: int, heads: int, depth: int):
    """A language model of a family of KerasHub's, of the same sizes: tokens and a padding mask to logits."""
    import keras_hub

    sizes = {"num_layers": depth, "hidden_dim": width, "intermediate_dim": 4 * width}
    grouped = {"num_query_heads": heads, "num_key_value_heads": heads // 2}
    models, head = keras_hub.models, {"head_dim": width // heads}
    backbone, task = {
        "gemma": lambda: (models.GemmaBackbone(TOKENS, **grouped, **head, **sizes), models.GemmaCausalLM),
        "gpt2": lambda: (
            models.GPT2Backbone(TOKENS, num_heads=heads, max_sequence_length=length, **sizes),
            models.GPT2CausalLM,
        ),
        "llama": lambda: (models.LlamaBackbone(TOKENS, **grouped, **sizes), models.LlamaCausalLM),
        "qwen3": lambda: (models.Qwen3Backbone(TOKENS, **grouped, **head, **sizes), models.Qwen3CausalLM),
        "mixtral": lambda: (models.MixtralBackbone(TOKENS, **grouped, num_experts=4, **sizes), models.MixtralCausalLM),
    }[family]()
    return task(backbone, preprocessor=None)


def kept_bytes(model, mesh, *, length: int, batch: int) -> dict[int, int]:
    """The bytes that the backward pass reads, by the number of the device.

    Args:
        model: of `decoder` or `hub_model`.
        mesh: with devices; of one copy of the model.
        length, batch: of its input.
    """
    import keras
    import tensorflow as tf

    import tfgpu

    takes_mask = isinstance(model.input, dict)
    model = tfgpu.parallel.apply(model, mesh)
    loss, ends = keras.losses.SparseCategoricalCrossentropy(from_logits=True), []

    def step(x):
        with tf.GradientTape() as tape:
            given = {"token_ids": x, "padding_mask": tf.ones_like(x)} if takes_mask else x
            value = loss(x, model(given, training=True))
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
    hub: Annotated[str, typer.Option(help=f"A family of KerasHub's: {', '.join(HUB)}.")] = "",
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import keras
    import tensorflow as tf

    import tfgpu

    tfgpu.repair_keras()
    (keras.config.enable_flash_attention if blocks else keras.config.disable_flash_attention)()
    counts, host = [int(each) for each in devices.split(",")], tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * max(counts))
    kind = f"{hub}, " if hub else ""
    print(f"{kind}{depth} blocks, width {width}, {heads} heads, {batch} x {length} tokens; kept, MiB")
    for size in counts:
        mesh = tfgpu.parallel.Mesh(sequence=size, devices=[f"CPU:{at}" for at in range(size)])
        sizes = (length, width, heads, depth)
        found = kept_bytes(hub_model(hub, *sizes) if hub else decoder(*sizes), mesh, length=length, batch=batch)
        print(f"sequence={size}:", *(f"{found[at] / 2**20:.0f}" for at in sorted(found)), flush=True)


if __name__ == "__main__":
    typer.run(main)

"""What KerasHub's models learn where their blocks are split over devices, against one device.

    python tests/upstream/tensor_families.py            # prints the table of docs/measured/parallel.md
    python tests/upstream/tensor_families.py llama gpt2 # these families
    python tests/upstream/tensor_families.py experts    # mixtures, with their experts over devices

Each family is a tiny model with random weights: AdamW with weight decay, dropout, clipping, and an uneven last batch;
with LoRA, accumulation over two batches besides.
"""

import contextlib
import functools
import importlib
import os
import sys
from dataclasses import dataclass

import keras
import numpy as np

import tfgpu
from tfgpu.parallel import Mesh, apply, memory_by_device

WORDS, LENGTH, ROWS, BATCH = 32, 5, 6, 4
SIZES = {"num_layers": 1, "hidden_dim": 16, "intermediate_dim": 64}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
LAYOUTS = {
    "tensor 2": {"tensor": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
    "data 2": {"data": 2},
    "expert 2": {"expert": 2},
    "data 2 x expert 2": {"data": 2, "expert": 2},
}
CLIP = {"full": {"global_clipnorm": 0.5}, "LoRA": {"clipnorm": 0.1, "gradient_accumulation_steps": 2}}


def hub():
    return importlib.import_module("keras_hub").models


def text():
    draw = np.random.default_rng(0)
    ids = draw.integers(1, WORDS, (ROWS, LENGTH))
    there = (np.arange(LENGTH) < 2 + np.arange(ROWS)[:, None] % 4).astype("int32")
    return ids * there, there


def next_words():
    ids, there = text()
    return {"token_ids": ids, "padding_mask": there}, np.roll(ids, -1, 1), there.astype("float32")


def causal(kind, **sizes):
    """A language model with a backbone of this kind, and its data."""
    backbone = getattr(hub(), f"{kind}Backbone")(WORDS, dropout=0.1, **{**SIZES, **sizes})
    return getattr(hub(), f"{kind}CausalLM")(backbone, preprocessor=None), next_words()


def bert():
    backbone = hub().BertBackbone(WORDS, num_heads=2, max_sequence_length=LENGTH, **SIZES)
    ids, there = text()
    positions = np.sort(np.argsort(np.random.default_rng(1).random((ROWS, LENGTH)), 1)[:, :2])
    given = {"token_ids": ids, "padding_mask": there, "segment_ids": np.zeros_like(ids), "mask_positions": positions}
    words, weights = (np.take_along_axis(each, positions, 1) for each in (ids, there))
    return hub().BertMaskedLM(backbone, preprocessor=None), (given, words, weights.astype("float32"))


def vit():
    draw = np.random.default_rng(0)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 64}
    rates = {"dropout_rate": 0.1, "attention_dropout": 0.1}
    backbone = hub().ViTBackbone((16, 16, 3), (8, 8), **sizes, **rates)
    pictures, kinds = draw.normal(size=(ROWS, 16, 16, 3)).astype("float32"), draw.integers(0, 3, ROWS)
    return hub().ViTImageClassifier(backbone, 3, preprocessor=None), (pictures, kinds, None)


def whisper():
    sizes = {"num_mels": 4, "max_encoder_sequence_length": 8, "max_decoder_sequence_length": LENGTH}
    backbone = hub().WhisperBackbone(WORDS, num_heads=2, dropout=0.1, **sizes, **SIZES)
    given, words, weights = next_words()
    sounds = np.random.default_rng(0).normal(size=(ROWS, 8, 4)).astype("float32")
    given = {"encoder_features": sounds, "decoder_token_ids": given["token_ids"], "decoder_padding_mask": weights}
    inputs = backbone.input
    logits = backbone.token_embedding(backbone(inputs)["decoder_sequence_output"], reverse=True)
    return keras.Model(inputs, logits), (given, words, weights)


QWEN_MOE = {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 12, "num_experts": 4, "top_k": 2}
FAMILIES = {
    "gemma": lambda: causal("Gemma", **GROUPED, head_dim=4),
    "gemma, one key head": lambda: causal("Gemma", num_query_heads=4, num_key_value_heads=1, head_dim=4),
    "llama": lambda: causal("Llama", **GROUPED),
    "llama3": lambda: causal("Llama3", num_query_heads=4, num_key_value_heads=1),
    "qwen3": lambda: causal("Qwen3", **GROUPED, head_dim=4),
    "mistral": lambda: causal("Mistral", **GROUPED),
    "mixtral": lambda: causal("Mixtral", **GROUPED, num_experts=4),
    "qwen_moe": lambda: causal("QwenMoe", **GROUPED, **QWEN_MOE),
    "gpt2": lambda: causal("GPT2", num_heads=2, max_sequence_length=LENGTH),
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
}
QWEN3_MOE = {"moe_intermediate_dim": 8, "num_experts": 4, "top_k": 2, "head_dim": 4}
MIXTURES = {
    "mixtral": FAMILIES["mixtral"],
    "qwen_moe": FAMILIES["qwen_moe"],
    "qwen3_moe": lambda: causal("Qwen3Moe", **GROUPED, **QWEN3_MOE),
    "gpt_oss": lambda: causal("GptOss", **GROUPED, num_experts=4, head_dim=4),
}
TABLE = [name for name in FAMILIES if name not in ("llama", "mistral")]


def lora(model):
    """LoRA on queries and values, as KerasHub does it."""
    for layer in model._flatten_layers(include_self=False):
        layer.trainable = False
    for layer in model._flatten_layers(include_self=False):
        if layer.name in ("query", "value") and layer.weights:
            layer.trainable = True
            layer.enable_lora(2)
    return model


def made(family, kind):
    keras.utils.set_random_seed(1)
    model, data = (FAMILIES | MIXTURES)[family]()
    if kind == "LoRA":
        lora(model)
        for layer in model._flatten_layers(include_self=False):
            if getattr(layer, "lora_enabled", False):  # else nothing flows through the first matrix
                layer.lora_kernel_b.assign(np.random.default_rng(2).normal(size=layer.lora_kernel_b.shape) * 0.1)
    return model, data


def compiled(model, kind):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, **CLIP[kind])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, entropy, weighted_metrics=["accuracy"], jit_compile=False)
    return model


def trained(model, data, kind):
    x, y, weights = data
    if tfgpu.core.replication.is_replicated(model.distribute_strategy):
        with model.distribute_strategy.scope():
            compiled(model, kind)
    else:
        compiled(model, kind)
    how = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, sample_weight=weights, **how).history


def spread(model, layout):
    sizes = LAYOUTS[layout]
    with contextlib.redirect_stdout(sys.stderr):  # its table
        return apply(model, Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)]))


@dataclass(frozen=True)
class Found:
    """What a family learned: its logs' and weights' largest differences, and bytes on a device over one device's.

    The bytes are those of the weights within blocks, on the device that has the most of them.
    """

    model: keras.Model
    one: keras.Model
    data: tuple
    logs: float
    weights: float
    block_share: float
    share: float


def weights_apart(one, model):
    """The largest difference; the bias of keys is left out, whose gradient is 0 but for rounding."""
    names = [variable.path for variable in one.weights]
    pairs = zip(names, one.get_weights(), model.get_weights(), strict=True)
    return max(float(abs(a - b).max()) for name, a, b in pairs if "key/bias" not in name and a.size)


def block_share(model, whole):
    """The most bytes of weights within transformer blocks that a device holds, over all of them."""
    inside = {id(variable) for layer in blocks(model) for variable in layer.weights}
    held: dict[str, int] = {}
    for variable in (v for v in model.weights if id(v) in inside):
        copy = variable.value
        copy = copy.values[0] if hasattr(copy, "values") else copy
        held[copy.device] = held.get(copy.device, 0) + int(np.prod(variable.shape)) * 4
    total = sum(int(np.prod(v.shape)) * 4 for layer in blocks(whole) for v in layer.weights)
    return max(held.values()) / total


def blocks(model):
    names = ("Decoder", "DecoderBlock", "Encoder", "EncoderBlock")
    found = [each for each in model._flatten_layers() if type(each).__name__.endswith(names)]
    return [each for each in found if type(each).__name__ != "ViTEncoder"]


@functools.cache
def on_one_device(family, kind):
    one, data = made(family, kind)
    return one, trained(one, data, kind)


def compare(family, kind="full", layout="tensor 2") -> Found:
    one, expected = on_one_device(family, kind)
    model, data = made(family, kind)
    model = spread(model, layout)
    history = trained(model, data, kind)
    logs = max(float(abs(np.subtract(history[name], expected[name])).max()) for name in expected)
    device = {name: sum(sizes.values()) for name, sizes in memory_by_device(model).items()}
    whole = sum(sum(sizes.values()) for sizes in memory_by_device(one).values())
    share = max(device.values()) / whole
    return Found(model, one, data, logs, weights_apart(one, model), block_share(model, one), share)


def experts():
    """Prints what mixtures learn along `expert`, with their balance loss, and the bytes of experts on a device."""
    print("| family | bytes of the experts | full | LoRA | full, data 2 x expert 2 |")
    print("|---|---|---|---|---|")
    for name in MIXTURES:
        full, both = compare(name, layout="expert 2"), compare(name, layout="data 2 x expert 2")
        found = (full, compare(name, "LoRA", "expert 2"), both)
        apart = " | ".join(f"{max(each.weights, each.logs):.0e}" for each in found)
        print(f"| {name} | {expert_share(full.model, full.one):.2f} | {apart} |", flush=True)


def expert_share(model, whole):
    """The bytes of experts' weights on each device, over all of them."""
    found = (each.weights for each in model._flatten_layers() if type(each).__name__.endswith("Experts"))
    held = sum(int(np.prod(variable.value.values[0].shape)) for variables in found for variable in variables)
    found = (each.weights for each in whole._flatten_layers() if type(each).__name__.endswith("Experts"))
    return held / sum(int(np.prod(variable.shape)) for variables in found for variable in variables)


def main(names):
    if names == ["experts"]:
        return experts()
    print("| family | bytes of the blocks | bytes of all, with slots | full | LoRA | full, data 2 x tensor 2 |")
    print("|---|---|---|---|---|---|")
    for name in names or TABLE:
        full, small, both = compare(name), compare(name, "LoRA"), compare(name, layout="data 2 x tensor 2")
        apart = " | ".join(f"{max(each.weights, each.logs):.0e}" for each in (full, small, both))
        print(f"| {name} | {full.block_share:.2f} | {full.share:.2f} | {apart} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tfgpu.environment.set_logical_devices(4)
    main(sys.argv[1:])

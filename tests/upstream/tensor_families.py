"""What KerasHub's models learn where their blocks are split over devices, against one device.

    python tests/upstream/tensor_families.py            # prints the table of docs/measured/parallel.md
    python tests/upstream/tensor_families.py llama gpt2 # these families
    python tests/upstream/tensor_families.py experts    # mixtures, with their experts over devices

Each family is a tiny model with random weights: AdamW with weight decay, dropout, clipping, and an uneven last batch;
with LoRA, accumulation over two batches besides.
"""

import contextlib
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

import tfgpu
from tfgpu.parallel import Mesh, apply, memory_by_device

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.finetune_models import FAMILIES, MIXTURES, Size, adapt

BATCH = 4
LAYOUTS = {
    "tensor 2": {"tensor": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
    "data 2": {"data": 2},
    "expert 2": {"expert": 2},
    "data 2 x expert 2": {"data": 2, "expert": 2},
}
CLIP = {"full": {"global_clipnorm": 0.5}, "LoRA": {"clipnorm": 0.1, "gradient_accumulation_steps": 2}}
TABLE = [name for name in FAMILIES if name not in ("llama", "mistral")]


def made(family, kind):
    keras.utils.set_random_seed(1)
    model, data = (FAMILIES | MIXTURES)[family](Size())
    if kind == "LoRA":
        adapt(model)
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

"""The models in idiomatic PyTorch, with the weights of works.py transposed."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.works import DEPTH, HEADS, NORM_EPSILON, WIDTH, Work, resnet_blocks


def build(work: Work) -> nn.Module:
    """Builds a model with the work's first weights; pictures are (rows, channels, height, width)."""
    model = MODELS[work.name](work)
    first = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in _turned(work).items()}
    model.load_state_dict(first, strict=False)  # what is left out: BatchNorm's count of batches
    if unknown := {name for name in model.state_dict() if not name.endswith("num_batches_tracked")} ^ set(first):
        raise AssertionError(f"works.py and this model disagree about {sorted(unknown)}")
    return model


def _turned(work: Work) -> dict[str, np.ndarray]:
    """The weights under PyTorch's names and in its shapes."""
    names = {"kernel": "weight", "gamma": "weight", "embeddings": "weight", "beta": "bias"}
    names |= {"moving_mean": "running_mean", "moving_variance": "running_var"}
    keras, turned = work.weights(), {}
    for path, value in keras.items():
        layer, kind = path.rsplit("/", 1)
        if "_attention/" in layer:
            continue
        if kind == "kernel":
            value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        turned[f"{layer}.{names.get(kind, kind)}"] = value
    if work.name == "cnn":  # The maps lie channels first when they are flattened.
        side = int(np.sqrt(keras["logits/kernel"].shape[0] / 32))
        rows = keras["logits/kernel"].reshape(side, side, 32, -1)
        turned["logits.weight"] = rows.transpose(3, 2, 0, 1).reshape(work.classes, -1)
    for i in range(1, DEPTH + 1) if work.name == "transformer" else ():
        parts = [f"block{i}_attention/{part}" for part in ("query", "key", "value")]
        turned[f"block{i}_qkv.weight"] = np.concatenate([keras[f"{p}/kernel"].reshape(WIDTH, WIDTH).T for p in parts])
        turned[f"block{i}_qkv.bias"] = np.concatenate([keras[f"{p}/bias"].reshape(WIDTH) for p in parts])
        output = f"block{i}_attention/attention_output"
        turned[f"block{i}_output.weight"] = keras[f"{output}/kernel"].reshape(WIDTH, WIDTH).T
        turned[f"block{i}_output.bias"] = keras[f"{output}/bias"]
    return turned


class Mlp(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.hidden, self.logits = nn.Linear(*work.shape, 64), nn.Linear(64, work.classes)

    def forward(self, x):
        return self.logits(functional.relu(self.hidden(x)))


class Cnn(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(work.shape[-1], 32, 3), nn.Conv2d(32, 32, 3)
        self.logits = nn.Linear(work.weights()["logits/kernel"].shape[0], work.classes)

    def forward(self, x):
        for convolution in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(convolution(x)), 2)
        return self.logits(x.flatten(1))


class ResNet18(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.blocks = list(resnet_blocks())
        self._add("stem", work.shape[-1], 64, 3, 1)
        for name, before, channels, stride in self.blocks:
            self._add(f"{name}_conv1", before, channels, 3, stride)
            self._add(f"{name}_conv2", channels, channels, 3, 1)
            if stride > 1:
                self._add(f"{name}_shortcut", before, channels, 1, stride)
        self.logits = nn.Linear(512, work.classes)

    def _add(self, name, before, channels, kernel, stride):
        padding = 1 if kernel == 3 and stride == 1 else 0
        self.add_module(name, nn.Conv2d(before, channels, kernel, stride, padding, bias=False))
        self.add_module(f"{name}_norm", nn.BatchNorm2d(channels, eps=NORM_EPSILON, momentum=0.1))

    def _convolve(self, x, name):
        convolution, norm = getattr(self, name), getattr(self, f"{name}_norm")
        if convolution.stride == (2, 2) and convolution.kernel_size == (3, 3):
            x = functional.pad(x, (0, 1, 0, 1))  # where TensorFlow's "same" pads
        return norm(convolution(x))

    def forward(self, x):
        x = functional.relu(self._convolve(x, "stem"))
        for name, _, _, stride in self.blocks:
            y = functional.relu(self._convolve(x, f"{name}_conv1"))
            y = self._convolve(y, f"{name}_conv2")
            x = functional.relu(y + (self._convolve(x, f"{name}_shortcut") if stride > 1 else x))
        return self.logits(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.embedding = nn.Embedding(work.tokens, WIDTH)
        for i in range(1, DEPTH + 1):
            self.add_module(f"block{i}_norm1", nn.LayerNorm(WIDTH, NORM_EPSILON))
            self.add_module(f"block{i}_qkv", nn.Linear(WIDTH, 3 * WIDTH))
            self.add_module(f"block{i}_output", nn.Linear(WIDTH, WIDTH))
            self.add_module(f"block{i}_norm2", nn.LayerNorm(WIDTH, NORM_EPSILON))
            self.add_module(f"block{i}_wide", nn.Linear(WIDTH, 4 * WIDTH))
            self.add_module(f"block{i}_narrow", nn.Linear(4 * WIDTH, WIDTH))
        self.norm, self.logits = nn.LayerNorm(WIDTH, NORM_EPSILON), nn.Linear(WIDTH, work.classes)

    def _attend(self, x, i):
        rows, length, _ = x.shape
        parts = getattr(self, f"block{i}_qkv")(x).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return getattr(self, f"block{i}_output")(seen.transpose(1, 2).reshape(rows, length, WIDTH))

    def forward(self, x):
        x = self.embedding(x)
        for i in range(1, DEPTH + 1):
            x = x + self._attend(getattr(self, f"block{i}_norm1")(x), i)
            y = functional.gelu(getattr(self, f"block{i}_wide")(getattr(self, f"block{i}_norm2")(x)))
            x = x + getattr(self, f"block{i}_narrow")(y)
        return self.logits(self.norm(x))


MODELS = {"mlp": Mlp, "cnn": Cnn, "resnet18": ResNet18, "transformer": Transformer}

"""Finds the layers of a model that have LoRA, and tells its base from another one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np

from tfgpu.compat import layers, variables
from tfgpu.core import replication
from tfgpu.core.state import broadcast, host_copies, sharded_variable

_PAIRS = (("lora_kernel_a", "lora_kernel_b"), ("lora_embeddings_a", "lora_embeddings_b"))
_SAMPLED = 64
"""How many numbers of each weight tell a base from others."""


@dataclass(frozen=True)
class LoraLayer:
    """A layer with LoRA.

    Attributes:
        layer: Dense, EinsumDense, Embedding, or one of their kind.
        place: its position among the layers that have weights.
        names: the attributes that hold its two matrices.
    """

    layer: keras.layers.Layer
    place: int
    names: tuple[str, str]

    @property
    def rank(self) -> int:
        return int(self.layer.lora_rank)

    @property
    def alpha(self) -> float:
        return float(self.layer.lora_alpha)

    def variables(self) -> tuple[keras.Variable, keras.Variable]:
        return tuple(getattr(self.layer, name) for name in self.names)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Its two matrices, whole. On several workers that may be a collective."""
        return tuple(np.array(variable.numpy()) for variable in self.variables())


def with_weights(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers within a model (of KerasHub: within its backbone) that have weights, as KerasHub counts them."""
    backbone = getattr(model, "backbone", None)
    within = backbone if isinstance(backbone, keras.Model) else model
    return [layer for layer in layers.layers_within(within, include_self=False) if layer.weights]


def found_in(model: keras.Model) -> list[LoraLayer]:
    """The layers of a model that have LoRA, in order."""
    found = []
    for place, layer in enumerate(with_weights(model)):
        if getattr(layer, "lora_enabled", False):
            names = next(pair for pair in _PAIRS if hasattr(layer, pair[0]))
            found.append(LoraLayer(layer, place, names))
    return found


def other_weights(model: keras.Model) -> list:
    """The weights of a model that are not LoRA's, in an order that LoRA does not change."""
    own = {id(sharded_variable.shard_of(v)) for each in found_in(model) for v in each.variables()}
    own |= {id(variable) for each in found_in(model) for variable in each.variables()}
    return sharded_variable.merged([v for v in model.weights if id(v) not in own])


def digests(model: keras.Model, weights: Sequence) -> list[str]:
    """A hash of each variable's shape, dtype and first numbers; on several workers, the chief's hashes.

    If a variable is in pieces, only the first piece is read.
    """
    sources = list(map(_first_piece, weights))
    ends = [min(_SAMPLED, int(np.prod(weight.shape))) for weight in weights]
    values = host_copies.copy(model, sources, stretches=[(0, end) for end in ends])
    found = [
        hashlib.sha256(f"{tuple(each.shape)}{each.dtype}".encode() + np.ascontiguousarray(value).tobytes()).hexdigest()
        for each, value in zip(weights, values, strict=True)
    ]
    if not replication.spans_processes(model.distribute_strategy):
        return found
    return broadcast.bytes_from_chief(model.distribute_strategy, " ".join(found).encode()).decode().split()


def _first_piece(variable):
    """The piece that holds the first numbers of a variable."""
    if not isinstance(variable, sharded_variable.ShardedVariable) or not variable.sharding.over_replicas:
        return variable
    first = variables.held(variable.shards[0]).values[0]
    return first if int(np.prod(first.shape)) >= _SAMPLED else variable

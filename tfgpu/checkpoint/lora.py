"""The layers of a model that have LoRA, and checkpoints without its frozen base: `Checkpoint(only="lora")`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfgpu.compat import layers, variables
from tfgpu.core import replication
from tfgpu.core.state import broadcast, host_copies, sharded_variable, training_state
from tfgpu.errors import InputError, unknown

_KEY = "frozen_base"
_PAIRS = (("lora_kernel_a", "lora_kernel_b"), ("lora_embeddings_a", "lora_embeddings_b"))
_SAMPLED = 64  # how many numbers of each weight tell a base from others


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


class FrozenBase:
    """The weights of a model that a checkpoint leaves out.

    Args:
        only: `"lora"` leaves out what is frozen; None leaves out nothing.

    Attributes:
        names: the arrays that are left out.
        facts: what a checkpoint must record about the base, for `check`.

    Raises:
        InputError: `only` is neither.
    """

    def __init__(self, only: str | None):
        if only not in (None, "lora"):
            raise unknown("only", only, ("lora",))
        self._leaves_out = only is not None
        self.names: tuple[str, ...] = ()
        self.facts: dict[str, Any] = {}

    def begin(self, model: keras.Model) -> None:
        """Learns the base, once it has its weights. On several workers, each must call it.

        Raises:
            InputError: no layer has LoRA.
        """
        if not self._leaves_out:
            return
        found = found_in(model)
        if not found:
            raise InputError(
                f"Checkpoint(only='lora') saves adapters, and no layer of {model.name!r} has LoRA. Call "
                "`layer.enable_lora(rank)` before `compile`, or remove `only`."
            )
        frozen = _frozen(model)
        self.names = tuple(frozen)
        base = dict(zip(frozen, digests(model, list(frozen.values())), strict=True))
        self.facts = {_KEY: {"base": base, "lora": _ranks(found)}}


def check(memory: dict[str, Any], model: keras.Model, source: str) -> tuple[str, ...]:
    """The names of the arrays that a checkpoint leaves to the model; on several workers, each must call it.

    Args:
        memory: of the checkpoint.
        model: built.
        source: the checkpoint, for the error message.

    Raises:
        InputError: the model has LoRA of another rank or on other layers, or another base.
    """
    facts = memory.get(_KEY)
    if facts is None:
        return ()
    ranks = _ranks(found_in(model))
    if ranks != facts["lora"]:
        there, here = (", ".join(sorted({str(rank) for _, rank in each})) or "none" for each in (facts["lora"], ranks))
        raise InputError(
            f"{source} has adapters of rank {there} for {len(facts['lora'])} layers; the model has {len(ranks)} layers "
            f"with LoRA, of rank {here}. Enable LoRA as in the run that is resumed."
        )
    frozen, expected = _frozen(model), facts["base"]
    here = dict(zip(frozen, digests(model, list(frozen.values())), strict=True))
    differ = [name for name, digest in expected.items() if here.get(name) != digest]
    if differ:
        path = frozen[differ[0]].path if differ[0] in frozen else differ[0]
        raise InputError(
            f"{source} has only the adapters, for another base: {len(differ)} of {len(expected)} frozen weights "
            f"differ, such as {path!r}. Before `fit`, load the weights that the run began with."
        )
    return tuple(expected)


def _ranks(found: list[LoraLayer]) -> list[list[int]]:
    return [[each.place, each.rank] for each in found]


def _frozen(model: keras.Model) -> dict[str, Any]:
    """The weights that no step changes, by the names of their arrays."""
    kept: set[int] = set()
    for layer in layers.layers_within(model):
        has_lora = getattr(layer, "lora_enabled", False)
        if has_lora or not layer.trainable:
            own = layers.own_trainable(layer)
            if type(layer).__module__.startswith(("keras.", "keras_hub.")):  # a user's own layer may count its calls
                own = layers.own_variables(layer)
            kept |= {id(variable) for variable in own if not variable.trainable}
    named = training_state.name_group("weights", sharded_variable.merged(model.weights))
    return {name: variable for name, variable in named.items() if id(_first_shard(variable)) in kept}


def _first_shard(variable):
    while isinstance(variable, sharded_variable.ShardedVariable):
        variable = variable.shards[0]
    return variable

"""Checkpoints without the frozen base of a model whose adapters (LoRA) train: `Checkpoint(only="lora")`."""

from typing import Any

import keras

from tfgpu.checkpoint import lora_layers
from tfgpu.compat import layers
from tfgpu.core.state import sharded_variable, training_state
from tfgpu.errors import InputError, unknown

KEY = "frozen_base"


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
        found = lora_layers.found_in(model)
        if not found:
            raise InputError(
                f"Checkpoint(only='lora') saves adapters, and no layer of {model.name!r} has LoRA. Call "
                "`layer.enable_lora(rank)` before `compile`, or remove `only`."
            )
        frozen = _frozen(model)
        self.names = tuple(frozen)
        digests = lora_layers.digests(model, list(frozen.values()))
        self.facts = {KEY: {"base": dict(zip(frozen, digests, strict=True)), "lora": _ranks(found)}}


def check(memory: dict[str, Any], model: keras.Model, source: str) -> tuple[str, ...]:
    """The names of the arrays that a checkpoint leaves to the model; on several workers, each must call it.

    Args:
        memory: of the checkpoint.
        model: built.
        source: the checkpoint, for the error message.

    Raises:
        InputError: the model has LoRA of another rank or on other layers, or another base.
    """
    facts = memory.get(KEY)
    if facts is None:
        return ()
    ranks = _ranks(lora_layers.found_in(model))
    if ranks != facts["lora"]:
        there, here = (", ".join(sorted({str(rank) for _, rank in each})) or "none" for each in (facts["lora"], ranks))
        raise InputError(
            f"{source} has adapters of rank {there} for {len(facts['lora'])} layers; the model has {len(ranks)} layers "
            f"with LoRA, of rank {here}. Enable LoRA as in the run that is resumed."
        )
    frozen, expected = _frozen(model), facts["base"]
    here = dict(zip(frozen, lora_layers.digests(model, list(frozen.values())), strict=True))
    differ = [name for name, digest in expected.items() if here.get(name) != digest]
    if differ:
        path = frozen[differ[0]].path if differ[0] in frozen else differ[0]
        raise InputError(
            f"{source} has only the adapters, for another base: {len(differ)} of {len(expected)} frozen weights "
            f"differ, such as {path!r}. Before `fit`, load the weights that the run began with."
        )
    return tuple(expected)


def _ranks(found: list[lora_layers.LoraLayer]) -> list[list[int]]:
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

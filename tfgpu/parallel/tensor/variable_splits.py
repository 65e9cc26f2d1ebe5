"""Replaces the variables of a layer by shards on several devices, in place."""

import functools
from collections.abc import Sequence

import keras
import numpy as np

from tfgpu.compat import keras as keras_private
from tfgpu.compat import layers, quantized, variables
from tfgpu.compat.patch import override, wrap
from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, shard_patches
from tfgpu.parallel.tensor import axes, losses, quantized_splits
from tfgpu.parallel.tensor.axes import VariableSplit
from tfgpu.parallel.tensor.local_shards import FirstTermBias, LocalShard


def split_variables(
    splits: Sequence[VariableSplit], placements: tuple[device_placement.DevicePlacement, ...], strategy
) -> None:
    """Replaces variables of layers by their shards, at the same positions among each layer's variables.

    From now on the cross-entropy takes logits in parts.

    Args:
        splits: of the variables.
        placements: of the shards.
        strategy: the replicas, each of which has a copy of every shard.
    """
    _refuse_old_files()
    losses.install()
    by_layer: dict = {}
    for split in splits:
        by_layer.setdefault(id(split.layer), []).append(split)
    for own in by_layer.values():
        _split_layer(own[0].layer, own, placements, strategy)


def _split_layer(layer: keras.layers.Layer, splits: Sequence[VariableSplit], placements, strategy) -> None:
    shards_of: dict[int, list] = {}
    for split in splits:
        variable = getattr(layer, split.attribute)
        if split.axis is None:
            object.__setattr__(layer, split.attribute, FirstTermBias(variable))
            continue
        may_train = any(variable is other for other in layers.own_trainable(layer))
        shards = _create_shards(variable, split.axis, placements, strategy, may_train)
        shards_of[id(variable)] = shards
        shard_patches.mark_shards(shards, sharded_variable.AxisSharding(split.axis), variable.path)
        object.__setattr__(layer, split.attribute, LocalShard(shards))
    shard_patches.replace_variables(layer, shards_of)
    layer.input_spec = None
    if axes.is_convolution(layer):
        override(layer, "call", functools.partial(axes.convolved, layer), by=__name__)
    if quantized.mode(layer) is not None:
        quantized_splits.install(layer, splits, len(placements))
    elif not getattr(layer, "lora_enabled", False):  # whose class saves the sum of the kernel and LoRA's product
        shard_patches.save_merged(layer)
    changed = f"the kernel of {layer.name!r}, which is split over devices"
    shard_patches.refuse_methods(layer, ("enable_lora", "quantize"), changed)


def _create_shards(variable: keras.Variable, axis: int, placements, strategy, may_train: bool) -> list[keras.Variable]:
    value = variables.take_value(variable)  # frees its memory before the shards take any
    found = []
    pieces = np.array_split(value, len(placements), axis)  # those of a table of words may differ by a row
    for at, (placement, piece) in enumerate(zip(placements, pieces, strict=True)):
        with strategy.scope(), device_placement.scope(placement):
            shard = keras_private.Variable(
                piece,
                dtype=variable.dtype,
                trainable=may_train,
                autocast=variables.autocasts(variable),
                aggregation=variable.aggregation,
                synchronization=variable.synchronization,
                name=f"{variable.name}_{at}",
            )
        variables.rename(shard, f"{variable.path}_{at}")
        shard.regularizer, shard.constraint = variable.regularizer, variable.constraint
        found.append(shard)
    return found


@functools.cache
def _refuse_old_files() -> None:
    @wrap("hdf5_format.save_weights_to_hdf5_group")
    def save(stock, group, model):
        if sharded_variable.has_shards(model.weights):
            raise InputError(
                f"{model.name!r} has split layers, which a file of the old format (.h5) cannot hold. Save to a file "
                "that ends with .keras or .weights.h5."
            )
        return stock(group, model)

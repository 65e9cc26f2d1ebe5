"""A model made of Keras's own classes alone, which opens where tfgpu is not installed."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu import atomic
from tfgpu.compat import saving, variables
from tfgpu.core.state import slice_writer
from tfgpu.core.state.sharded_variable import ShardedVariable, merged
from tfgpu.models.layers import ClassToken, PositionEmbedding
from tfgpu.models.recompute import Recompute
from tfgpu.parallel.model_graph import layers_within

_OURS = "tfgpu"
_log = logging.getLogger(__name__)

Layers = list[tuple[keras.layers.Layer, keras.layers.Layer]]
"""Layers, each with its counterpart in the copy."""


def stock_model(model: keras.Model) -> keras.Model:
    """Returns a model that computes what `model` computes and saves without a class of tfgpu's.

    `Recompute` becomes what it wraps; a class token and learned positions become layers of Keras with the same outputs.
    A schedule of tfgpu's becomes the learning rate as it is now, and a metric that Keras lacks (`Perplexity`) is left
    out. With an optimizer that Keras lacks (`LARS`), the copy is not compiled. `MixtureOfExperts`, which Keras lacks,
    stays, and a warning says so.

    Args:
        model: a built model. Classes that are neither Keras's nor tfgpu's stay as they are.

    Returns:
        `model` itself if nothing of it is tfgpu's; else a copy in host memory. The copy has the optimizer's state,
        unless it has other trainable variables.

    Example:
        >>> inputs = keras.Input((8,))
        >>> outputs = Recompute(keras.Sequential([keras.layers.Dense(8), keras.layers.ReLU()]))(inputs)
        >>> [type(layer).__name__ for layer in stock_model(keras.Model(inputs, outputs)).layers]
        ['InputLayer', 'Sequential']
    """
    if not _needs_copy(model):
        return model
    with tf.init_scope(), tf.device("CPU:0"):
        made, layers = _copy(model)
        _say_what_stays(made)
        for layer, new in layers:
            new.set_weights(_weights(layer))
        if _compile_as(model, made):
            made.optimizer.build(made.trainable_variables)
            for new, old in _states(model.optimizer, made.optimizer):
                new.assign(keras.ops.convert_to_numpy(old))
    return made


def save_stock_model(model: keras.Model, path: str | os.PathLike) -> None:
    """Saves what `stock_model` returns, without a copy of the weights in memory.

    Args:
        model: as for `stock_model`. One with weights that are spread over several workers is saved as it is.
        path: of the `.keras` file, which appears whole.

    Example:
        >>> save_stock_model(keras.Sequential([keras.Input((8,)), Recompute(keras.layers.Dense(8))]), "model.keras")
        >>> [type(layer).__name__ for layer in keras.models.load_model("model.keras").layers]
        ['Dense']
    """
    if not _needs_copy(model):
        model.save(path)
        return
    sources: dict[int, object] = {}
    with tf.init_scope(), tf.device("CPU:0"):
        with variables.deferred():
            made, layers = _copy(model)
        _say_what_stays(made)
        for layer, new in layers:
            # Variables, the shards of some, or arrays.
            held = _weights(layer) if isinstance(layer, ClassToken | PositionEmbedding) else merged(layer.weights)
            sources |= {id(each): value for each, value in zip(new.weights, held, strict=True)}
        if _compile_as(model, made):
            for each in made.trainable_variables:  # an optimizer asks for the identity of a TensorFlow variable
                variables.set_held(each, tf.Variable(0.0, trainable=False))
            with variables.deferred():
                made.optimizer.build(made.trainable_variables)
            sources |= {id(new): old for new, old in _states(model.optimizer, made.optimizer)}
        with atomic.replacing(Path(path), suffix=".keras") as aside:
            saving.write_model(made, str(aside), slice_writer.write, lambda value: sources.get(id(value), value))


def _needs_copy(model: keras.Model) -> bool:
    """Whether a model has something of tfgpu's; a class of the user's only its own code can rebuild."""
    return _is_graph(model) and _is_ours([model.get_config(), model.get_compile_config() if model.compiled else None])


def _is_graph(layer: keras.layers.Layer) -> bool:
    """Whether it is a Sequential or functional model of no class of its own."""
    return type(layer) in (keras.Sequential, keras.Model) or type(layer).__name__ == "Functional"


def _is_ours(config: Any) -> bool:
    """Whether a serialized configuration names a class of tfgpu's."""
    if isinstance(config, list | tuple):
        return any(map(_is_ours, config))
    if not isinstance(config, dict):
        return False
    module, name = config.get("module"), config.get("registered_name")
    if isinstance(module, str) and module.partition(".")[0] == _OURS or str(name).startswith(f"{_OURS}>"):
        return True
    return any(map(_is_ours, config.values()))


def _stock_settings(settings: dict[str, Any], optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    settings = json.loads(json.dumps(settings))
    config = settings["optimizer"]["config"]
    config = config.get("inner_optimizer", {"config": config})["config"]  # a loss scale wraps an optimizer
    if _is_ours(config.get("learning_rate")):
        config["learning_rate"] = float(np.asarray(optimizer.learning_rate))
    for name in ("metrics", "weighted_metrics"):
        settings[name] = _without_ours(settings.get(name))
    return settings


def _without_ours(metrics: Any) -> Any:
    if isinstance(metrics, list):
        return [_without_ours(each) for each in metrics if not _is_ours(each)]
    if isinstance(metrics, dict) and "class_name" not in metrics:
        return {name: _without_ours(each) for name, each in metrics.items() if not _is_ours(each)}
    return metrics


def _compile_as(model: keras.Model, made: keras.Model) -> bool:
    """Compiles a copy as the original; returns whether Keras can. The copy's optimizer is not built."""
    if not model.compiled:
        return False
    settings = _stock_settings(model.get_compile_config(), model.optimizer)
    if _is_ours(settings):
        return False
    made.compile(**keras.saving.deserialize_keras_object(settings))
    return True


def _say_what_stays(made: keras.Model) -> None:
    """Names the classes of tfgpu's that a copy still has."""
    kinds = {type(layer) for layer in layers_within(made).values()}
    if found := sorted(kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] == _OURS):
        text = "The file of %r opens only where tfgpu is installed: Keras has no counterpart of %s."
        _log.warning(text, made.name, ", ".join(found))


def _copy(model: keras.Model) -> tuple[keras.Model, Layers]:
    """A copy, not compiled, in which Keras's layers take the place of tfgpu's, and the layers that have weights."""

    def clone(layer: keras.Operation) -> keras.Operation:
        if not isinstance(layer, keras.layers.Layer):  # such as a slice of a tensor
            return type(layer).from_config(layer.get_config())
        if isinstance(layer, Recompute):
            return clone(layer.layer)
        if _is_graph(layer):
            made, inner = _copy(layer)
            copies.extend(inner)
            return made
        made = _in_keras(layer)
        copies.append((layer, made))
        return made

    copies: Layers = []
    compiled, model.compiled = model.compiled, False  # `clone_model` would compile the copy of a functional model
    try:
        cloned = keras.models.clone_model(model, clone_function=clone)
    finally:
        model.compiled = compiled
    if isinstance(model, keras.Sequential):
        return keras.Sequential([*cloned.inputs, *cloned.layers], name=model.name), copies
    return keras.Model(cloned.input, cloned.output, name=model.name), copies


def _in_keras(layer: keras.layers.Layer) -> keras.layers.Layer:
    """A new layer of Keras's own with the same outputs."""
    if isinstance(layer, ClassToken):
        length, width = layer.output.shape[1:]
        # Named, since names that Keras chooses differ from copy to copy.
        patches = keras.Input((length - 1, width), dtype=layer.compute_dtype, name="patches")
        padding = keras.layers.ZeroPadding1D((1, 0), dtype=layer.dtype_policy, name="padding")
        parts = [patches, padding, _bias((length, width), layer.dtype_policy, "token")]
        return keras.Sequential(parts, name=layer.name)
    if isinstance(layer, PositionEmbedding):
        return _bias(layer.positions.shape, layer.dtype_policy, layer.name)
    return type(layer).from_config(layer.get_config())


def _bias(shape: tuple[int, int], policy: keras.DTypePolicy, name: str) -> keras.layers.Layer:
    """A layer that adds a bias of any shape: a product with ones leaves its inputs as they are."""
    return keras.layers.EinsumDense("btc,c->btc", shape, bias_axes="tc", dtype=policy, name=name)


def _weights(layer: keras.layers.Layer) -> list[np.ndarray]:
    """The weights that the layer's counterpart gets."""
    if isinstance(layer, ClassToken):
        bias = np.zeros(layer.output.shape[1:], layer.token.dtype)
        bias[0] = keras.ops.convert_to_numpy(layer.token)[0, 0]
    elif isinstance(layer, PositionEmbedding):
        bias = keras.ops.convert_to_numpy(layer.positions)
    else:
        return layer.get_weights()
    return [np.ones(bias.shape[-1:], bias.dtype), bias]


def _states(optimizer, made) -> Iterator[tuple[keras.Variable, keras.Variable | ShardedVariable]]:
    """Variables of a copy's optimizer, each with the original's; none if they are not alike."""

    def state(each):
        return [variable for variable in merged(each.variables) if variable.path.rpartition("/")[2] != "learning_rate"]

    theirs, ours = state(made), state(optimizer)
    alike = [tuple(each.shape) for each in ours] == [tuple(each.shape) for each in theirs]
    return zip(theirs, ours, strict=True) if alike else iter(())

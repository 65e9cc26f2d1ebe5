"""A model made of Keras's own classes alone, which opens where tfgpu is not installed."""

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.models.layers import ClassToken, PositionEmbedding
from tfgpu.models.recompute import Recompute

_OURS = "tfgpu"


def stock_model(model: keras.Model) -> keras.Model:
    """Returns a model that computes what `model` computes and saves without a class of tfgpu's.

    `Recompute` becomes what it wraps; a class token and learned positions become layers of Keras with the same outputs.
    A schedule of tfgpu's becomes the learning rate as it is now, and a metric that Keras lacks (`Perplexity`) is left
    out. With an optimizer that Keras lacks (`LARS`), the copy is not compiled.

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
    if not _is_graph(model):
        return model  # a class of the user's, which only its own code can rebuild
    settings = model.get_compile_config() if model.compiled else None
    if not _is_ours(model.get_config()) and not _is_ours(settings):
        return model
    with tf.init_scope(), tf.device("CPU:0"):
        made = _copy(model)
        if settings:
            settings = _stock_settings(settings, model.optimizer)
            if not _is_ours(settings):
                made.compile_from_config(settings)
                _copy_state(model.optimizer, made.optimizer)
    return made


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


def _copy(model: keras.Model) -> keras.Model:
    """A copy with its weights, not compiled, in which Keras's layers take the place of tfgpu's."""

    def clone(layer: keras.Operation) -> keras.Operation:
        if not isinstance(layer, keras.layers.Layer):  # such as a slice of a tensor
            return type(layer).from_config(layer.get_config())
        if isinstance(layer, Recompute):
            return clone(layer.layer)
        if _is_graph(layer):
            return _copy(layer)
        made = _in_keras(layer)
        copies.append((layer, made))
        return made

    copies: list[tuple[keras.layers.Layer, keras.layers.Layer]] = []
    cloned = keras.models.clone_model(model, clone_function=clone)
    for layer, made in copies:
        made.set_weights(_weights(layer))
    if isinstance(model, keras.Sequential):  # `clone_model` has compiled its copy
        return keras.Sequential([*cloned.inputs, *cloned.layers], name=model.name)
    return keras.Model(cloned.input, cloned.output, name=model.name)


def _in_keras(layer: keras.layers.Layer) -> keras.layers.Layer:
    """A new layer of Keras's own with the same outputs."""
    if isinstance(layer, ClassToken):
        length, width = layer.output.shape[1:]
        padding = keras.layers.ZeroPadding1D((1, 0), dtype=layer.dtype_policy)
        return keras.Sequential([padding, _bias((length, width), layer.dtype_policy, "token")], name=layer.name)
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
        return [np.ones(bias.shape[-1:], bias.dtype), bias]
    if isinstance(layer, PositionEmbedding):
        bias = keras.ops.convert_to_numpy(layer.positions)
        return [np.ones(bias.shape[-1:], bias.dtype), bias]
    return layer.get_weights()


def _copy_state(optimizer: keras.optimizers.Optimizer, made: keras.optimizers.Optimizer) -> None:
    """Gives a copy's optimizer the state of the original, if their variables are alike."""

    def state(each):
        return [variable for variable in each.variables if variable.path.rpartition("/")[2] != "learning_rate"]

    ours, theirs = state(optimizer), state(made)
    if [tuple(each.shape) for each in ours] != [tuple(each.shape) for each in theirs]:
        return
    for new, old in zip(theirs, ours, strict=True):
        new.assign(keras.ops.convert_to_numpy(old))

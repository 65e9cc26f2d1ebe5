"""What tells two calls of layers apart, as far as what they compute depends on it: equal blocks are tried once."""

import json

import keras
import tensorflow as tf

from tfgpu.compat import attributes
from tfgpu.compat import keras as private
from tfgpu.compat import layers as private_layers
from tfgpu.core.row_mixing.trials.drawn_inputs import spec_of

_PLAIN = (int, float, str, bool, bytes, type(None))
_NAMES = ("name", "shared_object_id")


def of_call(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> tuple:
    """A key of a layer and of what it is called with: shapes without rows, dtypes, and values that are no tensors."""
    return of_layer(layer), *of_arguments(args, kwargs), private.is_training()


def of_arguments(args: tuple, kwargs: dict) -> tuple:
    """A key of what something is called with."""
    leaves = keras.tree.flatten((args, kwargs))
    return tuple(spec_of(leaf) if isinstance(leaf, tf.Tensor) else _of_value(leaf) for leaf in leaves), tuple(kwargs)


def of_layer(layer: keras.layers.Layer) -> tuple:
    """A key of a layer's class, settings, variables and inner layers; not of its weights' values and its name."""
    within = private_layers.layers_within(layer, include_self=False, recursive=False)
    own = tuple((tuple(v.shape), str(v.dtype), v.trainable, v.aggregation) for v in private_layers.own_variables(layer))
    settings = _settings(layer) if type(layer).__module__.split(".")[0] == "keras" else _attributes(layer)
    policy = layer.dtype_policy.name, layer.trainable
    return type(layer).__qualname__, id(type(layer)), policy, settings, own, tuple(map(of_layer, within))


def _settings(layer: keras.layers.Layer) -> object:
    """Of a layer of Keras's, which says all of itself."""
    if isinstance(layer, keras.Model):
        return id(layer)
    try:
        return json.dumps(_without_names(layer.get_config()), sort_keys=True, default=lambda thing: id(thing))
    except Exception:  # of a setting that cannot be written
        return id(layer)


def _without_names(config: object) -> object:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key not in _NAMES}
    return [_without_names(each) for each in config] if isinstance(config, (list, tuple)) else config


def _attributes(layer: keras.layers.Layer) -> tuple:
    """Of a layer of the user's, which may have settings that its config has not."""
    if isinstance(layer, keras.Model):
        return (id(layer),)
    others = {*vars(keras.layers.Layer()), *attributes.OF_TRACKING}
    names = sorted(name for name in vars(layer) if name not in others and not name.startswith("_tfgpu"))
    return tuple((name, _of_value(vars(layer)[name])) for name in names)


def _of_value(value: object) -> object:
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        return tuple(map(_of_value, value))
    if isinstance(value, dict):
        return tuple((str(key), _of_value(each)) for key, each in value.items())
    if isinstance(value, (keras.layers.Layer, keras.Variable)):
        return type(value).__name__  # compared by themselves
    if isinstance(value, keras.Initializer):
        return "initializer"
    if isinstance(value, keras.random.SeedGenerator):
        return "seeds"
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        return "tensor"
    return id(value)

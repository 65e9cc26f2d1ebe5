"""What tells two calls of layers apart, as far as what they compute depends on it: equal blocks are tried once."""

import json
from collections.abc import Collection

import keras
import tensorflow as tf

from tfgpu.compat import attributes, slots
from tfgpu.compat import keras as private
from tfgpu.compat import layers as private_layers
from tfgpu.core import step_blocks, step_context
from tfgpu.core.row_mixing import settings
from tfgpu.core.row_mixing.trials.drawn_inputs import spec_of
from tfgpu.core.trial_cache import code_digest

_PLAIN = (int, float, str, bool, bytes, type(None))
_NAMES = ("name", "shared_object_id")


def of_call(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> tuple:
    """A key of a layer and of what it is called with: shapes without rows, dtypes, and values that are no tensors."""
    return of_layer(layer), *of_arguments(args, kwargs), private.is_training()


def of_arguments(args: tuple, kwargs: dict) -> tuple:
    """A key of what something is called with."""
    leaves = keras.tree.flatten((args, kwargs))
    return tuple(spec_of(leaf) if isinstance(leaf, tf.Tensor) else _of_value(leaf) for leaf in leaves), tuple(kwargs)


def of_owner(owner: object, changing: Collection[str] = ()) -> tuple:
    """A key of a loss's or metric's attributes, and of what its code uses.

    Args:
        owner: a loss or metric.
        changing: names that the code itself changes, and which are left out.
    """
    own = [item for item in vars(owner).items() if not item[0].startswith("_tfgpu") and item[0] not in changing]
    used = settings.key(owner, _numbers(owner), changing) if changing else of_code(owner)
    return tuple((name, _of_value(value)) for name, value in own), used


def of_code(owner: object, changing: Collection[str] = ()) -> tuple:
    """A key of a layer, loss, metric or model, and of all that its code uses.

    Its settings, less the names in `changing`, count at once. A digest of all, which takes longer, is made once in each
    epoch of a `fit` or `evaluate`, and for `strategy.run` in each trace.
    """
    used, run = settings.key(owner, _numbers(owner), changing), step_context.current().run
    if run is None and tf.executing_eagerly():
        return used, None
    known = {} if run is None else _digests_of(run)
    if (id(owner), used) not in known:
        known[id(owner), used] = owner, code_digest.of_or_none(owner, skips_unknown=True)
    return used, known[id(owner), used][1]


def _numbers(owner: object) -> dict[str, list]:
    return vars(slots.of(owner)).setdefault("numbers", {})


def _digests_of(run: step_blocks.Run) -> dict:
    """What is known in this epoch: between two, callbacks may change what the code uses."""
    held = vars(slots.of(run))
    if "digests" not in held:
        held["digests"] = {}
        run.epoch_ends.append(held["digests"].clear)
    return held["digests"]


def of_layer(layer: keras.layers.Layer) -> tuple:
    """A key of a layer's class, settings, variables and inner layers; not of its weights' values and its name."""
    within = private_layers.layers_within(layer, include_self=False, recursive=False)
    own = tuple((tuple(v.shape), str(v.dtype), v.trainable, v.aggregation) for v in private_layers.own_variables(layer))
    is_of_keras = type(layer).__module__.split(".")[0] == "keras"
    options = _settings(layer) if is_of_keras else _attributes(layer)
    policy = layer.dtype_policy.name, layer.trainable
    return type(layer).__qualname__, id(type(layer)), policy, options, own, tuple(map(of_layer, within))


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

"""Names of layers and weights that are stable across files, clones and grown models, unlike Keras's paths."""

from collections.abc import Iterator

import keras

from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError
from tfgpu.parallel.zero import sharding


def layers(model: keras.Model) -> dict[str, keras.layers.Layer]:
    """All layers by name; those of an inner model as `inner/name`, after the inner model itself.

    Example:
        >>> inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a")], name="inner")
        >>> list(layers(keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2, name="head")])))
        ['inner', 'inner/a', 'head']
    """
    return dict(_walk(model, ""))


def _walk(model: keras.Model, before: str) -> Iterator[tuple[str, keras.layers.Layer]]:
    for layer in model.layers:
        yield before + layer.name, layer
        if isinstance(layer, keras.Model):
            yield from _walk(layer, f"{before}{layer.name}/")


def check_whole(model: keras.Model, what: str) -> None:
    """Raises `InputError` if weights are sharded across devices."""
    if any(sharded_variable.shard_info(v) is not None or sharding.is_fully_sharded(v) for v in model.weights):
        raise InputError(f"{model.name} has weights sharded across devices. {what} it first, then shard it.")


def trainable(model: keras.Model) -> dict[str, keras.Variable]:
    """The trainable weights, with shards merged, by their layer's name and their index in it.

    Example:
        >>> list(trainable(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])))
        ['head/0', 'head/1']
    """
    names = {}
    for name, layer in layers(model).items():
        if not isinstance(layer, keras.Model):
            for at, variable in enumerate(sharded_variable.merged(layer.weights)):
                names.setdefault(id(variable), f"{name}/{at}")
    for at, variable in enumerate(sharded_variable.merged(model.weights)):
        names.setdefault(id(variable), f"/{at}")  # the model's own
    return {names.get(id(v), f"//{at}"): v for at, v in enumerate(sharded_variable.merged(model.trainable_variables))}


def retrace(model: keras.Model) -> None:
    """Makes the next `fit` or `evaluate` trace its steps again, so that they see a change to the model."""
    model.train_function = model.test_function = None

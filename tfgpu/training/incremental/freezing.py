"""Freezing layers, and learning rates by layer (Howard and Ruder, ULMFiT, 2018)."""

import fnmatch
from collections.abc import Mapping

import keras

from tfgpu.errors import InputError, is_number
from tfgpu.optim import parameter_groups
from tfgpu.training.incremental import names


def freeze(model: keras.Model, *patterns: str) -> list[str]:
    """Freezes layers from the next `fit` on, without recompiling.

    A frozen layer has no gradient, no weight decay, and no part in a clipping norm; a frozen BatchNormalization uses
    its moving statistics and does not update them, as in Keras. The optimizer keeps its state of frozen weights, unless
    it keeps weight averages (EMA).

    Args:
        model: a built model.
        patterns: layer names, with the wildcards `*` and `?`: "conv1", "block_?_*". A layer of an inner model matches
            by its name, or as `inner/name`.

    Returns:
        The names of the matching layers.

    Raises:
        InputError: a pattern matches no layer.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="body"), keras.layers.Dense(2)])
        >>> freeze(model, "bod*"), len(model.trainable_weights)
        (['body'], 2)
    """
    return _set(model, patterns, False)


def unfreeze(model: keras.Model, *patterns: str) -> list[str]:
    """Unfreezes layers; without patterns, all.

    If the optimizer does not know their weights, it is recreated, with its state of all other weights.

    Args:
        model: a built model.
        patterns: as for `freeze`.

    Returns:
        The names of the matching layers.

    Raises:
        InputError: a pattern matches no layer.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
        >>> names = freeze(model, "*")
        >>> len(unfreeze(model)), len(model.trainable_weights)
        (2, 4)
    """
    return _set(model, patterns or ("*",), True)


def _set(model: keras.Model, patterns: tuple[str, ...], trainable: bool) -> list[str]:
    if not patterns:
        raise InputError('`freeze` needs the names of layers, or a pattern such as "conv*".')
    if not isinstance(model, keras.Model):
        raise InputError(f"`model` must be a Keras model. Received: {model!r}.")
    names.check_whole(model, "Unfreeze" if trainable else "Freeze")
    layers = names.layers(model)
    found = {name: layers[name] for pattern in patterns for name in _matching(pattern, layers)}
    if trainable:  # a model that is frozen as a whole freezes its layers too
        model.trainable = model.trainable or _thaw(model)
    for name, layer in found.items():
        if trainable:
            words = name.split("/")
            for outer in (layers["/".join(words[:end])] for end in range(1, len(words))):
                _ = outer.trainable or _thaw(outer)
        layer.trainable = trainable
    if model.compiled and model.optimizer is not None:
        _fit_optimizer(model)
    names.retrace(model)
    return list(found)


def _thaw(model: keras.Model) -> bool:
    """Unfreezes a model that was frozen as a whole, and freezes each of its layers instead."""
    inner = list(model.layers)
    model.trainable = True
    for layer in inner:
        layer.trainable = False
    return True


def _matching(pattern: str, layers: Mapping[str, keras.layers.Layer]) -> list[str]:
    is_found = fnmatch.fnmatchcase
    found = [name for name in layers if is_found(name, pattern) or is_found(name.rpartition("/")[2], pattern)]
    if not found:
        raise InputError(f"No layer matches {pattern!r}. Layers: {', '.join(list(layers)[:40])}.")
    return found


def _fit_optimizer(model: keras.Model) -> None:
    """Recreates the optimizer if it does not know some trainable weights.

    One that keeps averages must not know any others: at the end of `fit`, Keras assigns the averages to the trainable
    weights in order, whichever weights the optimizer knows.
    """
    old = model.optimizer
    known = {id(v) for v in parameter_groups.built_on(old)}
    learning = {id(v) for v in model.trainable_variables}
    averages = parameter_groups.inner_of(old).use_ema
    if not known or known == learning or (learning <= known and not averages):
        return
    with model.distribute_strategy.scope():
        new = parameter_groups.unbuilt_copy(old)
        parameter_groups.built_like(old, new)
        wanted = learning if averages else learning | known
        new.build([v for v in model.weights if id(v) in wanted])
        parameter_groups.copy_common_state(old, new)
    model.optimizer = new


def discriminative(
    optimizer: str | keras.optimizers.Optimizer, model: keras.Model, factors: Mapping[str, float]
) -> keras.optimizers.Optimizer:
    """Makes an optimizer with a learning rate factor per layer.

    A layer's factor multiplies the learning rate, not the gradient, which Adam would cancel. It corresponds to
    parameter groups in other frameworks: weight decay, which Keras multiplies by the rate, is scaled too. Schedules,
    clipping, averages (EMA), accumulation and loss scaling are shared. `.keras` files keep the factors: import
    `tfgpu.training.incremental` before loading one.

    Args:
        optimizer: any Keras optimizer, or its name; it stays unchanged, and its state is copied.
        model: the built model with the layers.
        factors: by layer name or pattern (see `freeze`), at least 0; the first matching pattern counts. All other
            layers have 1.

    Returns:
        The optimizer for `compile`.

    Raises:
        InputError: a pattern matches no layer, a factor is invalid, or `optimizer` is a `MultiOptimizer`.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="body"), keras.layers.Dense(2)])
        >>> model.compile(discriminative(keras.optimizers.AdamW(1e-3), model, {"body": 0.1}), "mse")

    Source: J. Howard and S. Ruder, "Universal Language Model Fine-tuning", 2018, arXiv:1801.06146.
    """
    if not isinstance(factors, Mapping) or not factors:
        raise InputError(f'`factors` must be a mapping such as {{"conv*": 0.1}}. Received: {factors!r}.')
    if not isinstance(model, keras.Model) or not model.built:
        raise InputError(f"`model` must be a built Keras model. Received: {model!r}.")
    layers, by_path = names.layers(model), {}
    for pattern, factor in factors.items():
        if not is_number(factor) or factor < 0:
            raise InputError(f"The factor of {pattern!r} must be a number of at least 0. Received: {factor!r}.")
        for name in _matching(pattern, layers):
            for variable in layers[name].weights:
                by_path.setdefault(variable.path, float(factor))
    with model.distribute_strategy.scope():
        return parameter_groups.with_factors(keras.optimizers.get(optimizer), by_path)


def by_depth(model: keras.Model, factor: float = 1 / 2.6) -> dict[str, float]:
    """Factors for `discriminative`: 1 for the last layer with weights, times `factor` for each layer before it.

    Args:
        model: a built model; an inner model counts as one layer.
        factor: between adjacent layers; 1 / 2.6 by default, as in ULMFiT.

    Example:
        >>> layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> by_depth(model, 0.5)
        {'a': 0.5, 'b': 1.0}
    """
    found = [layer.name for layer in model.layers if layer.weights]
    return {name: float(factor) ** (len(found) - 1 - at) for at, name in enumerate(found)}

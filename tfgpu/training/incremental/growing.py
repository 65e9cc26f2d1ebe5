"""Adds classes to a model and keeps the old logits bit for bit."""

import keras

from tfgpu.core.state import sharded_variable, training_state
from tfgpu.errors import InputError, whole_number
from tfgpu.optim import parameter_groups
from tfgpu.training.incremental import names

_AFTER_HEAD = (keras.layers.Activation, keras.layers.Softmax, keras.layers.Dropout)


@keras.saving.register_keras_serializable(package="tfgpu")
class GrownDense(keras.layers.Dense):
    """A Dense layer whose units were added in groups.

    It has one kernel and one bias, like Dense, but multiplies each group of columns separately: a product with a wider
    matrix may round the same columns differently (measured on a CPU: in 4 of 10 shapes).

    Args:
        parts: the number of units in each group.

    Example:
        >>> layer = GrownDense(parts=(10, 2))
        >>> layer(keras.ops.ones((1, 4))).shape, layer.units
        (TensorShape([1, 12]), 12)
    """

    def __init__(self, units: int | None = None, *, parts, **options):
        parts = tuple(int(part) for part in parts)
        if units is not None and units != sum(parts):
            raise InputError(f"`parts` must add up to `units`. Received: units={units}, parts={parts}.")
        super().__init__(sum(parts), **options)
        self.parts = parts

    def call(self, inputs, training=None):
        found, begin = [], 0
        for part in self.parts:
            some = keras.ops.matmul(inputs, self.kernel[:, begin : begin + part])
            if self.bias is not None:
                some = keras.ops.add(some, self.bias[begin : begin + part])
            found.append(some)
            begin += part
        logits = keras.ops.concatenate(found, axis=-1)
        return logits if self.activation is None else self.activation(logits)

    def get_config(self):
        return {**super().get_config(), "parts": list(self.parts)}


def grow(model: keras.Model, classes: int, *, head: str | None = None) -> keras.Model:
    """Copies a trained model and adds classes. The original stays unchanged (a teacher for `Distilled`).

    The weights, the random state and the optimizer's state are copied; the head's new columns come from its
    initializers. The old logits keep their values bit for bit. After a softmax, the old classes' probabilities shrink,
    but keep their ratios.

    Args:
        model: a built Sequential or functional model that ends in a Dense layer (an Activation, Softmax or Dropout may
            follow). It is grown under its own strategy. If it is compiled, so is the grown one, with the same loss and
            metrics; metrics whose `num_classes` equals the head's units get the new number.
        classes: units of the grown head, more than it has.
        head: the name of the Dense layer, if the model has several outputs.

    Returns:
        A model of the same class, whose layers have the same names.

    Raises:
        InputError: the head is not a Dense layer, is quantized or has LoRA, or feeds other layers with weights;
            `classes` is too small; the model is subclassed or not built; the optimizer is sharded.

    Example:
        >>> old = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> new = grow(old, classes=3)
        >>> x = keras.ops.ones((1, 4))
        >>> bool(keras.ops.all(new(x)[:, :2] == old(x))), new.count_params()
        (True, 15)
    """
    layer = _head(model, head)
    names.check_whole(model, "Grow")
    if whole_number("classes", classes) <= layer.units:
        raise InputError(f"`classes` must be more than the {layer.units} of {layer.name}. Received: {classes!r}.")

    def clone(found):
        config = found.get_config()
        if found is not layer:
            return type(found).from_config(config)
        known = getattr(layer, "parts", (layer.units,))
        config |= {"units": classes, "parts": (*known, classes - layer.units)}
        return GrownDense.from_config(config)

    with model.distribute_strategy.scope():
        try:
            grown = keras.models.clone_model(model, clone_function=clone)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{model.name} could not be cloned with {classes} classes: {error} Register your own classes with "
                "`@keras.saving.register_keras_serializable()`, and compile with settings for this number of classes."
            ) from error
        ends = [(a.shape[-1], b.shape[-1]) for a, b in zip(model.outputs, grown.outputs, strict=True)]
        if (layer.units, classes) not in ends:
            raise InputError(
                f"{layer.name} is not an output of {model.name}. Pass its last Dense layer's name as `head`."
            )
        if model.compiled and (config := model.get_compile_config()):
            counted = _counted(config, layer.units, classes)
            if counted != config:
                grown.compile_from_config(counted)
        _take_over(model, grown)
    return grown


def _take_over(model: keras.Model, grown: keras.Model) -> None:
    old, new = sharded_variable.merged(model.weights), sharded_variable.merged(grown.weights)
    for before, after in zip(old, new, strict=True):
        if before.shape[:-1] != after.shape[:-1]:
            raise InputError(
                f"{before.path} depends on the head's output, which changes size. The head must be the model's last "
                "layer with weights."
            )
    for before, after in zip(old, new, strict=True):
        after.assign(parameter_groups.grown(before.numpy(), after.numpy()))
        after.trainable = before.trainable
    for before, after in zip(training_state.draws(model).values(), training_state.draws(grown).values(), strict=True):
        after.assign(before.numpy())
    if model.compiled and model.optimizer is not None:
        twin = {id(before): after for before, after in zip(model.weights, grown.weights, strict=True)}
        optimizer, trained = model.optimizer, parameter_groups.built_on(model.optimizer)
        if any(id(v) not in twin for v in trained):
            raise InputError("The optimizer is sharded, or trains weights of another model. Grow first, then shard.")
        new = type(optimizer).from_config(optimizer.get_config())
        parameter_groups.copy_exclusions(optimizer, new, [(v, twin[id(v)]) for v in trained])
        if trained:
            new.build([twin[id(v)] for v in trained])
            parameter_groups.copy_state(optimizer, new)
        grown.optimizer = new


def _counted(config, units: int, classes: int):
    """Replaces the number of classes in a compile configuration."""
    if isinstance(config, dict):
        found = {name: _counted(value, units, classes) for name, value in config.items()}
        return found | ({"num_classes": classes} if config.get("num_classes") == units else {})
    return [_counted(value, units, classes) for value in config] if isinstance(config, list | tuple) else config


def _head(model: keras.Model, name: str | None) -> keras.layers.Dense:
    if not isinstance(model, keras.Model) or not hasattr(model, "inputs") or not model.built or not model.inputs:
        raise InputError(
            f"`model` must be a built Sequential or functional model. Received: {type(model).__name__}. For a "
            "subclassed model, create the larger head yourself and copy the old columns."
        )
    if name is None and len(model.outputs) > 1:
        raise InputError(f"{model.name} has {len(model.outputs)} outputs. Choose the Dense layer to grow: `head=NAME`.")
    if name is not None and name not in [layer.name for layer in model.layers]:
        raise InputError(f"{model.name} has no layer {name!r}. Its last ones: {[x.name for x in model.layers[-4:]]}.")
    found = model.get_layer(name) if name else next(x for x in reversed(model.layers) if not isinstance(x, _AFTER_HEAD))
    if type(found) not in (keras.layers.Dense, GrownDense):
        raise InputError(
            f"The head must be a Dense layer. Received: {type(found).__name__} {found.name!r}. End the model in a "
            "Dense layer, or pass its name as `head`."
        )
    if found.lora_enabled or found.quantization_mode is not None:
        raise InputError(f"{found.name} is quantized or has LoRA. Grow the model before that.")
    return found

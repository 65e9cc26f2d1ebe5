"""The outputs of a recipe's model, with their losses and metrics, as the data's targets require."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from tfgpu import models
from tfgpu.data import Info
from tfgpu.errors import InputError
from tfgpu.training.perplexity import Perplexity


@dataclass(frozen=True)
class Head:
    """One output of a model.

    Attributes:
        kind: `"class"`, `"one_hot"`, `"tokens"`, `"places"` (logits), `"numbers"`, or `"own"`: the model has the loss.
        units: numbers per example (or place).
        name: of the target; "" for the only one without a name.
        shape: of one example's output.
    """

    kind: str
    units: int
    name: str = ""
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Numbers per example."""
        return math.prod(self.shape) if self.kind == "places" else self.units

    @property
    def loss(self) -> keras.losses.Loss | None:
        """A new loss: cross-entropy of logits, or the squared error of numbers."""
        if self.kind == "own":
            return None
        if self.kind == "numbers":
            return keras.losses.MeanSquaredError()
        if self.kind == "one_hot":
            return keras.losses.CategoricalCrossentropy(from_logits=True)
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @property
    def metrics(self) -> list[Any]:
        """New metrics. Keras's R2 score takes one number or one row of numbers per example."""
        if self.kind == "own":
            return []
        if self.kind == "tokens":
            return ["accuracy", Perplexity()]
        if self.kind != "numbers":
            return ["accuracy"]
        errors = [keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.RootMeanSquaredError(name="rmse")]
        return errors + ([keras.metrics.R2Score(name="r2_score")] if len(self.shape) == 1 else [])

    def names(self) -> list[str]:
        """The names of its metrics in the logs."""
        names = [each if isinstance(each, str) else each.name for each in self.metrics]
        return [f"{self.name}_{name}" if self.name else name for name in names]


_MOST_OUTPUTS = 1 << 16
CLASSES = (Head("class", 0),)
"""One class per example; to compile, the number of classes does not matter."""


def heads_of(info: Info, *, classes: int | None = None) -> tuple[Head, ...]:
    """The outputs that a run's data needs.

    Args:
        info: the data's facts.
        classes: the number of classes of masks in files.

    Raises:
        InputError: a target that recipes do not train.
    """
    if info.targets is None:
        return (Head(info.labels, info.classes),)
    if not isinstance(info.targets, Mapping):
        return (_numbers("", info.targets.shape),)
    if any(target.kind == "other" for target in info.targets.values()):
        return tuple(Head("own", target.classes, name) for name, target in info.targets.items())
    return tuple(_named(name, target, info, classes) for name, target in info.targets.items())


def _numbers(name: str, shape: tuple[int, ...]) -> Head:
    return Head("numbers", math.prod(shape), name, shape or (1,))


def _named(name: str, target: Any, info: Info, classes: int | None) -> Head:
    if target.kind == "numbers":
        return _numbers(name, target.shape)
    if target.kind == "places":
        if not (target.classes or classes):
            raise InputError(
                f"{info.name} has masks in files, which are not read to count their classes. Received: no `classes`. "
                "Use --classes, one more than the largest number in a mask."
            )
        units = target.classes or classes
        return Head("places", units, name, (*target.shape, units))
    if target.classes < 2 or target.classes > max(info.train_examples, 2):
        raise InputError(
            f"The target {name!r} of {info.name} holds whole numbers, which are classes. Received: {target.classes} "
            f"classes in {info.train_examples} training examples. For numbers to predict use --task "
            f"{name}=regression; number classes from 0 without gaps."
        )
    return Head("class", target.classes, name, (target.classes,))


def metric_names(heads: Sequence[Head]) -> list[str]:
    """The names of all metrics in the logs except the loss.

    Example:
        >>> metric_names([Head("class", 3, "kind", (3,)), Head("numbers", 1, "price", (1,))])
        ['kind_accuracy', 'price_mae', 'price_rmse', 'price_r2_score']
    """
    if len(heads) == 1:  # then Keras does not put the output's name into the logs
        return replace(heads[0], name="").names()
    return [name for head in heads for name in head.names()]


def build(name: str, info: Info, heads: Sequence[Head], options: Mapping[str, Any]) -> keras.Model:
    """Builds a model by name with these outputs.

    Args:
        name: as for `models.build`. A user's function gets `input_shape` (a dict for named inputs) and
            `classes`: the number of outputs, or these by the targets' names, and must return such outputs.
        info: the data's facts.
        heads: the outputs.
        options: for the builder.

    Raises:
        InputError: a model that cannot take such inputs, or does not return such outputs.
    """
    named = {head.name: head.units for head in heads if head.name}
    if ":" not in name:
        _check_sizes(name, info, heads)
    if ":" in name:
        own = models.build(name, input_shape=info.input_shape, classes=named or heads[0].units, options=options)
        _check_own(own, name, info, heads)
        return own
    units = sum(head.size for head in heads)
    if isinstance(info.input_shape, Mapping):
        body = _joined(name, info, units, options)
    else:
        body = models.build(name, input_shape=info.input_shape, classes=units, options=options)
    if not named:
        return _shaped(body, heads[0])
    used = {layer.name for layer in body.layers} & named.keys()
    if used:
        raise InputError(f"The model {name!r} has layers named {', '.join(sorted(used))}. Rename these targets.")
    outputs, begin = {}, 0
    for head in heads:
        part = body.output[..., begin : begin + head.size]
        outputs[head.name] = keras.layers.Reshape(head.shape, dtype="float32", name=head.name)(part)
        begin += head.size
    return keras.Model(body.input, outputs, name=body.name)


def _check_sizes(name: str, info: Info, heads: Sequence[Head]) -> None:
    """Rejects targets for which a model by name has no outputs, or would have too many weights."""
    for head in heads:
        if head.kind == "own":
            raise InputError(
                f"A recipe has no loss for the target {head.name!r} of {info.name}, such as boxes. Received: the model "
                f"{name!r}. Use a function (module:function) that returns a model whose `compute_loss` takes it."
            )
        if head.kind == "places" and head.size > _MOST_OUTPUTS:
            raise InputError(
                f"The model {name!r} computes all outputs from all features. Received: {head.size:,} outputs for the "
                f"target {head.name!r}, of shape {head.shape}. Use a function of your own (module:function) that "
                "returns outputs of this shape, such as a convolutional network."
            )


def _joined(name: str, info: Info, units: int, options: Mapping[str, Any]) -> keras.Model:
    """A multilayer perceptron of all inputs, side by side."""
    if name.lower() != "mlp":
        raise InputError(
            f"The model {name!r} takes one input. Received: {info.name} with the inputs {', '.join(info.input_shape)}. "
            "Use mlp, which joins them, or a function of your own (module:function)."
        )
    inputs = {key: keras.Input(shape, name=key) for key, shape in info.input_shape.items()}
    flat = [
        keras.layers.Flatten(name=f"{key}_flat")(each) if len(each.shape) > 2 else each for key, each in inputs.items()
    ]
    x = keras.layers.Concatenate(name="inputs")(flat) if len(flat) > 1 else flat[0]
    body = models.build(name, input_shape=(x.shape[-1],), classes=units, options=options)
    return keras.Model(inputs, body(x), name=f"{body.name}_of_inputs")


def _shaped(model: keras.Model, head: Head) -> keras.Model:
    if len(head.shape) < 2:
        return model
    outputs = keras.layers.Reshape(head.shape, dtype="float32", name="numbers")(model.output)
    return keras.Model(model.input, outputs, name=model.name)


def output_shapes(model: keras.Model) -> Any:
    """One example's shape of each output, in the structure of the model's outputs; None if it is not known."""
    try:
        return keras.tree.map_structure(lambda output: tuple(output.shape[1:]), model.output)
    except AttributeError:  # not a graph of layers, or not built
        return None


def _check_own(model: keras.Model, name: str, info: Info, heads: Sequence[Head]) -> None:
    """Rejects a user's model with wrong outputs, which would fail late or train nonsense."""
    if heads[0].kind == "own":
        if type(model).compute_loss is keras.Model.compute_loss:
            names = ", ".join(head.name for head in heads)
            raise InputError(
                f"The model {name!r} must have a loss of its own for the targets {names} of {info.name}. Received: a "
                "model without `compute_loss`. Return a subclass of keras.Model that overrides it."
            )
        return
    shapes = output_shapes(model)
    if shapes is None:
        return
    if heads[0].name:
        wanted = {head.name: head.shape for head in heads}
        if shapes != wanted:
            raise InputError(
                f"The model {name!r} must return a dict of outputs named like the targets. Received: outputs {shapes}; "
                f"expected {wanted}. Use the function's argument `classes`."
            )
    elif isinstance(shapes, tuple) and shapes and shapes[-1] != heads[0].units:
        one, many = ("number", "numbers") if heads[0].kind == "numbers" else ("class", "classes")
        raise InputError(
            f"The model {name!r} must have one output per {one}. Received: {shapes[-1]} outputs, {heads[0].units} "
            f"{many} in {info.name}. Use the function's argument `classes`."
        )

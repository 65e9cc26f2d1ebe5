"""The kind of a classifier's outputs."""

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import model_graph

_AS_IS = (keras.layers.Dropout, keras.layers.Identity, keras.layers.ActivityRegularization)


def ends_in(model: keras.Model) -> str:
    """Returns the name of the function that a model's output comes from: "softmax", "sigmoid", ...; "linear" if none.

    Args:
        model: a built model with one output. Without a graph, only the last layer is examined.

    Example:
        >>> ends_in(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax"), keras.layers.Dropout(0.5)]))
        'softmax'
    """
    if not model_graph.is_functional(model):
        layers = getattr(model, "layers", [])
        return _function(layers[-1]) if layers else "linear"
    made_by = {id(tensor): call for call in model_graph.calls(model) for tensor in call.outputs}
    call = made_by.get(id(model_graph.functional(model).outputs[0]))
    while call is not None:
        found = _function(call.operation)
        if found != "linear" or not _passes_on(call.operation):
            return found
        call = made_by.get(id(call.inputs[0])) if call.inputs else None
    return "linear"


def gives_probabilities(model: keras.Model) -> bool:
    """Whether a model ends in a softmax; otherwise its outputs are considered logits.

    Example:
        >>> gives_probabilities(keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")]))
        True
    """
    return ends_in(model) == "softmax"


def check_classes(model: keras.Model, count: int | None, what: str) -> None:
    """Raises `InputError` if a model's outputs are not mutually exclusive classes.

    Args:
        model: the classifier.
        count: number of output columns; None if unknown.
        what: the operation that needs classes.
    """
    if count == 1:
        raise InputError(
            f"{model.name} has one output column, and a softmax over one class is always 1. {what} needs one column "
            "per class, also for two classes."
        )
    if ends_in(model) == "sigmoid":
        raise InputError(
            f"{model.name} ends in a sigmoid, whose columns are not mutually exclusive classes. {what} needs logits or "
            "a softmax."
        )


def _function(operation) -> str:
    if isinstance(operation, keras.Model):
        return ends_in(operation)
    kind = type(operation).__name__.lower()  # a layer, or an operation of `keras.ops`
    name = getattr(getattr(operation, "activation", None), "__name__", "linear").removesuffix("_v2")
    return kind if kind in ("softmax", "sigmoid") else name


def _passes_on(operation) -> bool:
    return isinstance(operation, _AS_IS) or type(operation) is keras.layers.Activation

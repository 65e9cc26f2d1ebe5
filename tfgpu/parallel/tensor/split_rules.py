"""Which Keras layers can be split over devices, which work on shards as they are, and why others cannot be split."""

import keras

from tfgpu.compat import quantized
from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor import axes, quantized_splits

STYLES = {
    "column": "by its outputs",
    "row": "by its inputs",
    "heads": "by heads",
    "vocabulary": "by rows",
}
"""The ways to split a layer, each with the words for it."""

ATTENTION = (keras.layers.MultiHeadAttention,)
_LINEAR = (keras.layers.Dense, keras.layers.EinsumDense)
_ELEMENTWISE_LAYERS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.Identity,
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
_CHANNELWISE_LAYERS = (
    *(getattr(keras.layers, f"{kind}Pooling{rank}D") for kind in ("Max", "Average") for rank in (1, 2, 3)),
    *(getattr(keras.layers, f"Global{kind}Pooling{rank}D") for kind in ("Max", "Average") for rank in (1, 2, 3)),
    *(getattr(keras.layers, f"{kind}{at}D") for kind in ("UpSampling", "ZeroPadding", "Cropping") for at in (1, 2, 3)),
)
ELEMENTWISE_OPERATIONS = frozenset(
    "Relu Relu6 Gelu Silu Sigmoid Tanh Elu Selu Softplus Softsign LeakyRelu HardSigmoid HardSilu Mish Square Abs "
    "Absolute Negative Exp Identity Multiply Add Subtract Maximum Minimum".split()
)
_ELEMENTWISE_ACTIVATIONS = frozenset(
    "relu relu6 gelu silu swish sigmoid tanh elu selu softplus softsign leaky_relu hard_sigmoid hard_silu hard_swish "
    "mish exponential linear".split()
)
_SUMS = (type(None), keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers whose value for a variable is the sum of those for its shards."""


def is_linear(operation) -> bool:
    return type(operation) in _LINEAR or axes.is_convolution(operation)


def sizes(layer: keras.layers.Layer) -> dict[str, tuple[int, str]]:
    """The styles by which a layer can be split: each with the size that the devices divide, and the word for it."""
    if type(layer) is keras.layers.Dense:
        inputs, outputs = quantized.kernel_shape(layer)
        return {"column": (outputs, "outputs"), "row": (inputs, "inputs")}
    if type(layer) is keras.layers.EinsumDense:
        found = {style: (axes.einsum_size(layer, style), f"{style}s") for style in ("column", "row")}
        return {style: size for style, size in found.items() if size[0]}
    if axes.is_convolution(layer) and layer.groups == 1:
        shape = layer.kernel.shape
        return {"column": (shape[-1], "filters"), "row": (shape[-2], "channels")}
    if type(layer) in ATTENTION and layer.activity_regularizer is None:
        return {"heads": (layer.num_heads, "heads")}
    if is_embedding(layer):
        return {"vocabulary": (layer.input_dim, "rows")}
    return {}


def is_embedding(layer: keras.layers.Layer) -> bool:
    """Whether a layer looks rows up in a table: Embedding, and ReversibleEmbedding, which computes logits as well."""
    reversible = getattr(keras.layers, "ReversibleEmbedding", keras.layers.Embedding)
    is_reversible = isinstance(layer, reversible) and type(layer).call is reversible.call
    return type(layer) is keras.layers.Embedding or is_reversible


def rows_each(layer: keras.layers.Embedding, ways: int) -> str:
    """How many rows of an embedding's table each device has."""
    least, rest = divmod(layer.input_dim, ways)
    return f"{least}{f' or {least + 1}' if rest else ''} of {layer.input_dim} rows each"


def has_more_outputs(layer: keras.layers.Layer) -> bool:
    """Whether a layer has at least as many outputs as inputs, as one that computes logits of a vocabulary."""
    found = sizes(layer)
    return "column" in found and "row" in found and found["column"][0] >= found["row"][0]


def why_not_split(layer: keras.layers.Layer, style: str, ways: int, *, is_planned: bool = False) -> str | None:
    """Why a layer, whatever its place in the model, cannot be split in a style; None where it can.

    Of a layer that a plan names, the activation is tried on random rows instead.
    """
    if not layer.built:
        return "it is not built"
    if reason := quantized_splits.why_not_split(layer, style, ways):
        return reason
    if style == "vocabulary" and getattr(layer, "lora_enabled", False):
        return "it has LoRA"
    if reason := why_not_sharded(layer):
        return reason
    found = sizes(layer).get(style)
    if found is None:
        return f"a {type(layer).__name__} like this cannot be split {STYLES[style]}"
    size, word = found
    if size % ways and not (style == "vocabulary" and size >= ways):
        low = size // ways * ways
        near = f"{low} or {low + ways}" if low else f"{ways}"
        return f"it has {size} {word}, which do not divide into {ways} shards ({near} would)"
    if style == "column" and not is_planned and not is_elementwise(layer.activation):
        return "its activation depends on all outputs"
    if style == "column" and not isinstance(layer.activity_regularizer, _SUMS):
        return "its activity regularizer depends on all outputs"
    return None


def why_not_sharded(layer: keras.layers.Layer) -> str | None:
    """Why a constraint or regularizer of the layer's variables does not work on shards; None where all do."""
    holders = (layer, *model_graph.layers_within(layer).values())
    for variable in (variable for holder in holders for variable in holder.variables):
        if variable.constraint is not None and not isinstance(variable.constraint, keras.constraints.NonNeg):
            return f"the constraint {type(variable.constraint).__name__} depends on the whole variable"
        if not isinstance(variable.regularizer, _SUMS):
            return f"the regularizer {type(variable.regularizer).__name__} depends on the whole variable"
    return None


def works_on_shards(call: model_graph.Call, axis: int, ways: int) -> bool:
    """Whether a call computes on each device's part of its inputs what it computes there on the whole.

    Args:
        call: of a layer that is called once, or of an operation.
        axis: along which the inputs are split, from the last.
        ways: into how many parts.
    """
    operation = call.operation
    if len(call.inputs) > 1 and any(len(tensor.shape) != len(call.outputs[0].shape) for tensor in call.inputs):
        return False
    if call.has_array_arguments:  # which would have to be split as well
        return False
    if not call.layers:
        return type(operation).__module__.startswith("keras.") and type(operation).__name__ in ELEMENTWISE_OPERATIONS
    if isinstance(operation, keras.layers.BatchNormalization):
        return _normalizes_shards(operation, axis, len(call.outputs[0].shape), ways)
    if type(operation) is keras.layers.Activation:
        return is_elementwise(operation.activation)
    if type(operation) is keras.layers.Dropout:
        return operation.noise_shape is None
    if type(operation) in _CHANNELWISE_LAYERS:
        return axis == -1 and getattr(operation, "data_format", "channels_last") == "channels_last"
    return type(operation) in _ELEMENTWISE_LAYERS


def _normalizes_shards(layer: keras.layers.BatchNormalization, axis: int, rank: int, ways: int) -> bool:
    if axis not in (layer.axis, layer.axis - rank) or getattr(layer, "renorm", False) or why_not_sharded(layer):
        return False
    return layer.moving_mean.shape[0] % ways == 0


def is_elementwise(activation) -> bool:
    if activation is None:
        return True
    is_kerass = getattr(activation, "__module__", "").startswith("keras.")
    return is_kerass and activation.__name__ in _ELEMENTWISE_ACTIVATIONS

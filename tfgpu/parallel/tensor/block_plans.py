"""How the layers within a custom layer are split over devices: a plan per class.

A functional model shows which layer follows which; the `call` of a subclassed layer is Python code, which does not. A
plan says which sublayers of it are column-parallel, and which row-parallel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import keras

from tfgpu.compat import slots
from tfgpu.compat.keras_hub import block_families
from tfgpu.errors import InputError, unknown

BLOCK_STYLES = {
    "column": "a sublayer that is split by its outputs",
    "row": "a sublayer that is split by its inputs; the devices' terms are summed",
    "key_value": "a column-parallel sublayer of keys or values; whole where there are more devices than key heads",
    "whole": "a sublayer that runs once, on the first device",
    "sum": "under the key 'call': each device computes a term of the layer's result",
    "heads": "an attribute that counts heads, which each device has a part of",
    "key_value_heads": "an attribute that counts the heads of keys and values",
    "groups": "an attribute that counts the query heads of each key head",
}
"""The styles of a plan. A number is an axis: along which a weight is split, or the draws of a dropout; under the key
'call', along which the devices' results lie side by side."""


_FEED_FORWARD_EXPERTS = dict.fromkeys(
    ("up_kernel", "up_bias", "gate_kernel", "gate_bias", "down_kernel", "down_bias", "call"), 0
)
_BUILT_IN = {**block_families.PLANS, ("tfgpu", "FeedForwardExperts"): (_FEED_FORWARD_EXPERTS, {"inputs": 0})}


@dataclass(frozen=True)
class TensorPlan:
    """How one class of layers is split over devices.

    Attributes:
        styles: by the name of an attribute of the layer, one of `BLOCK_STYLES`, or an axis.
        arguments: by the name of an argument of `call`, the axis along which each device takes its part of it.
        results: of results beside the first, by their number of axes, the axis along which the devices' parts lie.
        is_built_in: whether a layer may lack attributes that the plan names.
    """

    styles: Mapping[str, str | int | tuple[int, int]]
    arguments: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[int, int] = field(default_factory=dict)
    is_built_in: bool = False

    def __str__(self) -> str:
        width = max(map(len, self.styles))
        lines = [f"{name:{width}}  {style}" for name, style in self.styles.items()]
        lines += [f"{name:{width}}  an argument, along axis {axis}" for name, axis in self.arguments.items()]
        return "\n".join(lines)


def register_plan(
    cls: type[keras.layers.Layer],
    styles: Mapping[str, str | int],
    *,
    arguments: Mapping[str, int] | None = None,
    results: Mapping[int, int] | None = None,
) -> type[keras.layers.Layer]:
    """Tells `parallel.tensor` how to split the layers of your own class over devices.

    From the first column-parallel sublayer to the row-parallel one, each device runs `call` with its shard of the
    kernels. What lies between must treat each column, or each head, separately: activations, products, dropout,
    attention by heads.

    Args:
        cls: a subclass of `keras.layers.Layer`. Its subclasses have the plan too, unless they override `call`.
        styles: by the name of an attribute of the layer:

            - `"column"` or `"row"`: a Dense or EinsumDense, with its LoRA matrices;
            - `"key_value"`: a column of keys or values. With fewer key heads than devices it stays whole, and each
              device takes the head of its queries, at two more all-reduces in the backward pass;
            - `"heads"`, `"key_value_heads"`, `"groups"`: an integer that `call` uses to count heads, heads of keys, or
              query heads per key head; each device sees the number of its shard;
            - `"whole"`: a sublayer between column and row that runs once for all devices;
            - a negative number: a Dropout between column and row whose split axis is not the last. Attention scores of
              shape (batch, heads, queries, keys) have -3;
            - a number: a weight of the layer itself, split along this axis. The key `"call"` then says how to combine
              the devices' results: `"sum"`, or the axis along which they are concatenated.
        arguments: arguments of `call` that are split too, with their axis, such as `{"cache": -2}`.
        results: results beside the first one that are split, by their number of axes, with the axis along which they
            are concatenated. A cache of shape (batch, 2, length, heads, width) is `{5: -2}`.

    Returns:
        The class.

    Raises:
        InputError: `cls` is not a layer, or a style is unknown.

    Example:
        >>> class Feedforward(keras.layers.Layer):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = keras.layers.Dense(64, "gelu"), keras.layers.Dense(16)
        ...
        ...     def call(self, x):
        ...         return x + self.down(self.up(x))
        >>> _ = register_plan(Feedforward, {"up": "column", "down": "row"})
        >>> print(plan_for(Feedforward))
        up    column
        down  row

    Source: Shoeybi et al., Megatron-LM, 2019; `parallelize_module` of PyTorch names sublayers in the same way.
    """
    if not isinstance(cls, type) or not issubclass(cls, keras.layers.Layer):
        raise InputError(f"A plan is for a subclass of keras.layers.Layer. Received: {cls!r}.")
    slots.of(cls).tensor_plan = checked(styles, arguments or {}, results or {}, cls.__name__)
    return cls


def checked(styles: Mapping, arguments: Mapping, results: Mapping, name: str) -> TensorPlan:
    """The plan with these styles.

    Raises:
        InputError: a style is unknown, or a column has no row.
    """
    if not isinstance(styles, Mapping) or not styles:
        raise InputError(f"The plan of {name} is a mapping of attributes to styles. Received: {styles!r}.")
    for attribute, style in styles.items():
        is_axis = isinstance(style, int) and not isinstance(style, bool)
        if not (is_axis or isinstance(style, tuple)) and style not in BLOCK_STYLES:
            raise unknown(f"style of {attribute!r} in the plan of {name}", str(style), BLOCK_STYLES)
    given = set(styles.values())
    if "call" not in styles and not {"column", "row"} <= given:
        raise InputError(
            f"The plan of {name} needs a 'column' and a 'row', or the key 'call' for weights of its own. Received: "
            f"{dict(styles)!r}."
        )
    if "call" in styles and given & {"column", "row", "key_value"}:
        raise InputError(
            f"The plan of {name} has 'call', for weights of its own, and sublayers besides. Give the sublayers a plan "
            "in a layer of their own."
        )
    return TensorPlan(dict(styles), dict(arguments), dict(results))


def plan_for(cls: type[keras.layers.Layer]) -> TensorPlan | None:
    """The plan by which `parallel.tensor` splits the layers of a class: one of `register_plan`, or a built-in one.

    There are built-in plans for `keras.layers.MultiHeadAttention` and for blocks of KerasHub.

    Args:
        cls: a subclass of `keras.layers.Layer`.

    Returns:
        The plan, which can be printed; None for a class without one, whose layers stay whole.

    Example:
        >>> print(plan_for(keras.layers.MultiHeadAttention))
        _gate_dense     column
        _query_dense    column
        _key_dense      column
        _value_dense    column
        _dropout_layer  -3
        _output_dense   row
    """
    if not isinstance(cls, type):
        raise InputError(f"A plan belongs to a class. For a layer, pass type(layer). Received: {cls!r}.")
    for owner in cls.__mro__:
        found = slots.get(owner, "tensor_plan") or _built_in(owner)
        if found is not None:
            return found if cls.call is owner.call else None
    return None


def _built_in(cls: type) -> TensorPlan | None:
    package = cls.__module__.partition(".")[0]
    places = ((cls.__module__, cls.__name__), (package, cls.__name__))
    found = next((_BUILT_IN[place] for place in places if place in _BUILT_IN), None)
    return None if found is None else TensorPlan(*found, is_built_in=True)

"""Finds the custom layers, and those of KerasHub, that a plan splits, and checks that each can be split."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import keras

from tfgpu.compat import layers as layers_private
from tfgpu.compat import quantized
from tfgpu.errors import InputError
from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor import axes, block_plans, split_rules
from tfgpu.parallel.tensor.block_plans import TensorPlan
from tfgpu.parallel.tensor.graph_search import LayerSplit

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Block:
    """A layer whose `call` runs in part on several devices.

    Attributes:
        path: the layer's, within the model.
        layer: the layer.
        plan: of its class, or as asked.
        splits: how variables are split: the layer's own and its sublayers'.
        counts: by attribute, what a device sees of a number of heads.
        repeats: how many devices share a head of keys and values; 1 where these are split too.
    """

    path: str
    layer: keras.layers.Layer
    plan: TensorPlan
    splits: tuple[axes.VariableSplit, ...]
    counts: Mapping[str, int]
    repeats: int

    def sublayers(self) -> Iterator[tuple[str | int | tuple | None, keras.layers.Layer]]:
        """Each direct sublayer with its style; None where the plan does not name it."""
        styles = {id(getattr(self.layer, name, None)): style for name, style in self.plan.styles.items()}
        for layer in layers_private.layers_within(self.layer, include_self=False, recursive=False):
            yield styles.get(id(layer)), layer

    def rows(self) -> list[LayerSplit]:
        """For each layer with variables in it, how it is split."""
        found, pair = [], {"column": "then a row", "row": "after a column"}
        for style, layer in self.sublayers():
            split = split_style(style, self.repeats)
            reason = pair.get(split, "not in the plan")
            if style == "key_value" and split is None:
                reason = f"{self.repeats} devices share each key head"
            if layer.weights:
                found.append(LayerSplit(f"{self.path}/{layer.name}", split, reason, layer.count_params()))
        own = [split.attribute for split in self.splits if split.layer is self.layer]
        if own:
            found.append(LayerSplit(self.path, "column", f"weights {', '.join(own)}", self.layer.count_params()))
        return found


def split_style(style, repeats: int) -> str | None:
    """The style in which a sublayer's kernel is split: `"column"`, `"row"` or None."""
    if style == "key_value":
        return "column" if repeats == 1 else None
    return style if style in ("column", "row") else None


def find(model: keras.Model, ways: int, taken: set[int], wanted: Mapping[str, str | None] | None):
    """The blocks of a model, and the embeddings within custom layers.

    Args:
        model: the model.
        ways: into how many shards.
        taken: the `id` of layers that are split otherwise.
        wanted: the style that is asked for each layer, by path; None takes whatever can be split.

    Returns:
        Blocks, each after the block around it; pairs of path and embedding; and how each layer is split, or why not.

    Raises:
        InputError: a plan does not fit its layer.
    """
    blocks, embeddings, notes, unknown = [], [], [], {}
    seen = set(taken)
    for path, layer in model_graph.layers_within(model).items():
        if id(layer) in seen or model_graph.is_functional(layer):
            continue
        seen.add(id(layer))
        if split_rules.is_embedding(layer) and (wanted is None or wanted.get(path) == "vocabulary"):
            reason = split_rules.why_not_split(layer, "vocabulary", ways)
            if reason is None:
                embeddings.append((path, layer))
            rows = split_rules.rows_each(layer, ways)
            notes.append(LayerSplit(path, None if reason else "vocabulary", reason or rows, layer.count_params()))
            continue
        plan = _plan(path, layer, wanted)
        if plan is not None:
            found = _resolved(path, layer, plan, ways)
            if isinstance(found, Block):
                blocks.append(found)
                notes += found.rows()
            else:
                notes.append(LayerSplit(path, None, found, layer.count_params()))
        elif wanted is None and _could_have_plan(layer):
            unknown.setdefault(type(layer).__name__, []).append(layer)
    _say_unknown(unknown, blocks)
    described = {path.rpartition("/")[0] for path in (note.path for note in notes)}
    notes = [note for note in notes if note.style or note.path not in described]  # what is within has lines of its own
    return blocks, embeddings, notes


def _plan(path: str, layer: keras.layers.Layer, wanted: Mapping | None) -> TensorPlan | None:
    """The plan of a layer's class, or the one that is asked for its sublayers by path."""
    if wanted is None or wanted.get(path) in ("heads", "plan"):
        return block_plans.plan_for(type(layer))
    inner = layers_private.layers_within(layer, include_self=False, recursive=False)
    asked = {each.name: wanted.get(f"{path}/{each.name}") for each in inner}
    names = {id(value): name for name, value in vars(layer).items() if isinstance(value, keras.layers.Layer)}
    styles = {names[id(each)]: asked[each.name] for each in inner if asked[each.name] in ("column", "row")}
    return block_plans.checked(styles, {}, {}, repr(path)) if styles else None


def _could_have_plan(layer: keras.layers.Layer) -> bool:
    """Whether a custom layer holds at least two kernels that a plan could name."""
    inner = layers_private.layers_within(layer, include_self=False, recursive=False)
    is_own = not type(layer).__module__.startswith("keras.")
    return is_own and sum(split_rules.is_linear(each) for each in inner) > 1


def _say_unknown(unknown: Mapping[str, list], blocks: list[Block]) -> None:
    inside = {id(each) for block in blocks for each in model_graph.layers_within(block.layer).values()}
    names = [name for name, layers in unknown.items() if any(id(layer) not in inside for layer in layers)]
    if names:
        _log.warning(
            "%s: no plan says how to split these layers, so they stay whole on each group's first device. Write one: "
            'tfgpu.parallel.register_plan(%s, {"up": "column", "down": "row"}), with the names of its sublayers.',
            ", ".join(names),
            names[0],
        )


def _resolved(path: str, layer: keras.layers.Layer, plan: TensorPlan, ways: int) -> Block | str:
    """The block, or why the layer stays whole."""
    values = dict(_attributes(path, layer, plan))
    heads = {style: values[name] for name, style in plan.styles.items() if name in values}
    for name, style in plan.styles.items():
        if style == "heads" and name in values and values[name] % ways:
            return f"{name} is {values[name]}, which {ways} devices do not divide"
    if isinstance(layer, keras.layers.MultiHeadAttention) and layers_private.attention_rank(layer) > 1:
        return "it attends along several axes"
    keys = heads.get("key_value_heads", ways)
    if keys % ways and ways % keys:
        return f"it has {keys} heads of keys and values, and neither divides the other: {ways} devices"
    repeats = max(ways // keys, 1)
    if reason := split_rules.why_not_sharded(layer) or _why_not_again(layer):
        return reason
    splits = []
    for name, style in plan.styles.items():
        value = values.get(name)
        if isinstance(value, keras.Variable):
            if value.shape[style] % ways:
                return f"{name} has {value.shape[style]} on axis {style}, which {ways} devices do not divide"
            splits.append(axes.VariableSplit(layer, name, style % len(value.shape)))
        elif isinstance(value, keras.layers.Layer):
            reason = _why_not(value, style, ways, repeats)
            if reason:
                return f"{name}: {reason}"
            splits += {"column": axes.columns, "row": axes.rows}.get(split_style(style, repeats), lambda _: [])(value)
    if not splits:
        return "it holds none of the layers that its plan names"
    return Block(path, layer, plan, tuple(splits), _counts(plan, values, ways, repeats), repeats)


def _why_not_again(layer: keras.layers.Layer) -> str | None:
    """Why the `call` of a layer cannot run once more for another device; None where it can."""
    if quantized.assigned_variables(layer):
        return "it keeps a state of its own"
    within = layers_private.layers_within(layer, include_self=False)
    known = {id(variable) for each in within for variable in each.variables}
    known |= {id(variable) for variable in layers_private.own_variables(layer)}
    if any(id(variable) not in known for variable in layer.variables):
        return "it draws random numbers itself: leave that to a layer such as Dropout"
    penalized = next((each.name for each in within if each.activity_regularizer is not None), None)
    return penalized and f"{penalized} has an activity regularizer"


def _attributes(path: str, layer: keras.layers.Layer, plan: TensorPlan) -> Iterator[tuple[str, object]]:
    """The attributes that a plan names, where the layer has them.

    Raises:
        InputError: a plan of the user's names an attribute that is not there, or not of its style's kind.
    """
    for name, style in plan.styles.items():
        value = getattr(layer, name, None)
        if name == "call" or (value is None and (plan.is_built_in or hasattr(layer, name))):
            continue
        counts = style in ("heads", "key_value_heads", "groups")
        is_weight = isinstance(value, keras.Variable) and isinstance(style, int)
        is_count = counts and isinstance(value, int)
        if not (is_weight or is_count or (isinstance(value, keras.layers.Layer) and not counts)):
            raise InputError(
                f"The plan of {type(layer).__name__} gives {name!r} the style {style!r}, but {path!r} has "
                f"{value!r} there. A column or row must be a Dense or EinsumDense, heads an integer, and an axis is "
                "for a weight or a Dropout."
            )
        yield name, value


def _why_not(layer: keras.layers.Layer, style, ways: int, repeats: int) -> str | None:
    """Why a sublayer cannot take the part that its plan gives it; None where it can."""
    split = split_style(style, repeats)
    if split is not None:
        if not split_rules.is_linear(layer):
            return f"a {type(layer).__name__} cannot be split {split_rules.STYLES[split]}"
        return split_rules.why_not_split(layer, split, ways, is_planned=True)
    if isinstance(style, tuple) and repeats > 1 and repeats != ways and layer.rate:
        return f"its draws cannot be split where {repeats} devices share each key head"
    return None


def _counts(plan: TensorPlan, values: Mapping, ways: int, repeats: int) -> dict[str, int]:
    """What each device sees of the attributes that count heads."""
    found = {}
    for name, style in plan.styles.items():
        if style == "heads" and name in values:
            found[name] = values[name] // ways
        elif style == "key_value_heads" and name in values:
            found[name] = values[name] * repeats // ways
        elif style == "groups" and name in values:
            found[name] = values[name] // repeats
    return found

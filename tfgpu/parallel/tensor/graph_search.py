"""Searches one functional model for layers that can be split over devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import keras

from tfgpu.parallel import model_graph
from tfgpu.parallel.model_graph import Call
from tfgpu.parallel.tensor import axes, split_rules
from tfgpu.parallel.tensor.parallel_layers import Segment


@dataclass(frozen=True)
class LayerSplit:
    """How a layer is split, or why it is not.

    Attributes:
        path: the layer's, within the model.
        style: one of `split_rules.STYLES`; None for a layer that stays whole.
        reason: its partner, or why it stays whole.
        parameters: the number of its parameters.
    """

    path: str
    style: str | None
    reason: str
    parameters: int


class GraphSearch:
    """The search within one functional model.

    Args:
        graph: functional.
        prefix: of the paths of its layers.
        ways: into how many shards to split.
        wanted: the style that is asked for each layer, by path; None takes whatever can be split.
        times_called: by the `id` of a layer, how often it is called, in all graphs of the model.
    """

    def __init__(
        self, graph: keras.Model, prefix: str, ways: int, wanted: dict | None, times_called: Mapping[int, int]
    ):
        self._prefix, self._ways, self._wanted, self._times_called = prefix, ways, wanted, times_called
        self._calls = model_graph.calls(graph)
        self._made_by = {id(tensor): call for call in self._calls for tensor in call.outputs}
        self._users: dict[int, list[Call]] = {}
        for call in self._calls:
            for tensor in call.inputs:
                self._users.setdefault(id(tensor), []).append(call)
        self._outputs = {id(tensor) for tensor in graph.outputs}
        self._segment_of: dict[int, Segment] = {}  # by the id of a call
        self._splits: dict[str, LayerSplit] = {}  # by path

    def segments(self) -> list[Segment]:
        """The calls that can run on several devices: attention first, then pairs, then single layers."""
        return [*self._attention(), *self._pairs(), *self._single()]

    def embeddings(self) -> list[keras.layers.Embedding]:
        """The embeddings that can be split by rows."""
        found = []
        for call, layer in self._layer_calls():
            if split_rules.is_embedding(layer) and self._is_wanted(layer, "vocabulary"):
                if self._is_free(call, layer, "vocabulary"):
                    found.append(layer)
                    self._note(layer, "vocabulary", split_rules.rows_each(layer, self._ways))
        return found

    def calls_with_segments(self) -> list:
        """The graph's calls, with each segment at the position of its last call."""
        last = {id(segment.inner[-1]): segment for segment in self._segment_of.values()}
        kept = [call for call in self._calls if id(call) not in self._segment_of or id(call) in last]
        return [last.get(id(call), call) for call in kept]

    def layer_splits(self) -> list[LayerSplit]:
        """How each layer with variables is split, or why it is not, in the order of the calls."""
        for call, layer in self._layer_calls():
            if layer.weights and not model_graph.is_functional(layer):
                self._note(layer, None, self._why_whole(call, layer))
        order = [self._path(layer) for _, layer in self._layer_calls()]
        return sorted(self._splits.values(), key=lambda split: order.index(split.path))

    def _layer_calls(self) -> Iterator[tuple[Call, keras.layers.Layer]]:
        for call in self._calls:
            for layer in call.layers:
                yield call, layer

    def _attention(self) -> Iterator[Segment]:
        for call, layer in self._layer_calls():
            if type(layer) in split_rules.ATTENTION and self._is_wanted(layer, "heads"):
                if self._is_free(call, layer, "heads"):
                    yield self._take((call,), "sum", axes.heads(layer), axes.axis_of(layer, "heads"))
                    self._note(layer, "heads", f"{layer.num_heads // self._ways} of {layer.num_heads} heads each")

    def _pairs(self) -> Iterator[Segment]:
        """Row-parallel layers with the column-parallel layers, and what is between them, that compute their input."""
        for last, layer in self._layer_calls():
            members = self._producers(last, layer) if self._can_split(last, layer, "row") else None
            if members is None:
                continue
            before = tuple(call for call in self._calls if id(call) in members)
            openers = [call for call in before if split_rules.is_linear(call.operation)]
            splits = [split for call in openers for split in axes.columns(call.operation)]
            splits += [split for call in before for each in call.layers for split in axes.channels(each)]
            splits += axes.rows(layer)
            yield self._take((*before, last), "pair", splits, axes.axis_of(layer, "row"))
            for call in openers:
                self._note(call.operation, "column", f"then {layer.name}")
            for call in before:
                if isinstance(call.operation, keras.layers.BatchNormalization):
                    self._note(call.operation, "column", "by channels")
            self._note(layer, "row", f"after {', '.join(call.name for call in openers)}")

    def _single(self) -> Iterator[Segment]:
        """Column-parallel layers whose parts are concatenated (logits, and what is asked for); row-parallel layers."""
        for call, layer in self._layer_calls():
            is_asked = self._wanted is not None
            is_head = any(id(t) in self._outputs for t in call.outputs) and split_rules.has_more_outputs(layer)
            if (is_asked or is_head) and self._can_split(call, layer, "column"):
                yield self._take((call,), "column", axes.columns(layer), axes.axis_of(layer, "column"))
                self._note(layer, "column", "its parts are concatenated")
            elif is_asked and self._can_split(call, layer, "row"):
                yield self._take((call,), "row", axes.rows(layer), axes.axis_of(layer, "row"))
                self._note(layer, "row", "its input is scattered")

    def _producers(self, last: Call, layer: keras.layers.Layer) -> set[int] | None:
        """The calls that can compute a row-parallel layer's input in parts, by `id`; None if there are none."""
        members: set[int] = set()
        axis = axes.axis_of(layer, "row")
        if len(last.inputs) != 1 or not self._is_made_in_parts(last.inputs[0], axis, members):
            return None
        inside = [call for call in self._calls if id(call) in members]
        made = [tensor for call in inside for tensor in call.outputs]
        openers = [call for call in inside if split_rules.is_linear(call.operation)]
        if any(id(self._made_by.get(id(tensor))) in members for call in openers for tensor in call.inputs):
            return None  # a column-parallel layer takes the whole of its input
        users = {id(user) for tensor in made for user in self._users.get(id(tensor), ())}
        is_output = any(id(tensor) in self._outputs for tensor in made)
        return None if is_output or users - members - {id(last)} else members

    def _is_made_in_parts(self, tensor, axis: int, members: set[int]) -> bool:
        """Whether column-parallel layers can compute a tensor in parts; adds all calls on the way to `members`."""
        call = self._made_by.get(id(tensor))
        if call is None or id(call) in self._segment_of:
            return False
        if id(call) in members:
            return True
        members.add(id(call))
        layer = call.operation
        if split_rules.is_linear(layer):
            return self._can_split(call, layer, "column") and axes.axis_of(layer, "column") == axis
        if call.layers and self._times_called[id(layer)] > 1:
            return False
        if not split_rules.works_on_shards(call, axis, self._ways):
            return False
        return all([self._is_made_in_parts(needed, axis, members) for needed in call.inputs])  # visits all

    def _can_split(self, call: Call, layer: keras.layers.Layer, style: str) -> bool:
        is_linear = split_rules.is_linear(call.operation)
        return is_linear and self._is_wanted(layer, style) and self._is_free(call, layer, style)

    def _is_wanted(self, layer: keras.layers.Layer, style: str) -> bool:
        return self._wanted is None or self._wanted.get(self._path(layer)) == style

    def _is_free(self, call: Call, layer: keras.layers.Layer, style: str) -> bool:
        return id(call) not in self._segment_of and self._why_not(call, layer, style) is None

    def _why_not(self, call: Call, layer: keras.layers.Layer, style: str) -> str | None:
        """Why a layer cannot be split in a style, or None."""
        if layer.built and self._times_called[id(layer)] > 1 and style != "vocabulary":
            return "it is called several times"
        if len(call.outputs) > 1:
            return "it returns several tensors"
        if any(map(self._is_sparse, call.inputs)):
            return "its input is sparse or ragged"
        return split_rules.why_not_split(layer, style, self._ways)

    def _is_sparse(self, tensor) -> bool:
        """Whether a tensor is sparse or ragged; Keras marks `x * 0.5` so even where `x` is dense."""
        if not (tensor.sparse or tensor.ragged):
            return False
        call = self._made_by.get(id(tensor))
        return call is None or bool(call.layers) or any(map(self._is_sparse, call.inputs))

    def _why_whole(self, call: Call, layer: keras.layers.Layer) -> str:
        asked = None if self._wanted is None else self._wanted.get(self._path(layer))
        if self._wanted is not None:
            styles = [asked] if asked is not None else []
        elif split_rules.is_linear(call.operation):
            styles = ["column", "row"]
        elif type(layer) in split_rules.ATTENTION:
            styles = ["heads"]
        elif split_rules.is_embedding(layer):
            styles = ["vocabulary"]
        else:
            return "not a layer that can be split"
        if not styles:
            return "not asked for"
        return next(filter(None, (self._why_not(call, layer, style) for style in styles)), "no partner")

    def _take(self, inner: tuple[Call, ...], kind: str, splits: list, axis: int) -> Segment:
        segment = Segment(inner, kind, tuple(splits), axis)
        self._segment_of |= {id(call): segment for call in inner}
        return segment

    def _note(self, layer: keras.layers.Layer, style: str | None, reason: str) -> None:
        path = self._path(layer)
        self._splits.setdefault(path, LayerSplit(path, style, reason, layer.count_params()))

    def _path(self, layer: keras.layers.Layer) -> str:
        return self._prefix + layer.name

"""Which layers of a model can lie in parts on several devices, and how: the plan of tensor parallelism.

| how | what is cut | a sum of all devices' terms |
|---|---|---|
| `"column"` | the outputs of Dense, EinsumDense, Conv | none: the next works on parts, or they are brought together |
| `"row"` | their inputs | one forwards |
| `"heads"` | attention, by heads | one forwards, one backwards |
| `"vocabulary"` | an embedding, by rows | one forwards |

A column-parallel layer, what works element by element (dropout, activations, products, BatchNormalization of channels),
and a row-parallel layer make a pair, which needs one sum forwards and one backwards.
"""

import collections
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import keras

from tfgpu.errors import InputError, unknown
from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor import axes, parallel_layers

HOW = ("column", "row", "heads", "vocabulary")

_LINEAR = (keras.layers.Dense, keras.layers.EinsumDense)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_ATTENTION = (keras.layers.MultiHeadAttention,)
_EACH_ELEMENT = (
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
_EACH_CHANNEL = (
    *(getattr(keras.layers, f"{kind}Pooling{rank}D") for kind in ("Max", "Average") for rank in (1, 2, 3)),
    *(getattr(keras.layers, f"Global{kind}Pooling{rank}D") for kind in ("Max", "Average") for rank in (1, 2, 3)),
    *(getattr(keras.layers, f"{kind}{at}D") for kind in ("UpSampling", "ZeroPadding", "Cropping") for at in (1, 2, 3)),
)
_EACH_OPERATION = frozenset(
    "Relu Relu6 Gelu Silu Sigmoid Tanh Elu Selu Softplus Softsign LeakyRelu HardSigmoid HardSilu Mish Square Abs "
    "Absolute Negative Exp Identity Multiply Add Subtract Maximum Minimum".split()
)
_ACTIVATIONS = frozenset(
    "relu relu6 gelu silu swish sigmoid tanh elu selu softplus softsign leaky_relu hard_sigmoid hard_silu hard_swish "
    "mish exponential linear".split()
)
_ADDS_UP = (type(None), keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


@dataclass(frozen=True)
class Layer:
    """What the plan says of one layer.

    Attributes:
        path: the layer's, within the model.
        how: one of `HOW`, or None for a layer that stays whole.
        why: a word on it: its partner, or why it stays whole.
        parameters: numbers in its variables.
    """

    path: str
    how: str | None
    why: str
    parameters: int


@dataclass
class Partitioning:
    """What is cut.

    Attributes:
        calls: how each graph shall run, by the model that has it.
        segments: all of them, each with the path of its first layer.
        embeddings: paths and layers that are cut by rows.
        layers: what is said of each layer that has variables.
    """

    calls: list = field(default_factory=list)
    segments: list = field(default_factory=list)
    embeddings: list = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)


def partition(model: keras.Model, ways: int, asked: Mapping[str, str | None] | str = "auto") -> Partitioning:
    """Finds what can be cut.

    Args:
        model: functional or Sequential, built; functional models within it are looked into as well.
        ways: how many parts.
        asked: `"auto"`, or by pattern of layers one of `HOW`, or None to leave a layer whole. The first pattern counts;
            a layer that none matches stays whole.

    Raises:
        InputError: the model has no graph; a pattern matches nothing; a layer cannot be cut as asked, and why.
    """
    found = Partitioning()
    layers = model_graph.layers_within(model)
    wanted = _wanted(model, layers, asked)
    inner = {path: model_graph.functional(graph) for path, graph in layers.items() if model_graph.is_functional(graph)}
    whole = {
        id(graph): (f"{path}/" if path else "", graph)
        for path, graph in {**inner, "": model_graph.functional(model)}.items()
    }
    times = collections.Counter(
        id(layer) for _, graph in whole.values() for call in model_graph.calls(graph) for layer in call.layers
    )
    for prefix, graph in whole.values():
        _Graph(graph, prefix, ways, wanted, times).find(found)
    cut = {layer.path: layer for layer in found.layers}
    for path, how in (wanted or {}).items():
        if how is not None and (path not in cut or cut[path].how is None):
            why = cut[path].why if path in cut else "it is no layer of a functional model"
            raise InputError(f"{path!r} cannot be cut {_by(how)}: {why}.")
    return found


def _by(how: str) -> str:
    return {"column": "by its outputs", "row": "by its inputs", "heads": "by heads", "vocabulary": "by rows"}[how]


def _wanted(model, layers: Mapping, asked) -> dict[str, str | None] | None:
    """How each layer is asked to be cut; None for `"auto"`."""
    if asked == "auto":
        return None
    if isinstance(asked, str) or not isinstance(asked, Mapping) or not asked:
        raise InputError(f"`plan` is 'auto', or patterns with one of {', '.join(HOW)}. Received: {asked!r}.")
    for pattern, how in asked.items():
        if how is not None and how not in HOW:
            raise unknown("plan", how, HOW)
        if not fnmatch.filter(layers, pattern):
            near = difflib.get_close_matches(pattern, layers, 3, 0.3) or list(layers)[:3]
            raise InputError(f"No layer of {model.name!r} is called {pattern!r}. There are {', '.join(near)}, ...")
    found = {}
    for path in layers:
        for pattern, how in asked.items():
            if fnmatch.fnmatchcase(path, pattern):
                found[path] = how
                break
    return found


class _Graph:
    """The search within one functional model."""

    def __init__(self, graph, prefix: str, ways: int, wanted: dict | None, times: Mapping[int, int]):
        self._graph, self._prefix, self._ways, self._wanted = graph, prefix, ways, wanted
        self._times = times  # that a layer is called, in all graphs
        self._calls = model_graph.calls(graph)
        self._made_by = {id(tensor): call for call in self._calls for tensor in call.makes}
        self._users: dict[int, list] = {}
        for call in self._calls:
            for tensor in call.needs:
                self._users.setdefault(id(tensor), []).append(call)
        self._outputs = {id(tensor) for tensor in graph.outputs}
        self._taken: dict[int, parallel_layers.Segment] = {}
        self._said: dict[str, Layer] = {}

    def find(self, found: Partitioning) -> None:
        segments = [*self._attention(found), *self._pairs(), *self._alone()]
        if segments:
            found.calls.append((self._graph, self._merged(segments)))
            found.segments += [(self._prefix + segment.name, segment) for segment in segments]
        self._embeddings(found)
        for call in self._calls:
            for layer in call.layers:
                if layer.weights and not model_graph.is_functional(layer):
                    self._say(layer, None, self._why_whole(call, layer))
        order = [self._prefix + layer.name for call in self._calls for layer in call.layers]
        found.layers += sorted(self._said.values(), key=lambda said: order.index(said.path))

    def _merged(self, segments: Sequence[parallel_layers.Segment]) -> list:
        """The graph's calls, with a segment in the place of its last call."""
        last = {id(segment.inner[-1]): segment for segment in segments}
        merged = [last.get(id(call), call) for call in self._calls if id(call) not in self._taken or id(call) in last]
        return merged

    def _attention(self, found: Partitioning) -> Iterable[parallel_layers.Segment]:
        for call in self._calls:
            for layer in call.layers:
                if type(layer) in _ATTENTION and self._may(layer, "heads") and self._fits(call, layer, "heads"):
                    yield self._take((call,), "sum", axes.heads(layer), axes.axis_of(layer, "heads"))
                    self._say(layer, "heads", f"{layer.num_heads // self._ways} of {layer.num_heads} heads each")

    def _pairs(self) -> Iterable[parallel_layers.Segment]:
        for last in self._calls:
            for layer in last.layers:
                members = self._members(last, layer) if self._can(last, layer, "row") else None
                if members is not None:
                    inner = tuple(call for call in self._calls if id(call) in members or call is last)
                    openers = [call for call in inner[:-1] if _is_linear(call)]
                    cuttings = [cut for call in openers for cut in axes.columns(call.operation)]
                    cuttings += [cut for call in inner for each in call.layers for cut in axes.channels(each)]
                    cuttings += axes.rows(layer)
                    yield self._take(inner, "pair", cuttings, axes.axis_of(layer, "row"))
                    for call in openers:
                        self._say(call.operation, "column", f"then {layer.name}")
                    for call in inner[:-1]:
                        if isinstance(call.operation, keras.layers.BatchNormalization):
                            self._say(call.operation, "column", "by channels")
                    self._say(layer, "row", f"after {', '.join(call.name for call in openers)}")

    def _alone(self) -> Iterable[parallel_layers.Segment]:
        """A column whose parts are brought together: the logits, and what is asked for; a row that is asked for."""
        for call in self._calls:
            for layer in call.layers:
                is_head = any(id(tensor) in self._outputs for tensor in call.makes) and _grows(layer)
                if (self._wanted is not None or is_head) and self._can(call, layer, "column"):
                    yield self._take((call,), "column", axes.columns(layer), axes.axis_of(layer, "column"))
                    self._say(layer, "column", "its parts are brought together")
                elif self._wanted is not None and self._can(call, layer, "row"):
                    yield self._take((call,), "row", axes.rows(layer), axes.axis_of(layer, "row"))
                    self._say(layer, "row", "its input is handed out in parts")

    def _embeddings(self, found: Partitioning) -> None:
        for call in self._calls:
            for layer in call.layers:
                if type(layer) is keras.layers.Embedding and self._may(layer, "vocabulary"):
                    if self._fits(call, layer, "vocabulary"):
                        found.embeddings.append((self._prefix + layer.name, layer))
                        each = layer.input_dim // self._ways
                        self._say(layer, "vocabulary", f"{each} of {layer.input_dim} rows each")

    def _members(self, last, layer) -> set[int] | None:
        """The calls that make the input of a row-parallel layer in parts, or None."""
        members: set[int] = set()
        axis = axes.axis_of(layer, "row")

        def visit(tensor) -> bool:
            call = self._made_by.get(id(tensor))
            if call is None or id(call) in self._taken:
                return False
            if id(call) in members:
                return True
            members.add(id(call))
            if _is_linear(call):
                return self._can(call, call.operation, "column") and axes.axis_of(call.operation, "column") == axis
            return self._works_on_parts(call, axis) and all([visit(needed) for needed in call.needs])

        if len(last.needs) != 1 or not visit(last.needs[0]):
            return None
        inside = [call for call in self._calls if id(call) in members]
        users = {id(user) for call in inside for tensor in call.makes for user in self._users.get(id(tensor), ())}
        leaves = any(id(tensor) in self._outputs for call in inside for tensor in call.makes)
        return None if leaves or users - members - {id(last)} else members

    def _works_on_parts(self, call, axis: int) -> bool:
        """Whether a call does to each part what it does to the whole."""
        operation = call.operation
        if any(len(tensor.shape) != len(call.makes[0].shape) for tensor in call.needs) and len(call.needs) > 1:
            return False
        if call.has_arrays:  # which would have to be cut too
            return False
        if not call.layers:
            return type(operation).__module__.startswith("keras.") and type(operation).__name__ in _EACH_OPERATION
        if self._times[id(operation)] > 1:
            return False
        if isinstance(operation, keras.layers.BatchNormalization):
            rank = len(call.makes[0].shape)
            same = axis == operation.axis or axis == operation.axis - rank
            return same and not (operation.renorm or _why_not_kept(operation)) and self._divides(operation)
        if type(operation) is keras.layers.Activation:
            return _is_elementwise(operation.activation)
        if type(operation) is keras.layers.Dropout:
            return operation.noise_shape is None
        if type(operation) in _EACH_CHANNEL:
            return axis == -1 and getattr(operation, "data_format", "channels_last") == "channels_last"
        return type(operation) in _EACH_ELEMENT

    def _divides(self, layer) -> bool:
        return layer.moving_mean.shape[0] % self._ways == 0

    def _can(self, call, layer, how: str) -> bool:
        return _is_linear(call) and self._may(layer, how) and self._fits(call, layer, how)

    def _may(self, layer, how: str) -> bool:
        return self._wanted is None or self._wanted.get(self._prefix + layer.name) == how

    def _fits(self, call, layer, how: str) -> bool:
        return id(call) not in self._taken and self._why_not(call, layer, how) is None

    def _why_not(self, call, layer, how: str) -> str | None:
        """Why a layer cannot be cut this way, or None."""
        if not layer.built:
            return "it is not built"
        if self._times[id(layer)] > 1:
            return "it is called several times"
        if getattr(layer, "quantization_mode", None) or getattr(layer, "lora_enabled", False):
            return "it is quantized, or has LoRA"
        if reason := _why_not_kept(layer):
            return reason
        if len(call.makes) > 1:
            return "it returns several tensors"
        if any(map(self._is_sparse, call.needs)):
            return "its input is sparse or ragged"
        found = _sizes(layer).get(how)
        if found is None:
            return f"a {type(layer).__name__} of its kind cannot be cut {_by(how)}"
        size, word = found
        if size % self._ways:
            low = size // self._ways * self._ways
            near = f"{low} or {low + self._ways}" if low else f"{self._ways}"
            return f"it has {size} {word}, which do not divide into {self._ways} parts ({near} would)"
        if how == "column" and not _is_elementwise(layer.activation):
            return "its activation looks at all outputs"
        if how == "column" and not isinstance(layer.activity_regularizer, _ADDS_UP):
            return "its activity regularizer looks at all outputs"
        return None

    def _is_sparse(self, tensor) -> bool:
        """Whether a tensor is sparse or ragged; Keras says so of `x * 0.5` too, where `x` is dense."""
        if not (tensor.sparse or tensor.ragged):
            return False
        call = self._made_by.get(id(tensor))
        return call is None or bool(call.layers) or any(map(self._is_sparse, call.needs))

    def _why_whole(self, call, layer) -> str:
        asked = None if self._wanted is None else self._wanted.get(self._prefix + layer.name)
        if self._wanted is not None and asked is None:
            return "not asked for"
        if asked is not None:
            return self._why_not(call, layer, asked) or "no partner"
        if _is_linear(call):
            return self._why_not(call, layer, "column") or self._why_not(call, layer, "row") or "no partner"
        if type(layer) in _ATTENTION:
            return self._why_not(call, layer, "heads") or "no partner"
        if type(layer) is keras.layers.Embedding:
            return self._why_not(call, layer, "vocabulary") or "no partner"
        return "of another kind"

    def _take(self, inner: tuple, kind: str, cuttings, axis: int) -> parallel_layers.Segment:
        segment = parallel_layers.Segment(inner, kind, tuple(cuttings), axis)
        self._taken |= {id(call): segment for call in inner}
        return segment

    def _say(self, layer, how: str | None, why: str) -> None:
        path = self._prefix + layer.name
        self._said.setdefault(path, Layer(path, how, why, layer.count_params()))


def _is_linear(call) -> bool:
    return type(call.operation) in (*_LINEAR, *_CONVOLUTIONS)


def _is_elementwise(activation) -> bool:
    if activation is None:
        return True
    return getattr(activation, "__module__", "").startswith("keras.") and activation.__name__ in _ACTIVATIONS


def _why_not_kept(layer) -> str | None:
    """Why a rule of the layer's variables cannot be kept on parts, or None."""
    holders = (layer, *model_graph.layers_within(layer).values())
    for variable in (variable for holder in holders for variable in holder.variables):
        if variable.constraint is not None and not isinstance(variable.constraint, keras.constraints.NonNeg):
            return f"the constraint {type(variable.constraint).__name__} looks at a whole variable"
        if not isinstance(variable.regularizer, _ADDS_UP):
            return f"the regularizer {type(variable.regularizer).__name__} looks at a whole variable"
    return None


def _sizes(layer) -> dict[str, tuple[int, str]]:
    """How a layer can be cut: how many there are of what."""
    if type(layer) is keras.layers.Dense:
        return {"column": (layer.kernel.shape[1], "outputs"), "row": (layer.kernel.shape[0], "inputs")}
    if type(layer) is keras.layers.EinsumDense:
        sizes = {how: (axes.einsum_size(layer, how), f"{how}s") for how in ("column", "row")}
        return {how: found for how, found in sizes.items() if found[0]}
    if type(layer) in _CONVOLUTIONS and layer.groups == 1:
        shape = layer.kernel.shape
        return {"column": (shape[-1], "filters"), "row": (shape[-2], "channels")}
    if type(layer) in _ATTENTION and layer.activity_regularizer is None:
        return {"heads": (layer.num_heads, "heads")}
    if type(layer) is keras.layers.Embedding:
        return {"vocabulary": (layer.input_dim, "rows")}
    return {}


def _grows(layer) -> bool:
    """Whether a layer has more outputs than inputs, as one that makes logits of a vocabulary."""
    found = _sizes(layer)
    return "column" in found and "row" in found and found["column"][0] >= found["row"][0]

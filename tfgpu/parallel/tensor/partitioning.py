"""Plans tensor parallelism: which layers of a model are split over several devices, and how.

| style | what is split | sums over devices |
|---|---|---|
| `"column"` | the outputs of Dense, EinsumDense, Conv | none: the parts go to the next layer, or are concatenated |
| `"row"` | their inputs | one in the forward pass |
| `"heads"` | attention, by heads | one in the forward pass, one in the backward pass |
| `"vocabulary"` | an embedding, by rows | one in the forward pass |

Layers within a custom layer, or a layer of KerasHub, are split by the plan of its class (`block_plans`).

A column-parallel layer, element-wise layers (dropout, activations, products, BatchNormalization by channels) and a
row-parallel layer make a pair, which needs one sum in the forward pass and one in the backward pass.
"""

import collections
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

import keras

from tfgpu.errors import InputError, unknown
from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor import blocks
from tfgpu.parallel.tensor.blocks import Block
from tfgpu.parallel.tensor.graph_search import GraphSearch, LayerSplit
from tfgpu.parallel.tensor.parallel_layers import Segment
from tfgpu.parallel.tensor.split_rules import STYLES


@dataclass
class Partitioning:
    """What is split in a model.

    Attributes:
        calls: for each functional model in which something is split, the calls that it runs from now on.
        segments: pairs of the path of a segment's first layer, and the segment.
        embeddings: pairs of a path and an embedding that is split by rows.
        blocks: custom layers whose sublayers are split, each after the block around it.
        layers: for each layer with variables, how it is split or why it is not.
    """

    calls: list[tuple[keras.Model, list]] = field(default_factory=list)
    segments: list[tuple[str, Segment]] = field(default_factory=list)
    embeddings: list[tuple[str, keras.layers.Embedding]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    layers: list[LayerSplit] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is split."""
        return not (self.segments or self.embeddings or self.blocks)


def partition(model: keras.Model, ways: int, asked: Mapping[str, str | None] | str = "auto") -> Partitioning:
    """Finds what can be split. The model does not change.

    Args:
        model: built; functional models within it are searched as well. Without a graph of its own it is split by the
            plans of its layers' classes alone.
        ways: into how many shards.
        asked: `"auto"`, or by pattern of layers one of `STYLES`, or None to leave a layer whole. The first pattern that
            matches counts; a layer that none matches stays whole.

    Raises:
        InputError: the model is not built, a pattern matches nothing, or a layer cannot be split as asked.
    """
    if isinstance(model, keras.Sequential):
        model_graph.functional(model)  # raises if it is not built
    layers = model_graph.layers_within(model)
    wanted = _wanted(model, layers, asked)
    graphs = _graphs(model, layers)
    times_called = collections.Counter(
        id(layer) for graph in graphs.values() for call in model_graph.calls(graph) for layer in call.layers
    )
    found = Partitioning()
    for prefix, graph in graphs.items():
        search = GraphSearch(graph, prefix, ways, wanted, times_called)
        segments, embeddings = search.segments(), search.embeddings()
        if segments:
            found.calls.append((graph, search.calls_with_segments()))
        found.segments += [(prefix + segment.name, segment) for segment in segments]
        found.embeddings += [(prefix + layer.name, layer) for layer in embeddings]
        found.layers += search.layer_splits()
    found.embeddings = list({id(layer): (path, layer) for path, layer in reversed(found.embeddings)}.values())
    _add_blocks(found, model, ways, wanted)
    _check_all_split(found, wanted)
    return found


def _add_blocks(found: Partitioning, model: keras.Model, ways: int, wanted: dict | None) -> None:
    """Adds what is split within layers that have no graph; the rows of these layers give way to those within."""
    split = [layer for _, segment in found.segments for layer in segment.layers]
    split += [layer for _, layer in found.embeddings]
    taken = {id(each) for layer in split for each in (layer, *model_graph.layers_within(layer).values())}
    found.blocks, embeddings, notes = blocks.find(model, ways, taken, wanted)
    found.embeddings += embeddings
    styles = {note.path: note.style for note in found.layers}
    inside = [note for note in notes if styles.get(note.path) is None]
    around = {path for note in inside for path in _with_paths_around(note.path)}
    tables = {path for path, _ in found.embeddings}

    def gives_way(note: LayerSplit) -> bool:
        if note.style is None:
            return note.path in around
        return note.style == "vocabulary" and note.path not in tables  # one table in two graphs

    found.layers = [note for note in found.layers if not gives_way(note)] + inside


def _with_paths_around(path: str) -> list[str]:
    """The path of a layer, and those of the layers that hold it."""
    names = path.split("/")
    return ["/".join(names[:end]) for end in range(1, len(names) + 1)]


def _graphs(model: keras.Model, layers: Mapping[str, keras.layers.Layer]) -> dict[str, keras.Model]:
    """The functional models within a model, and then the model itself, by the prefix of their layers' paths."""
    inner = {path: model_graph.functional(layer) for path, layer in layers.items() if model_graph.is_functional(layer)}
    named = {**inner, **({"": model_graph.functional(model)} if model_graph.has_graph(model) else {})}
    once = {id(graph): (f"{path}/" if path else "", graph) for path, graph in named.items()}
    return dict(once.values())


def _wanted(model: keras.Model, layers: Mapping, asked) -> dict[str, str | None] | None:
    """The style that is asked for each layer, by path; None for `"auto"`."""
    if asked == "auto":
        return None
    if isinstance(asked, str) or not isinstance(asked, Mapping) or not asked:
        raise InputError(f"`plan` must be 'auto', or patterns with one of {', '.join(STYLES)}. Received: {asked!r}.")
    for style in asked.values():
        if style is not None and style not in STYLES:
            raise unknown("plan", style, STYLES)
    model_graph.check_patterns(model, asked)
    found = {}
    for path in layers:
        match = next((pattern for pattern in asked if fnmatch.fnmatchcase(path, pattern)), None)
        if match is not None:
            found[path] = asked[match]
    return found


def _check_all_split(found: Partitioning, wanted: dict[str, str | None] | None) -> None:
    by_path = {layer.path: layer for layer in found.layers}
    by_plan = {block.path for block in found.blocks}
    for path, style in (wanted or {}).items():
        if path in by_plan:
            continue
        if style is not None and (path not in by_path or by_path[path].style is None):
            reason = by_path[path].reason if path in by_path else "it is not a layer of a functional model"
            raise InputError(f"{path!r} cannot be split {STYLES[style]}: {reason}.")

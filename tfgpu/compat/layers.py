"""What Keras layers and functional models hold."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras

from tfgpu.compat.keras import Functional, Sequential
from tfgpu.compat.patch import override


def that_build_nothing(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Of a layer and those within, the built ones, and those without a `build` of their own (it might set numbers)."""
    plain = keras.layers.Layer.build, keras.Model.build
    return [each for each in layers_within(layer) if each.built or type(each).build in plain]


def layers_within(layer: keras.layers.Layer, include_self: bool = True, recursive: bool = True) -> list:
    """The sublayers of a layer, each after its parent."""
    return list(layer._flatten_layers(include_self=include_self, recursive=recursive))


def sees_whole_batch(layer: keras.layers.Layer) -> bool:
    """Whether a layer of tfgpu's, this one or one within, counts over all rows and all positions of a batch."""
    return any(getattr(each, "sees_whole_batch", False) is True for each in layers_within(layer))


def clear_losses(layer: keras.layers.Layer) -> None:
    """Forgets the losses that a layer's calls have added, and those of layers within."""
    layer._clear_losses()


def added_losses(layer: keras.layers.Layer) -> list:
    """The losses that a layer itself has added in calls, and has not forgotten."""
    return list(layer._losses)


def own_trainable(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables that a layer itself created as trainable, frozen or not; without its sublayers'."""
    return layer._trainable_variables


def own_non_trainable(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables that a layer itself created as not trainable; without its sublayers'."""
    return layer._non_trainable_variables


def own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables that a layer itself created; without its sublayers'."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


@contextmanager
def unlocked(layer: keras.layers.Layer) -> Iterator[tuple[Callable, Callable]]:
    """Inside the block, variables of a built layer can be replaced.

    Yields:
        Two functions of a variable: one removes it from the layer, one adds it.
    """
    layer._tracker.unlock()
    try:
        yield layer._untrack_variable, layer._track_variable
    finally:
        layer._tracker.lock()


KERNEL, EMBEDDINGS = "_kernel", "_embeddings"
"""The attributes in which layers keep their kernel and their embedding table, without LoRA's addition."""


def raw_kernel(layer: keras.layers.Layer) -> keras.Variable:
    """The kernel without LoRA's addition."""
    return layer._kernel


def raw_embeddings(layer: keras.layers.Embedding) -> keras.Variable:
    """The table without LoRA's addition."""
    return layer._embeddings


def set_raw_embeddings(layer: keras.layers.Embedding, table: object) -> None:
    """Replaces the table of an embedding layer."""
    layer._embeddings = table


@dataclass(frozen=True)
class KernelOf:
    """Stands for the kernel of a layer, whatever LoRA and quantization have made of it.

    Attributes:
        layer: the layer.
        shape: of the kernel of floats.
    """

    layer: keras.layers.Layer
    shape: tuple[int, ...]


@contextmanager
def named_kernels(kernels: Sequence[KernelOf]) -> Iterator[None]:
    """Inside the block, `layer.kernel` of some layers is the `KernelOf` of the layer."""
    before = [(kernel.layer, type(kernel.layer)) for kernel in kernels]
    for kernel, (layer, stock) in zip(kernels, before, strict=True):
        named = type(stock.__name__, (stock,), {"kernel": property(lambda self, kernel=kernel: kernel)})
        object.__setattr__(layer, "__class__", named)
    try:
        yield
    finally:
        for layer, stock in before:
            object.__setattr__(layer, "__class__", stock)


def attention_gate(layer: keras.layers.Layer) -> keras.layers.Layer | None:
    """The projection that gates an attention layer's output, or None."""
    return getattr(layer, "_gate_dense", None)


def attention_rank(layer: keras.layers.Layer) -> int:
    """The number of axes along which an attention layer attends."""
    return len(layer._attention_axes)


def graph_of(model: keras.Model) -> Functional | None:
    """The functional model itself, or the one inside a built Sequential; None for others."""
    if isinstance(model, Functional):
        return model
    return model._functional if isinstance(model, Sequential) else None


def nodes_in_order(graph: Functional) -> list:
    """Keras's records of a functional model's calls, in topological order."""
    by_depth = graph._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def outputs_structure(graph: Functional) -> object:
    """The structure of a functional model's outputs."""
    return graph._outputs_struct


def graph_runner(graph: Functional) -> Callable:
    """The function that runs a functional model's calls; its arguments are those of `replace_graph_runner`."""
    return graph._run_through_graph


def replace_graph_runner(graph: Functional, run: Callable) -> None:
    """Makes one functional model run its calls by the function `run`.

    Args:
        run: takes `inputs`, `operation_fn` (which maps an operation to the function to call; absent in some versions
            of Keras) and `call_fn`, and returns the outputs.
    """
    override(graph, "_run_through_graph", run, by=__name__)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """The axes over which a built BatchNormalization takes its moments."""
    return layer._reduction_axes


def recomputes(layer: keras.layers.Layer) -> bool:
    """Whether a layer was made in a `keras.RematScope`, so that Keras runs its call again in the backward pass."""
    return layer._remat_mode is not None


def changed_activity_regularizer(change: Callable[[Callable], Callable]) -> property:
    """A property `activity_regularizer`, for a class of layers, that gives `change(regularizer)`.

    A layer holds its regularizer as a plain attribute, whose value stays the original.

    Args:
        change: takes a regularizer and returns its replacement; called on each access.
    """

    def get(layer):
        kept = vars(layer).get("activity_regularizer")
        if kept is None or (changed := change(kept)) is kept:
            return kept
        changed.regularizer = kept
        return changed

    def put(layer, regularizer):  # a layer may pass its own on to one that it creates
        vars(layer)["activity_regularizer"] = getattr(regularizer, "regularizer", regularizer)

    return property(get, put)


@dataclass(frozen=True)
class AttentionSettings:
    """How an attention layer of Keras computes its scores.

    Attributes:
        scale: of the scores.
        dropout: rate of the probabilities' dropout.
        seed: what its dropout draws from.
        window: how far from a query its keys may be, or None.
        flash: its argument `flash_attention`; None leaves it to Keras's setting.
        gives_scores: whether the layer always returns its scores.
    """

    scale: float
    dropout: float
    seed: keras.random.SeedGenerator | None
    window: int | None
    flash: bool | None
    gives_scores: bool


def attention_settings(layer: keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention) -> AttentionSettings:
    """The settings of a built attention layer."""
    is_grouped = isinstance(layer, keras.layers.GroupQueryAttention)
    return AttentionSettings(
        scale=layer._inverse_sqrt_head_dim if is_grouped else layer._inverse_sqrt_key_dim,
        dropout=layer.dropout if is_grouped else layer._dropout,
        seed=getattr(getattr(layer, "_dropout_layer", None), "seed_generator", None),
        window=getattr(layer, "sliding_window" if is_grouped else "_sliding_window", None),
        flash=layer._flash_attention,
        gives_scores=is_grouped and getattr(layer, "_return_attention_scores", False),
    )


def has_own_attention(layer: keras.layers.Layer) -> bool:
    """Whether an attention layer computes attention by code of its own class instead of Keras's."""
    return all(
        type(layer)._compute_attention is not kind._compute_attention
        for kind in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    )

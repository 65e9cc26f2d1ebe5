"""A model as a graph: which operation is called after which, on what; and the layers within layers."""

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np

from tfgpu.compat import layers, slots
from tfgpu.compat.keras import (
    Functional,
    Sequential,
    in_symbolic_scope,
    is_layer_with_graph,
    operation_with_training,
    tree,
)
from tfgpu.compat.patch import override
from tfgpu.core import step_context
from tfgpu.errors import InputError

_training = step_context.Slot("model_graph.training")
"""The argument `training` of the innermost call of a model whose run was replaced."""


@dataclass(frozen=True)
class Call:
    """One call of an operation in a functional model.

    Attributes:
        operation: a layer, or an operation of `keras.ops`.
        inputs: the symbolic tensors that the call takes.
        outputs: the symbolic tensors that the call returns.
        node: Keras's own record of the call.
    """

    operation: Callable
    inputs: tuple = field(repr=False)
    outputs: tuple = field(repr=False)
    node: object = field(repr=False)

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def layers(self) -> tuple[keras.layers.Layer, ...]:
        """The layer that is called; empty for an operation that is not a layer."""
        return (self.operation,) if isinstance(self.operation, keras.layers.Layer) else ()

    @property
    def has_array_arguments(self) -> bool:
        """Whether the call takes arrays that no operation of the model computes."""
        given = tree.flatten((self.node.arguments.args, self.node.arguments.kwargs))
        return any(np.ndim(value) > 0 for value in given if not isinstance(value, (keras.KerasTensor, str)))

    def run(self, values: dict[int, object], operation_fn: Callable) -> None:
        """Runs the call on tensors and adds its results to `values`: see `run`."""
        arguments, named = self.node.arguments.fill_in(values)
        results = operation_fn(self.operation)(*arguments, **named)
        for symbolic, value in zip(self.outputs, tree.flatten(results), strict=True):
            values[id(symbolic)] = value


def is_functional(model: keras.layers.Layer) -> bool:
    """Whether a model has a graph, as `functional` requires."""
    return is_layer_with_graph(model)


def has_graph(model: keras.Model) -> bool:
    """Whether `functional` finds a functional model."""
    return layers.graph_of(model) is not None


def functional(model: keras.Model) -> Functional:
    """The functional model that a model is, or that a Sequential model calls.

    Raises:
        InputError: the model has no graph: it is subclassed, or a Sequential model that is not built.
    """
    graph = layers.graph_of(model)
    if graph is not None:
        return graph
    if isinstance(model, Sequential):
        raise InputError("A Sequential model needs its input shape first. Begin it with keras.Input(shape).")
    raise InputError(
        f"{type(model).__name__} {model.name!r} has no graph to split: its `call` is Python code. Build it with "
        "keras.Model(inputs, outputs), use `parallel.place` with the names of its layers, or give the classes of its "
        "layers plans (`parallel.register_plan`) for `parallel.tensor`."
    )


def calls(model: keras.Model) -> list[Call]:
    """All calls of a functional model in the order in which Keras runs them, each after the calls that it depends on.

    Returns the calls of `replace_calls` where it was used.

    Raises:
        InputError: as for `functional`.
    """
    graph = functional(model)
    replaced = slots.get(graph, "calls")
    if replaced is not None:
        return list(replaced)
    return [
        Call(node.operation, tuple(node.input_tensors), tuple(node.outputs), node)
        for node in layers.nodes_in_order(graph)
        if not node.is_input
    ]


def inputs_of(chosen: Iterable[Call]) -> tuple:
    """The symbolic tensors that a run of calls takes from outside it, each once."""
    chosen = list(chosen)
    own = {id(tensor) for call in chosen for tensor in call.outputs}
    return tuple({id(tensor): tensor for call in chosen for tensor in call.inputs if id(tensor) not in own}.values())


def layers_within(layer: keras.layers.Layer, prefix: str = "") -> dict[str, keras.layers.Layer]:
    """All layers within a layer by path (`"encoder/dense"`), each after the layer that holds it."""
    found = {}
    for inner in layers.layers_within(layer, include_self=False, recursive=False):
        path = f"{prefix}{inner.name}"
        found[path] = inner
        found |= layers_within(inner, f"{path}/")
    return found


def check_patterns(model: keras.Model, patterns: Iterable[str]) -> None:
    """Refuses a pattern that matches the path of no layer.

    Raises:
        InputError: as described; names layers with similar paths.
    """
    paths = list(layers_within(model))
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            near = difflib.get_close_matches(pattern, paths, 3, 0.3) or paths[:3]
            raise InputError(f"No layer of {model.name!r} is called {pattern!r}. There are {', '.join(near)}, ...")


def with_layers_within(outer: Iterable[keras.layers.Layer]) -> list[keras.layers.Layer]:
    """Some layers, each before the layers within it."""
    return [each for layer in outer for each in (layer, *layers_within(layer).values())]


def shape_of_rows(tensor, rows: int) -> tuple:
    """The shape of a model's input with so many rows, where its own number is not fixed.

    Raises:
        InputError: another size is unknown.
    """
    shape = (tensor.shape[0] or rows, *tensor.shape[1:])
    if None in shape:
        raise InputError(f"The input {tensor.name!r} has an unknown size: {tensor.shape}. Give a `batch` of inputs.")
    return shape


def loss_owner(candidates: Iterable[keras.layers.Layer]) -> keras.layers.Layer | None:
    """One of these layers, or a layer within one, that can take `add_loss`; a functional model cannot."""
    outer = list(candidates)
    return next((layer for layer in [*outer, *with_layers_within(outer)] if not isinstance(layer, keras.Model)), None)


def run(chosen: Sequence[Call], values: dict[int, object], operation_fn: Callable) -> None:
    """Runs calls on tensors and adds their results to `values`.

    Args:
        chosen: some of `calls`, in their order.
        values: tensors by the `id` of the symbolic tensor that each stands for.
        operation_fn: turns an operation into the function to call, as in Keras.
    """
    for call in chosen:
        call.run(values, operation_fn)


def replace_calls(model: keras.Model, chosen: Sequence[Call]) -> None:
    """Makes a functional model run these calls in place of its own.

    Args:
        model: functional.
        chosen: calls of the model, or objects that stand for several of them, each after the calls that it depends on.
            Together they compute what the model's own calls compute.
    """
    graph = functional(model)
    stock = layers.graph_runner(graph)
    slots.of(graph).calls = tuple(chosen)

    def run_graph(inputs, operation_fn=_as_it_is, call_fn=None):
        if in_symbolic_scope():
            return stock(inputs, operation_fn, call_fn)
        return _run_graph_by(graph, inputs, lambda values: run(chosen, values, operation_fn))

    layers.replace_graph_runner(graph, run_graph)


def forbid_layer_changes(model: keras.Sequential) -> None:
    """Makes `add` and `pop` of a Sequential model raise an error."""

    def refuse(*args, **kwargs):
        raise InputError(
            f"{model.name!r} is on several devices, so its layers are fixed. Call `add` and `pop` before that, "
            "or build a new model from the layers of the file that `save` writes."
        )

    override(model, "add", refuse, by=__name__)
    override(model, "pop", refuse, by=__name__)


def in_training(operation: Callable) -> Callable:
    """An operation as `fit` calls it: with `training=True` if it takes that argument."""
    return operation_with_training(operation, training=True)


def override_run(model: keras.Model, run_calls: Callable, name: str) -> None:
    """Replaces how a functional model runs its calls in training. Runs without `training=True` stay as they are.

    Args:
        model: functional or Sequential.
        run_calls: takes `values` and `operation_fn` as `run` does, and adds the values of the model's outputs.
        name: of the function in `tfgpu.parallel` that replaces the run; `override_name` returns it.

    Raises:
        InputError: the run was replaced before.
    """
    graph = functional(model)
    if override_name(model):
        raise InputError(f"{model.name!r} was already given to `parallel.{override_name(model)}`. Build a new model.")
    stock_run, stock_call = layers.graph_runner(graph), graph.call

    @functools.wraps(stock_call)
    def call(inputs, training=None, mask=None, **kwargs):
        with _training.set_to(training):
            return stock_call(inputs, training=training, mask=mask, **kwargs)

    def run_graph(inputs, operation_fn=_as_it_is, call_fn=None):
        if in_symbolic_scope() or not _training.get():
            return stock_run(inputs, operation_fn, call_fn)
        return _run_graph_by(graph, inputs, lambda values: run_calls(values, operation_fn))

    slots.of(graph).override_name = name
    override(graph, "call", call, by=__name__)
    layers.replace_graph_runner(graph, run_graph)


def override_name(model: keras.Model) -> str | None:
    """The name that `override_run` was given for a functional model, or None."""
    return slots.get(functional(model), "override_name")


def _as_it_is(operation: Callable) -> Callable:
    return operation


def _run_graph_by(graph: Functional, inputs: object, add_values: Callable[[dict], None]) -> object:
    """The outputs of a functional model whose calls are run by `add_values`."""
    values = {id(symbolic): value for symbolic, value in zip(graph.inputs, tree.flatten(inputs), strict=True)}
    add_values(values)
    structure = layers.outputs_structure(graph)
    return tree.pack_sequence_as(structure, [values[id(tensor)] for tensor in graph.outputs])

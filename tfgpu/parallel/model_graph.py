"""A model as a graph: which operation is called after which, on what; and the layers within layers."""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
from keras.src import tree
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.models.functional import Functional, operation_fn
from keras.src.models.sequential import Sequential

from tfgpu.errors import InputError


@dataclass(frozen=True)
class Call:
    """One call of an operation in a functional model.

    Attributes:
        operation: a layer, or an operation of `keras.ops`.
        needs: the symbolic tensors that go in, and `makes`, those that come out.
        node: Keras's own record.
    """

    operation: Callable
    needs: tuple = field(repr=False)
    makes: tuple = field(repr=False)
    node: object = field(repr=False)

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def layers(self) -> tuple[keras.layers.Layer, ...]:
        """The layer that is called, if it is one."""
        return (self.operation,) if isinstance(self.operation, keras.layers.Layer) else ()

    @property
    def has_arrays(self) -> bool:
        """Whether arrays of numbers, which no operation of the model makes, go in."""
        given = tree.flatten((self.node.arguments.args, self.node.arguments.kwargs))
        return any(np.ndim(value) > 0 for value in given if not isinstance(value, (keras.KerasTensor, str)))

    def run(self, values: dict[int, object], operation_fn: Callable) -> None:
        """Runs the call on tensors, and puts what comes out among them: see `run`."""
        arguments, named = self.node.arguments.fill_in(values)
        outputs = operation_fn(self.operation)(*arguments, **named)
        for made, value in zip(self.makes, tree.flatten(outputs), strict=True):
            values[id(made)] = value


def is_functional(model: keras.layers.Layer) -> bool:
    """Whether a model has a graph, as `functional` asks."""
    return isinstance(model, Functional) or (isinstance(model, Sequential) and model._functional is not None)


def functional(model: keras.Model) -> Functional:
    """The functional model that a model is, or that its calls go to.

    Raises:
        InputError: the model has no graph: it is a subclassed one, or a Sequential that is not built.
    """
    if isinstance(model, Functional):
        return model
    if isinstance(model, Sequential):
        if model._functional is None:
            raise InputError("A Sequential needs its input's shape first. Begin it with keras.Input(shape).")
        return model._functional
    raise InputError(
        f"{type(model).__name__} {model.name!r} has no graph that could be cut: its `call` is Python. Make it with "
        "keras.Model(inputs, outputs), or take `parallel.place` with the names of its layers."
    )


def calls(model: keras.Model) -> list[Call]:
    """All calls of a functional model, each after those whose results it needs, in the order in which Keras runs them.

    Where the model is to be run by other calls (`replace_calls`), those.

    Raises:
        InputError: as for `functional`.
    """
    graph = functional(model)
    if hasattr(graph, "_tfgpu_calls"):
        return list(graph._tfgpu_calls)
    by_depth = graph._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [
        Call(node.operation, tuple(node.input_tensors), tuple(node.outputs), node)
        for node in nodes
        if not node.is_input
    ]


def layers_within(layer: keras.layers.Layer, prefix: str = "") -> dict[str, keras.layers.Layer]:
    """All layers within one, by path (`"encoder/dense"`), each after the one that holds it."""
    found = {}
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        path = f"{prefix}{inner.name}"
        found[path] = inner
        found |= layers_within(inner, f"{path}/")
    return found


def loss_owner(layers: Iterable[keras.layers.Layer]) -> keras.layers.Layer | None:
    """One of some layers, or within them, that can hold what they add by `add_loss`; a functional model cannot."""
    layers = list(layers)
    inner = [within for layer in layers for within in layers_within(layer).values()]
    return next((layer for layer in [*layers, *inner] if not isinstance(layer, keras.Model)), None)


def run(chosen: Sequence[Call], values: dict[int, object], operation_fn: Callable) -> None:
    """Runs calls on tensors, and puts what comes out among them.

    Args:
        chosen: some of `calls`, in their order.
        values: tensors by the `id` of the symbolic tensor that each stands for.
        operation_fn: what makes of an operation the function that is called, as Keras has it.
    """
    for call in chosen:
        call.run(values, operation_fn)


def replace_calls(model: keras.Model, chosen: Sequence[Call]) -> None:
    """Lets a functional model run by these calls from now on: some of its own, some that stand for several of them.

    Args:
        model: functional.
        chosen: each after those whose results it needs; together they make what the model's own calls make for others.
    """
    graph = functional(model)
    stock = graph._run_through_graph
    graph._tfgpu_calls = tuple(chosen)

    def run_through_graph(inputs, operation_fn=lambda operation: operation, call_fn=None):
        if in_symbolic_scope():
            return stock(inputs, operation_fn, call_fn)
        values = {id(x): y for x, y in zip(graph.inputs, tree.flatten(inputs), strict=True)}
        run(graph._tfgpu_calls, values, operation_fn)
        return tree.pack_sequence_as(graph._outputs_struct, [values[id(tensor)] for tensor in graph.outputs])

    object.__setattr__(graph, "_run_through_graph", run_through_graph)


def forbid_layer_changes(model: keras.Sequential) -> None:
    """Refuses from now on to add layers to a model, or to take them away."""

    def refuse(*args, **kwargs):
        raise InputError(
            f"{model.name!r} is spread over devices, and keeps its layers. Call `add` and `pop` before, or make a new "
            "model of its layers from the file that `save` writes."
        )

    for name in ("add", "pop"):
        object.__setattr__(model, name, refuse)


def in_training(operation: Callable) -> Callable:
    """An operation as `fit` calls it: with `training=True`, where it takes that."""
    return operation_fn(operation, training=True)


def override_run(model: keras.Model, run_calls: Callable, name: str) -> None:
    """Lets a functional model run its calls in another way in training. What runs without `training=True` stays.

    Args:
        model: functional or Sequential.
        run_calls: takes `values` and `operation_fn` as `run` does, and adds what the model's outputs stand for.
        name: of the way, which `override_name` tells.

    Raises:
        InputError: the model has another way already.
    """
    graph = functional(model)
    if override_name(model):
        raise InputError(f"{model.name!r} was given to `parallel.{override_name(model)}` before. Make it anew.")
    stock_run, stock_call, here = graph._run_through_graph, graph.call, threading.local()

    @functools.wraps(stock_call)
    def call(inputs, training=None, mask=None, **kwargs):
        here.training = training
        return stock_call(inputs, training=training, mask=mask, **kwargs)

    def run_through_graph(inputs, operation_fn=lambda operation: operation, call_fn=None):
        if in_symbolic_scope() or not getattr(here, "training", None):
            return stock_run(inputs, operation_fn, call_fn)
        values = {id(x): y for x, y in zip(graph.inputs, tree.flatten(inputs), strict=True)}
        run_calls(values, operation_fn)
        return tree.pack_sequence_as(graph._outputs_struct, [values[id(tensor)] for tensor in graph.outputs])

    run_through_graph.tfgpu_name = name
    object.__setattr__(graph, "call", call)
    object.__setattr__(graph, "_run_through_graph", run_through_graph)


def override_name(model: keras.Model) -> str | None:
    """The name that `override_run` was given for a functional model, if it was."""
    return getattr(functional(model)._run_through_graph, "tfgpu_name", None)

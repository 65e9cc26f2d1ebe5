"""Runs a functional model in an order in which BatchNormalization layers on parallel branches share a collective.

Each BatchNormalization waits until nothing else can run. Those that then wait together (the last ones of a residual
block's two branches, say) need nothing of each other, and their moments travel in one all-reduce, forward and backward.
There are then as many all-reduces as there are such layers on the model's longest path, at the least.

The order depends on the graph alone, so it is the same on all replicas and workers. Operations whose order could be
noticed keep it: a layer of the user's, one that draws random numbers or keeps state, a layer that is called twice.
"""

import functools
from collections.abc import Callable, Sequence
from enum import Enum, auto

import keras
import tensorflow as tf

from tfgpu.compat import layers, slots
from tfgpu.compat.keras import BatchNormalization, Functional, tree
from tfgpu.core import replication, step_context
from tfgpu.core.moments import global_moments
from tfgpu.core.row_mixing import own_layers


class Kind(Enum):
    """When a call may run: in its place among others that are ordered, at any time, or with others that wait."""

    ORDERED = auto()
    FREE = auto()
    WAITS = auto()


def replicas_meet() -> bool:
    """Whether what runs here may need the moments of other replicas' rows."""
    context = replication.replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return False
    return not (step_context.current().is_trying or step_context.has_local_forward())


def groups_of(graph: Functional) -> list[tuple] | None:
    """All calls of a functional model in groups, in order; None if no group has several, so that Keras's order stays.

    Each group is one call, or several of BatchNormalization layers that need nothing of each other.
    """
    nodes = [node for node in layers.nodes_in_order(graph) if not node.is_input]
    if sum(isinstance(node.operation, BatchNormalization) for node in nodes) < 2:
        return None
    kinds = tuple(_kind(node) for node in nodes)
    known = slots.of(graph)
    if getattr(known, "moment_groups", (None,))[0] != kinds:  # a layer may be placed on a device later
        groups = in_groups(nodes, kinds, {id(tensor) for tensor in graph.inputs})
        known.moment_groups = kinds, groups if any(len(group) > 1 for group in groups) else None
    return known.moment_groups[1]


def in_groups(nodes: Sequence, kinds: Sequence[Kind], known: set[int]) -> list[tuple]:
    """Calls in groups, each after those that it depends on.

    Args:
        nodes: Keras's records of the calls, each after those that it depends on.
        kinds: for each, when it may run.
        known: the symbolic tensors that are there from the start, by `id`.
    """
    left, known, groups = list(zip(nodes, kinds, strict=True)), set(known), []
    while left:
        left = _with_what_can_run(left, known, groups)
        waiting = _waiting_together(left, known)
        groups += [tuple(waiting)] if waiting else [(node,) for node, _ in left]
        known |= {id(tensor) for node in waiting for tensor in node.outputs}
        left = [(node, kind) for node, kind in left if node not in waiting] if waiting else []
    return groups


def _with_what_can_run(left: list[tuple], known: set[int], groups: list[tuple]) -> list[tuple]:
    """Appends to `groups` what can run without a call that waits, and to `known` its outputs; returns the rest."""
    rest, operations, are_ordered = [], set(), False
    for node, kind in left:
        can_run = kind is not Kind.WAITS and _is_ready(node, known) and id(node.operation) not in operations
        if can_run and not (are_ordered and kind is Kind.ORDERED):
            groups.append((node,))
            known |= {id(tensor) for tensor in node.outputs}
            continue
        rest.append((node, kind))
        operations.add(id(node.operation))  # whose later calls run later
        are_ordered |= kind is Kind.ORDERED
    return rest


def _waiting_together(left: list[tuple], known: set[int]) -> list:
    """The calls that wait and have their inputs; not the second call of a layer whose first cannot run yet."""
    waiting, operations = [], set()
    for node, kind in left:
        if kind is Kind.WAITS and _is_ready(node, known) and id(node.operation) not in operations:
            waiting.append(node)
        else:
            operations.add(id(node.operation))
    return waiting


def _is_ready(node, known: set[int]) -> bool:
    return all(id(tensor) in known for tensor in node.input_tensors)


def _kind(node) -> Kind:
    """When a call may run. Keras's own layers and operations are free, if they keep, draw and call nothing."""
    operation = node.operation
    if not type(operation).__module__.startswith("keras.") or "call" in vars(operation):
        return Kind.ORDERED
    if not isinstance(operation, keras.layers.Layer):
        given = [*vars(operation).values(), *tree.flatten((node.arguments.args, node.arguments.kwargs))]
        return Kind.ORDERED if any(callable(value) for value in given) else Kind.FREE
    if own_layers.is_own(operation) or len(layers.layers_within(operation)) > 1:
        return Kind.ORDERED
    if type(operation) is BatchNormalization:
        return Kind.ORDERED if layers.recomputes(operation) else Kind.WAITS
    has_state = len(operation.variables) > len(layers.own_trainable(operation))
    return Kind.ORDERED if has_state else Kind.FREE


def run(graph: Functional, groups: Sequence[tuple], inputs: object, operation_fn: Callable) -> object:
    """The outputs of a functional model whose calls run in groups.

    Args:
        graph: functional.
        groups: of `groups_of`.
        inputs: tensors, in the structure of the model's inputs.
        operation_fn: turns an operation into the function to call, as in Keras.
    """
    values = {id(symbolic): value for symbolic, value in zip(graph.inputs, tree.flatten(inputs), strict=False)}
    for group in groups:
        group = [node for node in group if _is_ready(node, values)]
        for node, results in zip(group, _results(group, values, operation_fn), strict=True):
            for symbolic, value in zip(node.outputs, tree.flatten(results), strict=False):
                values[id(symbolic)] = value
    structure = layers.outputs_structure(graph)
    return tree.pack_sequence_as(structure, [values[id(tensor)] for tensor in graph.outputs])


def _results(group: Sequence, values: dict[int, tf.Tensor], operation_fn: Callable) -> list:
    calls = []
    for node in group:
        args, kwargs = node.arguments.fill_in(values)
        calls.append(functools.partial(operation_fn(node.operation), *args, **kwargs))
    return global_moments.in_one_collective(calls) if len(calls) > 1 else [call() for call in calls]

"""Says what a traced step would do on GPUs, on a machine without one.

    with tracer.recording() as calls:
        model.fit(...)
    facts = calls.step(rows=13)
    print(facts.bytes_moved("to host"), facts.collectives)

The step's devices must be `CPU:1`, `CPU:2` and so on: they stand for `GPU:0`, `GPU:1`, and `CPU:0` is the host.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import tensorflow as tf
from flat_graph import Node, flatten
from placer import HOST, Placement, parse, place
from step_facts import StepFacts, collect
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction


@dataclass
class Call:
    """A function that Python has called.

    Attributes:
        function: as it was traced.
        devices: of each of its arguments.
        times: how often it was called.
    """

    function: ConcreteFunction
    devices: dict[int, str]
    times: int = 1

    def facts(self, rows: int | None = None) -> StepFacts:
        """What the function does; see `facts_of`."""
        return facts_of(self.function, self.devices, rows=rows)


@dataclass
class Calls:
    """The functions that were called while `recording`, in the order of their first calls."""

    all: list[Call] = field(default_factory=list)

    @property
    def largest(self) -> Call:
        """The function of the most operations: the step, or the loop of steps."""
        return max(self.all, key=lambda call: _size(call.function.graph))

    def step(self, rows: int | None = None) -> StepFacts:
        """The facts of the largest function's step."""
        return self.largest.facts(rows)


@contextlib.contextmanager
def recording() -> Iterator[Calls]:
    """Notes which compiled functions Python calls in the block, and where their arguments are."""
    calls, by_function, stock = Calls(), {}, ConcreteFunction._call_flat

    def call_flat(self, tensor_inputs, captured_inputs):
        if tf.executing_eagerly():
            if id(self) in by_function:
                by_function[id(self)].times += 1
            else:
                given = [*tensor_inputs, *captured_inputs]
                call = Call(self, {number: device_of(tensor) for number, tensor in enumerate(given)})
                by_function[id(self)] = call
                calls.all.append(call)
        return stock(self, tensor_inputs, captured_inputs)

    ConcreteFunction._call_flat = call_flat
    try:
        yield calls
    finally:
        ConcreteFunction._call_flat = stock


def facts_of(
    function: ConcreteFunction,
    devices: dict[int, str] | None = None,
    *,
    rows: int | None = None,
    gpus: int | None = None,
) -> StepFacts:
    """What a traced function does on GPUs: what a step does, where the function is a loop of steps.

    Args:
        function: a concrete function.
        devices: of its arguments by number; those that it has captured are found, the others are on the host.
        rows: of a replica; best a prime number, by which tensors with a row an example are known.
        gpus: how many GPUs there are, if more than the function names.
    """
    nodes, placements = placed(function, devices, gpus=gpus)
    loop = _loop_of_steps(nodes)
    if loop is None:
        return collect(nodes, placements, rows)
    inside = [node for node in nodes if loop in node.loops]
    facts = collect(inside, placements, rows)
    facts.per_call = collect([node for node in nodes if loop not in node.loops], placements, rows)
    return facts


def placed(
    function: ConcreteFunction, devices: dict[int, str] | None = None, *, gpus: int | None = None
) -> tuple[list[Node], dict[Node, Placement]]:
    """The flat graph of a function and where its operations run; arguments as for `facts_of`."""
    nodes, found = flatten(function.graph), dict(devices or {})
    captured = function.captured_inputs
    first = len(function.graph.inputs) - len(captured)
    for number, tensor in enumerate(captured):
        found.setdefault(first + number, device_of(tensor))
    named = {*found.values(), *(each.device for node in nodes for each in (node, *node.inner))}
    numbers = [number for kind, number in map(parse, named) if kind == "GPU" and number is not None]
    return nodes, place(nodes, found, max(gpus or 1, *(number + 1 for number in numbers), 1))


def device_of(tensor: tf.Tensor) -> str:
    """Where an eager tensor is: for a resource, where what it stands for is."""
    if not hasattr(tensor, "backing_device"):
        return HOST
    return tensor.device if tensor.dtype == tf.resource else tensor.backing_device


def _loop_of_steps(nodes: list[Node]) -> str | None:
    """The outermost loop that holds most of the operations, if one does."""
    sizes: dict[str, int] = {}
    for node in nodes:
        if node.loops:
            sizes[node.loops[0]] = sizes.get(node.loops[0], 0) + 1
    loop = max(sizes, key=sizes.get, default=None)
    return loop if loop is not None and sizes[loop] > len(nodes) / 2 else None


def _size(graph: tf.Graph) -> int:
    inner = sum(len(each.cached_definition.node_def) for each in graph._functions.values())
    return len(graph.get_operations()) + inner

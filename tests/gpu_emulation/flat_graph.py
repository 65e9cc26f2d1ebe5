"""A traced function as one flat graph: calls are inlined, `While` and `If` are lowered to `Switch`, `Merge` and so on.

TensorFlow does the same before it places operations (`lower_while_op.cc`, `lower_if_op.cc`, `inline_function_utils.cc`
in tensorflow/core/common_runtime). A function that XLA compiles stays one node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
WHILES = ("While", "StatelessWhile")
IFS = ("If", "StatelessIf", "Case", "StatelessCase")
XLA = "XlaCluster"
_INDEX = tf.int32, tf.TensorShape([])
"""The second output of a `Merge`: which of its inputs it was."""


@dataclass(eq=False)
class Node:
    """An operation of the flat graph.

    Attributes:
        name: with the names of the calls, loops and branches around it.
        type: the operation's, `_Arg`, or `XlaCluster`.
        attributes: by name, as in a NodeDef.
        device: what was asked for, or "".
        inputs: (node, number of its output) of each data input.
        outputs: (dtype, shape) of each output.
        colocated: names of groups that are to be placed together: of other nodes, or of none.
        loops: the loops around it, outermost first.
        conditions: the conditional branches around it, outermost first.
        number: of the argument, for `_Arg`.
        inner: the nodes that XLA compiles, for `XlaCluster`.
        waits: what runs before it, though it takes nothing of it.
    """

    name: str
    type: str
    attributes: Mapping[str, Any]
    device: str
    inputs: list[tuple["Node", int]]
    outputs: list[tuple[tf.DType, tf.TensorShape]]
    colocated: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    number: int | None = None
    inner: list["Node"] = field(default_factory=list)
    waits: list["Expansion"] = field(default_factory=list)

    def __repr__(self):
        return f"{self.type} {self.name}"


@dataclass(eq=False)
class Expansion:
    """The nodes that an operation of a function has become."""

    nodes: list[Node]


@dataclass(frozen=True)
class _Scope:
    """Where nodes are made.

    Attributes:
        prefix: of their names.
        device: the caller's.
        loops, conditions: around them.
        names: of the function's operations, and what they are called in the flat graph.
    """

    prefix: str = ""
    device: str = ""
    loops: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


def flatten(graph: tf.Graph) -> list[Node]:
    """The nodes of a function's graph, each after its inputs, but for what a loop feeds back."""
    builder = _Builder()
    arguments = [
        builder.add("_Arg", t.op.name, _Scope(), [], [(t.dtype, t.shape)], {"T": _type(t.dtype)}, number=number)
        for number, t in enumerate(graph.inputs)
    ]
    builder.expand(graph, [(node, 0) for node in arguments], _Scope())
    return builder.nodes


class _Builder:
    def __init__(self):
        self.nodes: list[Node] = []

    def add(self, kind, name, scope, inputs, outputs, attributes, device=None, **rest) -> Node:
        node = Node(
            name=scope.prefix + name,
            type=kind,
            attributes=attributes,
            device=scope.device if device is None else device,
            inputs=list(inputs),
            outputs=outputs,
            loops=scope.loops,
            conditions=scope.conditions,
            **rest,
        )
        self.nodes.append(node)
        return node

    def expand(self, graph: tf.Graph, inputs: Sequence, scope: _Scope) -> list:
        """Adds a function's nodes; `inputs` and the result are (node, number of its output)."""
        found = {id(tensor): source for tensor, source in zip(graph.inputs, inputs, strict=True)}
        names = {op.name: scope.prefix + op.name for op in graph.get_operations()}
        names |= {tensor.op.name: source[0].name for tensor, source in zip(graph.inputs, inputs, strict=True)}
        scope, made = replace(scope, names=names), {}
        for op in _in_order(graph):
            if op.outputs and all(id(tensor) in found for tensor in op.outputs):
                continue  # an argument
            sources, first = [found[id(tensor)] for tensor in op.inputs], len(self.nodes)
            found.update(zip(map(id, op.outputs), self._add_operation(graph, op, sources, scope), strict=True))
            made[op] = Expansion(self.nodes[first:])
        for op, expansion in made.items():
            before = [made[each] for each in op.control_inputs if each in made]
            for node in expansion.nodes if before else ():
                node.waits += before
        return [found[id(tensor)] for tensor in graph.outputs]

    def _add_operation(self, graph, op, sources, scope) -> list:
        device = _merged(op.device, scope.device)
        if op.type in CALLS:
            function = _function(graph, op.get_attr("f").name, len(sources))
            if _is_compiled(function, op):
                return self._add_cluster(function, op, sources, scope, device)
            inside = replace(scope, prefix=f"{scope.prefix}{op.name}/", device=device)
            return self.expand(function, sources, inside)
        if op.type in WHILES:
            return self._lower_while(graph, op, sources, replace(scope, device=device))
        if op.type in IFS:
            return self._lower_if(graph, op, sources, replace(scope, device=device))
        definition = op.node_def
        wishes = definition.attr["_class"].list.s if "_class" in definition.attr else ()
        colocated = [name.decode().removeprefix("loc:@") for name in wishes if name.startswith(b"loc:@")]
        # TensorFlow renames what is of the same function; another name is taken for one of the whole graph.
        colocated = tuple(scope.names.get(name, name) for name in colocated)
        outputs = [(tensor.dtype, tensor.shape) for tensor in op.outputs]
        attributes = definition.attr
        node = self.add(op.type, op.name, scope, sources, outputs, attributes, device, colocated=colocated)
        return [(node, number) for number in range(len(outputs))]

    def _add_cluster(self, function, op, sources, scope, device) -> list:
        inside = _Builder()
        inside.expand(function, sources, replace(scope, prefix=f"{scope.prefix}{op.name}/", device=device))
        outputs = [(tensor.dtype, tensor.shape) for tensor in op.outputs]
        node = self.add(XLA, op.name, scope, sources, outputs, {}, device, inner=inside.nodes)
        return [(node, number) for number in range(len(outputs))]

    def _lower_while(self, graph, op, sources, scope) -> list:
        """Each variable of the loop stays where its first value asks to be; a resource is a constant of the loop."""
        name = op.name
        inside = replace(scope, prefix=f"{scope.prefix}{name}/", loops=(*scope.loops, scope.prefix + name))
        merges = list(sources)
        variables = {at: (t.dtype, t.shape) for at, t in enumerate(op.outputs) if t.dtype != tf.resource}
        for at, spec in variables.items():
            enter = self._flow("Enter", at, replace(inside, loops=scope.loops), sources[at], [sources[at]], [spec])
            merges[at] = self._flow("Merge", at, inside, sources[at], [(enter, 0)], [spec, _INDEX]), 0
        condition = _function(graph, op.get_attr("cond").name, len(sources))
        (wanted,) = self.expand(condition, merges, replace(inside, prefix=f"{inside.prefix}cond/"))
        go = self.add("LoopCond", "LoopCond", inside, [wanted], [(tf.bool, tf.TensorShape([]))], {})
        entries, exits = list(merges), list(sources)
        for at, spec in variables.items():
            switch = self._flow("Switch", at, inside, sources[at], [merges[at], (go, 0)], [spec, spec])
            leave = self._flow("Exit", at, replace(inside, loops=scope.loops), sources[at], [(switch, 0)], [spec])
            entries[at], exits[at] = (switch, 1), (leave, 0)
        body = _function(graph, op.get_attr("body").name, len(sources))
        results = self.expand(body, entries, replace(inside, prefix=f"{inside.prefix}body/"))
        for at, spec in variables.items():
            again = self._flow("NextIteration", at, inside, sources[at], [results[at]], [spec])
            merges[at][0].inputs.append((again, 0))
        return exits

    def _flow(self, kind, number, scope, near, inputs, outputs) -> Node:
        """An operation of control flow where `near` asks to be; an argument does not ask, it is somewhere."""
        node, together = near[0], (near[0].name,) if near[0].type == "_Arg" else ()
        attributes = {"T": _type(outputs[0][0])}
        label = f"{kind.lower()}_{number}"
        return self.add(kind, label, scope, inputs, outputs, attributes, node.device, colocated=together)

    def _lower_if(self, graph, op, sources, scope) -> list:
        names = _branches(op)
        chosen, *rest = sources
        inside = replace(scope, prefix=f"{scope.prefix}{op.name}/")
        switches = [self._switch(at, source, chosen, inside, len(names)) for at, source in enumerate(rest)]
        results = []
        for number, (label, branch) in enumerate(names.items()):
            around = (*scope.conditions, f"{scope.prefix}{op.name}/{label}")
            within = replace(inside, prefix=f"{inside.prefix}{label}/", conditions=around)
            arguments = [
                source if switch is None else (switch, number) for switch, source in zip(switches, rest, strict=True)
            ]
            results.append(self.expand(_function(graph, branch, len(rest)), arguments, within))
        found = []
        for number, tensor in enumerate(op.outputs):
            spec = tensor.dtype, tensor.shape
            parts = [result[number] for result in results]
            if spec[0] == tf.resource:
                found.append(parts[0])
                continue
            merge = self.add("Merge", f"merge_{number}", inside, parts, [spec, _INDEX], {"T": _type(spec[0])})
            found.append((merge, 0))
        return found

    def _switch(self, number, source, chosen, scope, branches) -> Node | None:
        """A branch's input, with its source; None for a resource, which needs none.

        For a `Case` TensorFlow's wish to place it so lacks the prefix `loc:@`, and has no effect.
        """
        node, output = source
        spec, is_if = node.outputs[output], branches == 2
        if spec[0] == tf.resource:
            return None
        attributes, outputs, together = {"T": _type(spec[0])}, [spec] * branches, (node.name,) if is_if else ()
        kind, label, inputs = "Switch" if is_if else "_SwitchN", f"switch_{number}", [source, chosen]
        return self.add(kind, label, scope, inputs, outputs, attributes, node.device, colocated=together)


def _in_order(graph: tf.Graph) -> list[tf.Operation]:
    """A graph's operations, each after its inputs: the gradient of a loop gives the loop inputs that are made later."""
    found = {}
    for root in graph.get_operations():
        path = [root]
        while path:
            later = [tensor.op for tensor in path[-1].inputs if tensor.op not in found]
            if later:
                path.append(later[0])
            else:
                found[path.pop()] = None
    return list(found)


def _function(graph: tf.Graph, name: str, arguments: int) -> tf.Graph:
    """The graph of a function by name, as traced, or from its definition where that has been traced further."""
    found = graph._get_function(name)
    traced = getattr(found, "graph", None)
    if traced is not None and len(traced.inputs) == arguments:
        return traced
    definition = found.cached_definition if found is not None else context.context().get_function_def(name)
    return function_def_to_graph.function_def_to_graph(definition)


def _branches(op: tf.Operation) -> dict[str, str]:
    """The functions of an `If` or a `Case`, in the order of the `Switch` outputs."""
    if op.type.endswith("Case"):
        return {f"branch_{number}": function.name for number, function in enumerate(op.get_attr("branches"))}
    return {label: op.get_attr(f"{label}_branch").name for label in ("else", "then")}


def _is_compiled(function: tf.Graph, op: tf.Operation) -> bool:
    for owner in (op.node_def.attr, getattr(function, "attributes", None) or {}):
        try:
            if "_XlaMustCompile" in owner and owner["_XlaMustCompile"].b:
                return True
        except (TypeError, AttributeError):
            continue
    return False


def _merged(own: str, callers: str) -> str:
    """An inlined node's device: its own, with what that leaves open taken from the caller's."""
    if not own or not callers:
        return own or callers
    return tf.DeviceSpec.from_string(callers).make_merged_spec(tf.DeviceSpec.from_string(own)).to_string()


def _type(dtype: tf.DType) -> attr_value_pb2.AttrValue:
    return attr_value_pb2.AttrValue(type=dtype.base_dtype.as_datatype_enum)

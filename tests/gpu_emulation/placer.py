"""Places a flat graph as TensorFlow's placer would on a machine with GPUs.

The rules are those of `placer.cc`, `colocation_graph.cc` and `memory_types.cc` in TensorFlow; the kernels are those
that the installed TensorFlow has registered. Its CUDA build registers the GPU kernels without a GPU, too.

In a traced function `CPU:0` is the host, and `CPU:1` to `CPU:n` stand for `GPU:0` to `GPU:n-1`.
"""

import functools
import re
from dataclasses import dataclass

import tensorflow as tf
from flat_graph import XLA, Node
from tensorflow.python.framework import kernels, op_def_registry

HOST = "CPU:0"
ORDER = ("GPU", "CPU")
METADATA = ("Shape", "Size", "Rank")
ON_HOST = (tf.string, tf.resource)  # DataTypeAlwaysOnHost


@dataclass(frozen=True)
class Kernel:
    """What TensorFlow would run: the device type of its registration, its arguments in host memory, its priority."""

    registered_for: str
    host_arguments: frozenset[str]
    priority: int


@dataclass(frozen=True)
class Placement:
    """Where a node runs.

    Attributes:
        device: `CPU:0` or a GPU such as `GPU:1`.
        asked: the device that was asked for, or "".
        inputs_on_host: for each input, whether the kernel takes it in host memory.
        outputs_on_host: for each output, whether the kernel leaves it there.
    """

    device: str
    asked: str
    inputs_on_host: tuple[bool, ...]
    outputs_on_host: tuple[bool, ...]


def place(nodes: list[Node], arguments: dict[int, str], gpus: int) -> dict[Node, Placement]:
    """Places nodes.

    Args:
        nodes: of a flat graph.
        arguments: the device of each argument of the function, by number.
        gpus: how many GPUs there are.
    """
    groups = _Groups(nodes, arguments, gpus)
    devices: dict[Node, str] = {}
    late, consumers = [], {}
    for node in nodes:
        for source, _ in node.inputs:
            consumers.setdefault(source, []).append(node)
    for node in nodes:
        if node.type != "_Arg" and not node.inputs and len(node.outputs) == 1:
            late.append(node)  # with its consumers, if they are on one device
            continue
        allowed = groups.devices_for(node)
        near = devices.get(node.inputs[0][0]) if node.type in METADATA and node.inputs else None
        devices[node] = groups.assign(node, near if near in allowed else allowed[0])
    for node in late:
        allowed, near = groups.devices_for(node), {devices.get(each) for each in consumers.get(node, ())}
        near = near.pop() if len(near) == 1 else None
        devices[node] = groups.assign(node, near if near in allowed else allowed[0])
    return {node: _placement(node, devices[node]) for node in nodes}


def parse(device: str) -> tuple[str | None, int | None]:
    """A device's kind and number on the emulated machine: None where the name leaves it open."""
    found = re.search(r"(CPU|GPU)(?::(\d+|\*))?$", device, re.IGNORECASE)
    if not found:
        return None, None
    kind, number = found[1].upper(), None if found[2] in (None, "*") else int(found[2])
    if kind == "CPU" and number:
        return "GPU", number - 1
    return kind, number


def kernel(node: Node, kind: str) -> Kernel | None:
    """The kernel that runs a node on a kind of device, or None."""
    types = tuple(sorted((name, value) for name, value in _types(node.attributes)))
    label = node.attributes["_kernel"].s.decode() if "_kernel" in node.attributes else ""
    return _kernel(node.type, types, label, kind)


@functools.cache
def _kernel(operation: str, types: tuple, label: str, kind: str) -> Kernel | None:
    given = dict(types)
    for registered_for in (kind, "DEFAULT"):
        for each in _registered(operation):
            if each.device_type != registered_for or each.label != label:
                continue
            if all(given.get(c.name, {None}) <= set(c.allowed_values.list.type) for c in each.constraint):
                return Kernel(registered_for, frozenset(each.host_memory_arg), each.priority)
    return None


@functools.cache
def _registered(operation: str) -> tuple:
    return tuple(kernels.get_registered_kernels_for_op(operation).kernel)


def _types(attributes):
    for name, value in attributes.items():
        if value.WhichOneof("value") == "type":
            yield name, frozenset([value.type])
        elif value.WhichOneof("value") == "list" and value.list.type:
            yield name, frozenset(value.list.type)


def _placement(node: Node, device: str) -> Placement:
    kind, number = parse(node.device)
    asked = "" if kind is None else f"{kind}:{number or 0}"
    if node.type == "_Arg":
        dtype = node.outputs[0][0]
        return Placement(device, asked, (), (device == HOST or dtype in (tf.int32, *ON_HOST),))
    if node.type == XLA:
        inputs = [source.outputs[number][0] in ON_HOST for source, number in node.inputs]
        return Placement(device, asked, tuple(inputs), tuple(dtype in ON_HOST for dtype, _ in node.outputs))
    if device == HOST:
        return Placement(device, asked, (True,) * len(node.inputs), (True,) * len(node.outputs))
    found = kernel(node, "GPU")
    hosted = found.host_arguments if found else frozenset()
    ins, outs = _argument_names(node)
    inputs = [
        name in hosted or source.outputs[number][0] in ON_HOST
        for name, (source, number) in zip(ins, node.inputs, strict=True)
    ]
    outputs = [name in hosted or dtype in ON_HOST for name, (dtype, _) in zip(outs, node.outputs, strict=True)]
    return Placement(device, asked, tuple(inputs), tuple(outputs))


def _argument_names(node: Node) -> tuple[list[str], list[str]]:
    """The name in the operation's definition of each input and output."""
    if node.type == "_SwitchN":
        return ["data", "output_index"], ["outputs"] * len(node.outputs)
    definition = op_def_registry.get(node.type)

    def names(arguments, count: int) -> list[str]:
        found = []
        for each in arguments:
            if each.number_attr:
                times = node.attributes[each.number_attr].i if each.number_attr in node.attributes else count
            else:
                times = len(node.attributes[each.type_list_attr].list.type) if each.type_list_attr else 1
            found += [each.name] * times
        return found

    return names(definition.input_arg, len(node.inputs)), names(definition.output_arg, len(node.outputs))


@dataclass
class _Group:
    """Nodes that must be on one device: which was asked for, and which kinds have kernels, with priorities."""

    kind: str | None
    number: int | None
    kinds: dict[str, int]
    assigned: str | None = None


class _Groups:
    """Which nodes share a device: those that touch a resource, and those that ask for it by `_class`."""

    def __init__(self, nodes: list[Node], arguments: dict[int, str], gpus: int):
        self._gpus = gpus
        self._parents = {node: node for node in nodes}
        self._groups = {node: self._single(node, arguments) for node in nodes}
        for node in nodes:
            for source, output in node.inputs:
                if source.outputs[output][0] == tf.resource and node.type != XLA:
                    self._join(source, node, resource=True)
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            for name in node.colocated:
                self._join(by_name.setdefault(name, node), node)

    def devices_for(self, node: Node) -> list[str]:
        """The devices on which a node may be, the preferred one first."""
        group = self._groups[self._root(node)]
        if group.assigned:
            return [group.assigned]
        for kind, number in ((group.kind, group.number), (None, None)):  # the second is soft placement
            found = [device for device in self._by_priority(group.kinds) if _matches(device, kind, number)]
            if found:
                return found
        raise ValueError(f"TensorFlow has no kernel for {node!r}, asked for {node.device!r}, on a CPU or a GPU.")

    def assign(self, node: Node, device: str) -> str:
        self._groups[self._root(node)].assigned = device
        return device

    def _single(self, node: Node, arguments: dict[int, str]) -> _Group:
        if node.type == "_Arg":
            kind, number = parse(arguments.get(node.number, HOST))
            return _Group(kind, number, {"GPU": 0, "CPU": 0}, f"{kind}:{number or 0}")
        kind, number = parse(node.device)
        if node.type == XLA:
            return _Group(kind, number, {"GPU": 0, "CPU": 0})
        found = {each: kernel(node, each) for each in ORDER}
        return _Group(kind, number, {each: it.priority for each, it in found.items() if it})

    def _join(self, first: Node, second: Node, *, resource: bool = False) -> None:
        one, other = self._root(first), self._root(second)
        if one is other:
            return
        ours, theirs = self._groups[one], self._groups[other]
        kinds = _common(ours.kinds, theirs.kinds)
        if not kinds or (ours.assigned and theirs.assigned and ours.assigned != theirs.assigned):
            return  # with soft placement TensorFlow ignores the wish
        if resource and ours.kind is not None:
            kind, number = ours.kind, ours.number
        else:
            kind, number = _merged(ours, theirs)
        self._parents[other] = one
        self._groups[one] = _Group(kind, number, kinds, ours.assigned or theirs.assigned)

    def _root(self, node: Node) -> Node:
        while (parent := self._parents[node]) is not node:
            self._parents[node] = self._parents[parent]
            node = parent
        return node

    def _by_priority(self, kinds: dict[str, int]) -> list[str]:
        found = []
        for kind in sorted(kinds, key=lambda each: (-kinds[each], ORDER.index(each))):
            found += [HOST] if kind == "CPU" else [f"GPU:{number}" for number in range(self._gpus)]
        return found


def _matches(device: str, kind: str | None, number: int | None) -> bool:
    own_kind, own_number = device.split(":")
    return kind in (None, own_kind) and number in (None, int(own_number))


def _merged(ours: _Group, theirs: _Group) -> tuple[str | None, int | None]:
    """The device asked for by both; where they contradict each other, the kind or the number is left open."""
    if ours.kind is not None and theirs.kind is not None and ours.kind != theirs.kind:
        return None, None
    kind = ours.kind or theirs.kind
    if ours.number is not None and theirs.number is not None and ours.number != theirs.number:
        return kind, None
    return kind, theirs.number if ours.number is None else ours.number


def _common(ours: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
    """The kinds that both have; where their priorities disagree on the order, the usual one."""
    shared = [kind for kind in ours if kind in theirs]
    mine, yours = {kind: ours[kind] for kind in shared}, {kind: theirs[kind] for kind in shared}
    if not any(yours.values()):
        return mine
    if not any(mine.values()):
        return yours
    in_order = [sorted(each, key=lambda kind: (-each[kind], ORDER.index(kind))) for each in (mine, yours)]
    return mine if in_order[0] == in_order[1] else dict.fromkeys(shared, 0)

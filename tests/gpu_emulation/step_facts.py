"""What a placed step does on GPUs: what it copies, which collectives it runs, what it computes on the host."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import run_order
import tensorflow as tf
from flat_graph import XLA, Node
from placer import HOST, Placement, kernel

GRADIENTS = "gradient_tape"  # the name scope of `tf.GradientTape`
KINDS = {
    "CollectiveReduce": "all-reduce",
    "CollectiveGather": "all-gather",
    "CollectiveReduceScatter": "reduce-scatter",
    "CollectiveAllToAll": "all-to-all",
    "CollectiveBcastSend": "broadcast",
    "CollectiveBcastRecv": "broadcast",
    "CollectivePermute": "permute",
    "NcclAllReduce": "all-reduce",
}
FROM_ITERATORS = (
    "IteratorGetNext",
    "IteratorGetNextSync",
    "IteratorGetNextAsOptional",
    "MultiDeviceIteratorGetNextFromShard",
)
SHAPES = ("Const", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs")
BOOKKEEPING = ("Identity", "IdentityN", "Switch", "_SwitchN", "Merge", "Enter", "Exit", "NextIteration", "_Arg")


@dataclass(frozen=True)
class Copy:
    """A tensor that moves between memories.

    Attributes:
        direction: `to host`, `to device`, or `between devices`.
        tensor: its name.
        source: the type of operation that makes it.
        target: the type of operation that asks for it there.
        dtype, shape: of the tensor; a dimension that the trace does not know is None.
        bytes: its size, with unknown first dimensions counted as a replica's rows; None where that is unknown.
        has_rows: its size grows with the batch.
        device: the GPU, or the one that receives.
        is_conditional: it moves in one branch of a condition within the step.
    """

    direction: str
    tensor: str
    source: str
    target: str
    dtype: str
    shape: tuple[int | None, ...] | None
    bytes: int | None
    has_rows: bool
    device: str
    is_conditional: bool = False

    def __str__(self):
        sign = {"to host": "->", "to device": "<-", "between devices": "<>"}[self.direction]
        return f"{self.source} {sign} {self.target} {self.dtype}{_shape(self.shape)}"


@dataclass(frozen=True)
class Collective:
    """A collective of one device.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast` or `permute`.
        dtype: of the tensor.
        hint: the communication hint; TensorFlow takes NCCL for "nccl" alone.
        bytes: what the device hands over; None where the trace does not know.
        replicas: how many devices take part; None where the trace does not know.
        group: the key of the group of devices, or None.
        device: which device.
        is_conditional: it runs in one branch of a condition.
        name: of the operation.
    """

    kind: str
    dtype: str
    hint: str
    bytes: int | None
    replicas: int | None
    group: int | None
    device: str
    is_conditional: bool = False
    name: str = field(default="", compare=False)

    def __str__(self):
        size = "?" if self.bytes is None else self.bytes
        where = " in a condition" if self.is_conditional else ""
        return f"{self.kind} {self.dtype} {size} B {self.hint or 'no hint'} x{self.replicas or '?'}{where}"


@dataclass
class StepFacts:
    """What one step does on GPUs.

    Attributes:
        copies: all of a step's, without those of constants.
        collectives: of each device, the host included, in the order in which they run.
        are_ordered: the collectives of each device can run in no other order.
        host_work: operations on tensors with rows that run on the host and did not ask for it, by type and dtype:
            they have no kernel for a GPU, or one of a lower priority than the CPU's, or one that works in host memory.
        host_only: of these, those that have no kernel for a GPU at all.
        gradients_in_conditions: how many operations of gradients lie in a branch of a condition.
        conditions: the conditions within the step, by name.
        batches: the data's tensors, as `float32[13, 8]`; an unknown dimension is `?`.
        xla_clusters: how many functions of the step XLA compiles.
        operations: how many there are.
        per_call: the same of what runs once a call around the steps; None where the call is the step.
    """

    copies: list[Copy] = field(default_factory=list)
    collectives: dict[str, list[Collective]] = field(default_factory=dict)
    are_ordered: bool = True
    host_work: Counter = field(default_factory=Counter)
    host_only: Counter = field(default_factory=Counter)
    gradients_in_conditions: int = 0
    conditions: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    xla_clusters: int = 0
    operations: int = 0
    per_call: "StepFacts | None" = None

    def moved(self, direction: str, *, has_rows: bool | None = None) -> list[Copy]:
        """The copies of a direction; with `has_rows`, those that grow with the batch, or those that do not."""
        wanted = [copy for copy in self.copies if copy.direction == direction]
        return wanted if has_rows is None else [copy for copy in wanted if copy.has_rows == has_rows]

    def bytes_moved(self, direction: str, *, has_rows: bool | None = None) -> int:
        """The bytes of `moved`, as far as they are known."""
        return sum(copy.bytes or 0 for copy in self.moved(direction, has_rows=has_rows))

    @property
    def rows_are_constant(self) -> bool:
        """Whether the trace knows how many rows each tensor of the data has."""
        return bool(self.batches) and not any("[?" in batch or "[unknown" in batch for batch in self.batches)

    @property
    def has_one_order(self) -> bool:
        """Whether the GPUs of each group run the same collectives in the same order, also where they share groups."""
        if not self.are_ordered:
            return False
        each_gpus = [
            [(c.group, c.kind, c.dtype, c.bytes, c.hint) for c in found]
            for gpu, found in self.collectives.items()
            if gpu != HOST
        ]
        return all(shared_order(*pair) for pair in itertools.combinations(each_gpus, 2)) and self.has_whole_groups()

    def has_whole_groups(self, machines: int | None = None) -> bool:
        """Whether as many GPUs of this machine run each group's collectives as take part, by the number of machines.

        Where that number is not given, it must be the same for all groups.
        """
        found = [
            each for gpu, ran in self.collectives.items() if gpu != HOST for each in {c.group: c for c in ran}.values()
        ]
        counts = Counter(each.group for each in found)
        shares = {each.replicas / counts[each.group] for each in found if each.replicas}
        return len(shares) <= 1 if machines is None else shares <= {machines}


def shared_order(one: list[tuple], other: list[tuple]) -> bool:
    """Whether two devices run the collectives of the groups that both are in alike; the group comes first in each."""
    shared = {group for group, *_ in one} & {group for group, *_ in other}
    return [each for each in one if each[0] in shared] == [each for each in other if each[0] in shared]


def collect(nodes: list[Node], placements: dict[Node, Placement], rows: int | None) -> StepFacts:
    """The facts of some placed nodes.

    Args:
        nodes: those of the step; a copy counts where the node that asks for it is among them.
        placements: of these and of their inputs.
        rows: of a replica, best a prime number that nothing else in the model has as a factor.
    """
    facts, sizes = StepFacts(operations=len(nodes)), _Sizes(rows)
    found, by_device = {}, {}
    for node in nodes:
        for copy in _copies(node, placements, sizes):
            found.setdefault((copy.direction, copy.tensor, copy.device), copy)
        _note_work(facts, node, placements[node], sizes)
        if any(_collective_kind(each) for each in (node, *node.inner)):
            by_device.setdefault(placements[node].device, []).append(node)
        facts.batches += _batches(node)
        facts.xla_clusters += node.type == XLA
        facts.gradients_in_conditions += bool(node.conditions) and GRADIENTS in node.name
    for device, made in by_device.items():
        ordered, is_only = run_order.in_order(made)
        within = [each for node in ordered for each in (node, *node.inner) if _collective_kind(each)]
        facts.collectives[device] = [_collective(each, device, sizes) for each in within]
        facts.are_ordered &= is_only or device == HOST
    facts.copies = list(found.values())
    facts.conditions = sorted({name for node in nodes for name in node.conditions})
    return facts


def _copies(node: Node, placements: dict[Node, Placement], sizes: "_Sizes") -> Iterator[Copy]:
    here = placements[node]
    for (source, output), on_host in zip(node.inputs, here.inputs_on_host, strict=True):
        there = placements[source]
        was_on_host = there.outputs_on_host[output]
        dtype, shape = source.outputs[output]
        if source.type == "Const" or dtype == tf.resource or (was_on_host and on_host):
            continue
        if on_host:
            direction, device = "to host", there.device
        elif was_on_host:
            direction, device = "to device", here.device
        elif there.device != here.device:
            direction, device = "between devices", here.device
        else:
            continue
        size, has_rows = sizes.of(source, output)
        yield Copy(
            direction,
            f"{source.name}:{output}",
            source.type,
            node.type,
            dtype.name,
            None if shape.rank is None else tuple(shape),
            size,
            has_rows,
            device,
            bool(node.conditions),
        )


def _note_work(facts: StepFacts, node: Node, placement: Placement, sizes: "_Sizes") -> None:
    if node.type in (*BOOKKEEPING, *FROM_ITERATORS, *SHAPES, XLA):
        return
    everywhere = [*placement.inputs_on_host, *placement.outputs_on_host]
    if not node.outputs or not all(everywhere) or placement.asked == HOST:
        return
    ends = [*node.inputs, *((node, number) for number in range(len(node.outputs)))]
    if any(source.outputs[number][0] != tf.resource and sizes.of(source, number)[1] for source, number in ends):
        dtypes = "/".join(dict.fromkeys(source.outputs[number][0].name for source, number in ends))
        facts.host_work[f"{node.type} {dtypes}"] += 1
        if placement.device == HOST and kernel(node, "GPU") is None:
            facts.host_only[f"{node.type} {dtypes}"] += 1


def _collective_kind(node: Node) -> str | None:
    return KINDS.get(node.type.rstrip("V23")) if node.type.startswith(("Collective", "NcclAll")) else None


def _collective(node: Node, device: str, sizes: "_Sizes") -> Collective:
    kind = _collective_kind(node)
    hint = node.attributes["communication_hint"].s.decode() if "communication_hint" in node.attributes else "nccl"
    data, *rest = node.inputs or [(node, 0)]
    dtype = data[0].outputs[data[1]][0]
    size = sizes.of(*data)[0]
    if "group_size" in node.attributes:
        replicas, group = node.attributes["group_size"].i, node.attributes["group_key"].i
    else:
        replicas, group = (_constant(source) for source, _ in (rest + [(node, 0)] * 2)[:2])
    return Collective(kind, dtype.name, hint, size, replicas, group, device, bool(node.conditions), node.name)


def _constant(node: Node) -> int | None:
    if node.type != "Const":
        return None
    value = tf.make_ndarray(node.attributes["value"].tensor)
    return int(value) if value.shape == () else None


def _batches(node: Node) -> list[str]:
    """What an operation takes from an iterator."""
    if node.type not in FROM_ITERATORS:
        return []
    return [f"{dtype.name}{_shape(shape)}" for dtype, shape in _components(node)]


def _components(node: Node) -> list[tuple[tf.DType, tuple | None]]:
    dtypes = node.attributes["output_types"].list.type
    shapes = (tf.TensorShape(each) for each in node.attributes["output_shapes"].list.shape)
    return [(tf.as_dtype(d), None if s.rank is None else tuple(s)) for d, s in zip(dtypes, shapes, strict=True)]


def _shape(shape: tuple | None) -> str:
    return "[unknown]" if shape is None else "[" + ", ".join("?" if each is None else str(each) for each in shape) + "]"


class _Sizes:
    """The bytes of tensors, and whether they grow with the batch; of an optional, those of what it holds."""

    def __init__(self, rows: int | None):
        self._rows, self._known = rows, {}

    def of(self, node: Node, output: int) -> tuple[int | None, bool]:
        key = node, output
        if key not in self._known:
            self._known[key] = (None, False)  # where a loop leads back here
            dtype, shape = node.outputs[output]
            parts = self._held(node) if dtype == tf.variant else [self._of(dtype, shape)]
            known = [size for size, _ in parts]
            self._known[key] = None if not parts or None in known else sum(known), any(grows for _, grows in parts)
        return self._known[key]

    def _of(self, dtype: tf.DType, shape) -> tuple[int | None, bool]:
        dims = None if shape is None or (isinstance(shape, tf.TensorShape) and shape.rank is None) else list(shape)
        if dims is None:
            return None, True
        has_rows = None in dims
        if dims and dims[0] is None and self._rows:
            dims[0] = self._rows
        if None in dims or dtype.size is None:
            return None, has_rows
        count = math.prod(dims)
        return count * dtype.size, has_rows or bool(self._rows and count and count % self._rows == 0)

    def _held(self, node: Node) -> list[tuple[int | None, bool]]:
        if node.type == "OptionalFromValue":
            return [self.of(*source) for source in node.inputs]
        if node.type == "IteratorGetNextAsOptional":
            return [self._of(*each) for each in _components(node)]
        if node.type in BOOKKEEPING and node.inputs:
            return [max((self.of(*source) for source in node.inputs), key=lambda each: (each[1], each[0] or 0))]
        return []

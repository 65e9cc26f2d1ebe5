"""Sorts the events of a trace by kind: operations, waits for the input, Python, copies, collectives."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tfgpu.core.block_event import STEPS
from tfgpu.measure.profiling.hooks import HOST_READ
from tfgpu.measure.profiling.trace import Event, Line, Span, Trace

_OPERATION = re.compile(r"^(?P<name>[^: ]+):(?P<kind>_?[A-Z]\w*)$")
_NEXT = re.compile(r"^(EagerLocalExecute: )?\w*IteratorGetNext\w*(::DoCompute)?$")
_COMPILES = re.compile(r"^\w*Compiler::RunBackend$")
_XLA_NAME = re.compile(r"^a?_+inference_(.+?)_\d+_")
_INPUT = ("Iterator::", "InstantiatedCapturedFunction::", "ParallelMapProduce", "MapAndBatchProduce", "MakeIterator")
_GRAPHS = "tf.function-graph_building"
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_FLOW = (
    *("While", "If", "Case", "PartitionedCall", "StatefulPartitionedCall"),
    *("StatelessWhile", "StatelessIf", "SymbolicGradient"),
)
_TALK = ("Collective", "Nccl", "XlaReduce")
_TALK_XLA = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_NO_WORK = ("_EagerConst", "IteratorGetNext", "IteratorGetNextAsOptional")
# Parts of the names of Tensor Core kernels: instruction shapes (cuBLAS, cuDNN), CUTLASS, Triton.
_TENSOR_CORES = re.compile(
    r"h884|s884|i884|h1688|s1688|i1688|16816|i8816|i16832|s16864|tensorop|hmma|imma|gmma|wmma|xmma|nvjet|bf16gemm_|tf32f32"
)
_MATRIX = re.compile(r"gemm|conv|cutlass|xmma|nvjet|dgrad|wgrad|fprop|matmul|attention", re.IGNORECASE)


class Operation(NamedTuple):
    """An operation or a kernel that ran.

    Args:
        name: the operation's name in the graph, or the kernel's name.
        kind: such as `"MatMul"`; for a kernel, its name.
        start: nanoseconds.
        end: likewise.
        own: nanoseconds without nested operations.
    """

    name: str
    kind: str
    start: int
    end: int
    own: int


class Call(NamedTuple):
    """A call of a tf.function from Python.

    Args:
        name: the function's name.
        start: nanoseconds.
        end: likewise.
        traced: whether it traced a new graph.
        count: the number of graphs that the function has so far.
        ours: whether it is tfgpu's step loop.
    """

    name: str
    start: int
    end: int
    traced: bool
    count: int
    ours: bool


class Block(NamedTuple):
    """Steps that ran in one call.

    Args:
        start: nanoseconds.
        end: likewise.
        steps: their number.
        kind: `"train"` or `"test"`.
        set_by: what set the number of steps, as `core/step_blocks.py` records it; empty if unknown.
        jit: whether XLA compiles the steps.
    """

    start: int
    end: int
    steps: int
    kind: str
    set_by: str = ""
    jit: bool = False


class Named(NamedTuple):
    """A named span: a tensor read, a compilation, an eager operation."""

    name: str
    start: int
    end: int


@dataclass
class Sorted:
    """The events of a trace by kind. Spans are pairs of nanoseconds, unordered.

    Attributes:
        operations: operations of the model on the host, without those of the input.
        kernels: kernels of each GPU.
        waits: waits for the next batch.
        talk: collectives on the host and by GPU.
        copies: copies to (`"in"`) and from (`"out"`) a GPU, by GPU.
        graphs: graph tracing in Python.
        compiles: XLA compilations, named by function.
        python: Python calls inside a compiled step, named by operation.
        reads: tensor reads in the user's code, named by source line.
        eager: operations that Python ran one by one.
        calls: calls of tf.functions.
        blocks: blocks of steps, marked by tfgpu.
        marks: steps, marked by the script.
        fetches: batches that Python fetched.
    """

    operations: list[Operation] = field(default_factory=list)
    kernels: dict[str, list[Operation]] = field(default_factory=dict)
    waits: list[Span] = field(default_factory=list)
    talk: dict[str, list[Span]] = field(default_factory=dict)
    copies: dict[tuple[str, str], list[Span]] = field(default_factory=dict)
    graphs: list[Span] = field(default_factory=list)
    compiles: list[Named] = field(default_factory=list)
    python: list[Named] = field(default_factory=list)
    reads: list[Named] = field(default_factory=list)
    eager: list[Named] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    marks: list[Span] = field(default_factory=list)
    fetches: list[Span] = field(default_factory=list)


class Nested(NamedTuple):
    """An event with the events that enclose it.

    Args:
        event: the event.
        outer: the enclosing events of the same thread, the outermost first.
        own: nanoseconds without directly nested events.
    """

    event: Event
    outer: tuple[Event, ...]
    own: int


def nested(line: Line) -> Iterator[Nested]:
    """Yields each event of a thread with its enclosing events, once it has ended."""
    open_: list[Nested] = []
    for event in line.events:
        while open_ and open_[-1].event.end <= event.start:
            yield open_.pop()
        outer = ()
        if open_:
            last = open_[-1]
            inside = max(0, min(event.end, last.event.end) - event.start)
            open_[-1], outer = last._replace(own=last.own - inside), (*last.outer, last.event)
        open_.append(Nested(event, outer, event.length))
    yield from reversed(open_)


def sort(trace: Trace) -> Sorted:
    """Sorts the events of a trace."""
    found = Sorted()
    events = [event for line in trace.host for event in line.events]
    runs = [event for event in events if event.name.startswith("InstantiatedCapturedFunction::")]
    feeding = {event.stats["id"] for event in runs if "id" in event.stats}
    for line in trace.host:
        for item in nested(line):
            _place(item, feeding, found)
    found.talk["host"] = _asynchronous(trace.host)
    for device, lines in trace.devices.items():
        _kernels(device, lines, found)
    for name in ("calls", "blocks", "marks", "fetches", "operations"):
        getattr(found, name).sort()
    return found


def _feeds(event: Event, feeding: set[int]) -> bool:
    is_run = event.name == "ExecutorState::Process" and event.stats.get("id") in feeding
    return is_run or event.name.startswith(_INPUT)


def _place(item: Nested, feeding: set[int], found: Sorted) -> None:
    event, outer = item.event, item.outer
    name, span = event.name, (event.start, event.end)
    if any(_feeds(each, feeding) for each in (event, *outer)):
        return
    if _NEXT.match(name):
        found.waits.append(span)
        if name.startswith("Eager"):
            found.fetches.append(span)
    elif name == STEPS:
        stats = {"steps": 1, "kind": "train", "set_by": "", "jit": 0, **event.stats}
        jit, count = bool(stats["jit"]), int(stats["steps"])
        found.blocks.append(Block(*span, count, str(stats["kind"]), str(stats["set_by"]), jit))
    elif name == HOST_READ:
        found.reads.append(Named(str(event.stats.get("where", "")), *span))
    elif name == _GRAPHS:
        found.graphs.append(span)
    elif _COMPILES.match(name):
        compiled = str(event.stats.get("name", ""))
        match = _XLA_NAME.match(compiled)
        found.compiles.append(Named(match[1] if match else compiled, *span))
    elif "tf_function_call" in event.stats:
        if not any("tf_function_call" in each.stats or each.name == _GRAPHS for each in outer):
            traced = str(event.stats["tf_function_call"]).startswith("traced")
            ours, count = any(each.name == STEPS for each in outer), int(event.stats.get("tracing_count", 0))
            found.calls.append(Call(name, *span, traced, count, ours))
    elif "step_num" in event.stats and "_r" in event.stats:
        found.marks.append(span)
    elif name == "EagerExecute":
        if kind := _eager_kind(event, outer):
            found.eager.append(Named(kind, *span))
    elif name == "KernelAndDeviceFunc::Run":
        asked = next((each for each in reversed(outer) if each.name == "EagerExecute"), None)
        if asked is not None and (kind := _eager_kind(asked, outer)):
            found.operations.append(Operation(kind, kind, *span, event.length))
    else:
        _operation(item, found)


def _eager_kind(event: Event, outer: tuple[Event, ...]) -> str:
    """The operation that Python ran; "" for a function, for the input's, and while a graph is traced."""
    kind = str(event.stats.get("eager_op", ""))
    is_of_step = not event.stats.get("is_func") and not any(each.name == _GRAPHS for each in outer)
    prepares = kind in _NO_WORK or "Iterator" in kind or "Dataset" in kind
    return kind if is_of_step and not prepares else ""


def _operation(item: Nested, found: Sorted) -> None:
    event = item.event
    if "hlo_op" in event.stats:
        name = str(event.stats["hlo_op"])
        if name.startswith(_TALK_XLA):
            found.talk.setdefault("host", []).append((event.start, event.end))
        else:
            found.operations.append(Operation(name, name.split(".")[0], event.start, event.end, item.own))
        return
    match = _OPERATION.match(event.name)
    if match is None or match["kind"] in _FLOW or match["kind"] in _NO_WORK:
        return
    if match["kind"] in _PYTHON:
        found.python.append(Named(match["name"], event.start, event.end))
    elif not match["kind"].startswith(("_Send", "_Recv", "_HostSend", "_HostRecv", *_TALK)):
        found.operations.append(Operation(match["name"], match["kind"], event.start, event.end, item.own))


def _asynchronous(lines: Iterable[Line]) -> list[Span]:
    """Collectives on the host, which begin in one thread and end in another."""
    starts, ends = {}, {}
    for line in lines:
        for event in line.events:
            if event.name.startswith("ExecutorState::ProcessAsync::"):
                if str(event.stats.get("kernel_type", "")).startswith(_TALK):
                    if event.name.endswith("Start"):
                        starts[event.stats.get("_p")] = event.start
                    else:
                        ends[event.stats.get("_c")] = event.end
    return [(start, ends[key]) for key, start in starts.items() if key in ends]


def _kernels(device: str, lines: Iterable[Line], found: Sorted) -> None:
    kernels = found.kernels.setdefault(device, [])
    for line in lines:
        for event in line.events:
            span = event.start, event.end
            if event.name.lower().startswith("memcpy") or "Memcpy" in line.name:
                way = "in" if re.search("H2D|HtoD", f"{event.name} {line.name}") else "out"
                found.copies.setdefault((device, way), []).append(span)
            elif "nccl" in event.name.lower():
                found.talk.setdefault(device, []).append(span)
            else:
                where = str(event.stats.get("tf_op") or event.stats.get("hlo_op") or event.name)
                kernels.append(Operation(where, event.name, *span, event.length))


def uses_tensor_cores(kernel: str) -> bool:
    """Whether a kernel uses Tensor Cores, judged by its name.

    Example:
        >>> uses_tensor_cores("ampere_fp16_s16816gemm_fp16_128x64_nn"), uses_tensor_cores("ampere_sgemm_64x64_nn")
        (True, False)
    """
    return bool(_TENSOR_CORES.search(kernel))


def multiplies_matrices(kernel: str) -> bool:
    """Whether a kernel is a matrix product or a convolution, which could use Tensor Cores, judged by its name."""
    return bool(_MATRIX.search(kernel)) or uses_tensor_cores(kernel)

"""Divides the time of the steps into parts, from sorted events."""

from collections import Counter
from dataclasses import dataclass

from tfgpu.measure.profiling import trace
from tfgpu.measure.profiling.sorting import Operation, Sorted, multiplies_matrices, uses_tensor_cores
from tfgpu.measure.profiling.trace import Span

PARTS = ("compute", "communication", "copy in", "copy out", "input", "compile", "graphs", "python", "launch", "between")
"""The parts of the time; each instant counts for the first part that applies."""


@dataclass(frozen=True)
class Window:
    """The analyzed steps.

    Args:
        start: nanoseconds.
        end: likewise.
        steps: their number; None if the trace does not mark steps.
        inside: the spans in which they ran; Python does other work in between. Empty if Python itself runs the steps.
        marked_by: what marks the steps: `"tfgpu"`, `"script"`, a tf.function's name, `"batches"` or `""`.
        set_by: what sets the number of steps per call of tfgpu, see `Block.set_by`; empty if unknown.
        jit: whether XLA compiles the steps of tfgpu's calls.
    """

    start: int
    end: int
    steps: int | None
    inside: tuple[Span, ...]
    marked_by: str
    set_by: str = ""
    jit: bool = False

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Top:
    """An operation or a kernel, summed over its runs.

    Args:
        name: its name in the graph, or the kernel's name.
        kind: such as `"MatMul"`.
        runs: the number of runs.
        seconds: their total time, without nested operations.
        share: of the time of all operations.
    """

    name: str
    kind: str
    runs: int
    seconds: float
    share: float


@dataclass(frozen=True)
class Gap:
    """A time in which nothing computed.

    Args:
        start_s: seconds since the first step began.
        seconds: its length.
        during: the part of the time that makes up most of it.
    """

    start_s: float
    seconds: float
    during: str


@dataclass(frozen=True)
class Shares:
    """Where the time went, as shares of 1; the mean over several GPUs.

    Args:
        parts: shares by name, see `PARTS`.
        device: whether GPUs were recorded; otherwise "compute" means operations on the host.
    """

    parts: dict[str, float]
    device: bool

    def __getitem__(self, name: str) -> float:
        return self.parts.get(name, 0.0)


def window(found: Sorted, length: int) -> Window:
    """Finds the steps by tfgpu's marks, the script's marks, calls of the most frequent tf.function, or batches."""
    for kind in ("train", "test"):
        blocks = [block for block in found.blocks if block.kind == kind]
        if blocks:
            inside = tuple((block.start, block.end) for block in blocks)
            ((set_by, _),) = Counter(block.set_by for block in blocks).most_common(1)
            count = sum(block.steps for block in blocks)
            return Window(inside[0][0], inside[-1][1], count, inside, "tfgpu", set_by, blocks[-1].jit)
    if len(found.marks) > 1:
        return Window(found.marks[0][0], found.marks[-1][1], len(found.marks), tuple(found.marks), "script")
    for name, _ in Counter(call.name for call in found.calls).most_common(1):
        calls = [(call.start, call.end) for call in found.calls if call.name == name]
        if len(calls) > 1:  # A step lasts from one call to the next.
            return Window(calls[0][0], calls[-1][0], len(calls) - 1, tuple(calls[:-1]), name)
    if len(found.fetches) > 1:
        # No tf.function is called: Python runs the steps, from batch to batch.
        first, last = found.fetches[0][0], found.fetches[-1][0]
        return Window(first, last, len(found.fetches) - 1, (), "batches")
    return Window(0, length, None, ((0, length),), "")


def shares(divisions: dict[str, dict[str, list[Span]]], where: Window, *, device: bool) -> Shares:
    """Computes the shares from the result of `divided` for each device.

    Args:
        divisions: spans of each part, by device.
        where: the steps.
        device: whether the devices are GPUs.
    """
    if not where.length:
        return Shares({}, device)
    each = [{name: trace.total(part) / where.length for name, part in parts.items()} for parts in divisions.values()]
    return Shares({name: sum(one[name] for one in each) / len(each) for name in PARTS}, device)


def divided(found: Sorted, where: Window, device: str) -> dict[str, list[Span]]:
    """Returns the spans of each part for one device or the `"host"`; together they fill the window."""
    work = found.kernels.get(device, []) if found.kernels else found.operations
    talk = [*found.talk.get(device, []), *found.talk.get("host", [])]
    python = [(one.start, one.end) for one in (*found.reads, *found.python, *found.eager)]
    if where.marked_by == "batches":
        python.append((where.start, where.end))
    elif where.marked_by in ("script", "tfgpu"):
        # Inside marks, the time outside function calls is Python's; in an eager step, all of it.
        called = [(call.start, call.end) for call in found.calls]
        python += [rest for span in where.inside for rest in trace.without([span], called)]
    claims = {
        "compute": [(one.start, one.end) for one in work],
        "communication": talk,
        "copy in": found.copies.get((device, "in"), []),
        "copy out": found.copies.get((device, "out"), []),
        "input": found.waits,
        "compile": [(one.start, one.end) for one in found.compiles],
        # The first call of a new graph also optimizes it.
        "graphs": [*found.graphs, *((call.start, call.end) for call in found.calls if call.traced)],
        "python": python,
        "launch": list(where.inside),
        "between": [(where.start, where.end)],
    }
    return trace.divided({name: claims[name] for name in PARTS}, where.start, where.end)


def top(operations: list[Operation], where: Window, count: int = 10) -> tuple[Top, ...]:
    """Returns the operations that took the most time in the window."""
    seconds, runs = Counter(), Counter()
    for one in operations:
        if where.start <= one.start < where.end:
            seconds[one.name, one.kind] += one.own
            runs[one.name, one.kind] += 1
    whole = sum(seconds.values()) or 1
    return tuple(
        Top(name, kind, runs[name, kind], own / 1e9, own / whole) for (name, kind), own in seconds.most_common(count)
    )


def tensor_core_share(found: Sorted, where: Window) -> tuple[float, float] | None:
    """Returns the shares of the kernel time on Tensor Cores, and that could run there; None without kernels."""
    kernels = [one for each in found.kernels.values() for one in each if where.start <= one.start < where.end]
    whole = sum(one.own for one in kernels)
    if not whole:
        return None
    on = sum(one.own for one in kernels if uses_tensor_cores(one.kind))
    could = sum(one.own for one in kernels if multiplies_matrices(one.kind))
    return on / whole, could / whole


def gaps(parts: dict[str, list[Span]], where: Window, count: int = 5) -> tuple[Gap, ...]:
    """Returns the longest times in which nothing computed, and what happened instead.

    Args:
        parts: the result of `divided`.
        where: the steps.
        count: how many to return.
    """
    idle = trace.without([(where.start, where.end)], parts["compute"])
    longest = sorted(idle, key=lambda span: span[0] - span[1])[:count]
    found = []
    for start, end in longest:
        lengths = {n: trace.total(trace.clipped(part, start, end)) for n, part in parts.items() if n != "compute"}
        found.append(Gap((start - where.start) / 1e9, (end - start) / 1e9, max(lengths, key=lengths.get)))
    return tuple(found)

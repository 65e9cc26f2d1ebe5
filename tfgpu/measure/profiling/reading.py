"""From sorted events to where the time of the steps went."""

from collections import Counter
from dataclasses import dataclass

from tfgpu.measure.profiling import spans
from tfgpu.measure.profiling.sorting import Operation, Sorted, multiplies_matrices, uses_tensor_cores
from tfgpu.measure.profiling.spans import Span

PARTS = ("compute", "communication", "copy in", "copy out", "input", "compile", "graphs", "python", "launch", "between")
"""What the time is divided into; an instant counts for the first of these that applies."""


@dataclass(frozen=True)
class Window:
    """The steps that are looked at.

    Args:
        start: nanoseconds.
        end: likewise.
        steps: how many; None where nothing in the trace says.
        inside: the spans in which they ran; between them Python does other things. Empty where Python runs the steps.
        marked_by: who said so: `"tfgpu"`, `"script"`, a tf.function's name, `"batches"` or `""`.
        set_by: what sets how many steps one of tfgpu's calls has, as `blocks.set_by` says; empty where nothing says.
        jit: in tfgpu's calls `jit_compile` is `True` or `"auto"`.
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
    """An operation or a kernel, all its runs together.

    Args:
        name: its place in the graph, or the kernel.
        kind: such as `"MatMul"`.
        runs: how many.
        seconds: together, without what ran inside.
        share: of all operations' time.
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
        start_s: since the first step began.
        seconds: how long.
        during: which part of the time it mostly was.
    """

    start_s: float
    seconds: float
    during: str


@dataclass(frozen=True)
class Shares:
    """Where the time went, as parts of 1; of several GPUs, their mean.

    Args:
        parts: by name, as in `PARTS`.
        device: GPUs were recorded; else computing is the host's operations.
    """

    parts: dict[str, float]
    device: bool

    def __getitem__(self, name: str) -> float:
        return self.parts.get(name, 0.0)


def window(found: Sorted, length: int) -> Window:
    """Finds the steps: by tfgpu's marks, the script's, calls of the tf.function that is called most, or batches."""
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
        if len(calls) > 1:  # From a call to the next: what lies between is counted to the step's time.
            return Window(calls[0][0], calls[-1][0], len(calls) - 1, tuple(calls[:-1]), name)
    if len(found.fetches) > 1:
        # No tf.function is called: Python itself runs the steps, between the batches.
        first, last = found.fetches[0][0], found.fetches[-1][0]
        return Window(first, last, len(found.fetches) - 1, (), "batches")
    return Window(0, length, None, ((0, length),), "")


def shares(divisions: dict[str, dict[str, list[Span]]], where: Window, *, device: bool) -> Shares:
    """Where the steps' time went, from what `divided` gave for each device.

    Args:
        divisions: by device.
        where: the steps.
        device: they are GPUs.
    """
    if not where.length:
        return Shares({}, device)
    each = [{name: spans.total(part) / where.length for name, part in parts.items()} for parts in divisions.values()]
    return Shares({name: sum(one[name] for one in each) / len(each) for name in PARTS}, device)


def divided(found: Sorted, where: Window, device: str) -> dict[str, list[Span]]:
    """The spans of each part, for one device or the `"host"`; together they fill the window."""
    work = found.kernels.get(device, []) if found.kernels else found.operations
    talk = [*found.talk.get(device, []), *found.talk.get("host", [])]
    python = [(one.start, one.end) for one in (*found.reads, *found.python, *found.eager)]
    if where.marked_by == "batches":
        python.append((where.start, where.end))
    elif where.marked_by in ("script", "tfgpu"):
        # In marks TensorFlow runs where a function is called; the rest is Python's, all of it in an eager step.
        called = [(call.start, call.end) for call in found.calls]
        python += [rest for span in where.inside for rest in spans.without([span], called)]
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
    return spans.divided({name: claims[name] for name in PARTS}, where.start, where.end)


def top(operations: list[Operation], where: Window, count: int = 10) -> tuple[Top, ...]:
    """The operations that took the most time in the window."""
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
    """Of the kernels' time, the part on Tensor Cores and the part that could be; None where no kernel was recorded."""
    kernels = [one for each in found.kernels.values() for one in each if where.start <= one.start < where.end]
    whole = sum(one.own for one in kernels)
    if not whole:
        return None
    on = sum(one.own for one in kernels if uses_tensor_cores(one.kind))
    could = sum(one.own for one in kernels if multiplies_matrices(one.kind))
    return on / whole, could / whole


def gaps(parts: dict[str, list[Span]], where: Window, count: int = 5) -> tuple[Gap, ...]:
    """The longest times in which nothing computed, and what went on instead.

    Args:
        parts: what `divided` gave.
        where: the steps.
        count: how many.
    """
    idle = spans.without([(where.start, where.end)], parts["compute"])
    longest = sorted(idle, key=lambda span: span[0] - span[1])[:count]
    return tuple(
        Gap((start - where.start) / 1e9, (end - start) / 1e9, _mostly(parts, start, end)) for start, end in longest
    )


def _mostly(parts: dict[str, list[Span]], start: int, end: int) -> str:
    lengths = {n: spans.total(spans.clipped(part, start, end)) for n, part in parts.items() if n != "compute"}
    return max(lengths, key=lengths.get)

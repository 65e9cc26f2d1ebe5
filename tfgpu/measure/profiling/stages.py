"""Finds the slow stage of a tf.data pipeline from the events of its iterators."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tfgpu.measure.profiling.sorting import Nested, nested
from tfgpu.measure.profiling.trace import Event, Line

_WAITING = ("Prefetch", "ParallelMap", "MapAndBatch", "ParallelInterleave", "ParallelBatch", "ParallelFilter")
_PRODUCES = ("ParallelMapProduce", "MapAndBatchProduce")
_OPERATION = re.compile(r"[^: ]*:([A-Za-z][^: ]*)")
_INDEX = re.compile(r"\w+:(\d+)")


@dataclass(frozen=True)
class InputStage:
    """The total work of one stage of the input.

    Args:
        name: its name in the pipeline's graph, such as `"MapDataset:3"`.
        kind: such as `"Map"`, `"ParallelMap"` or `"Shuffle"`.
        calls: how often an element was requested, or its function was called.
        work_s: seconds of its own work, summed over threads.
        parallel: the number of parallel calls.
        operations: the longest operations of its function, by kind, and their seconds.
    """

    name: str
    kind: str
    calls: int
    work_s: float
    parallel: int
    operations: tuple[tuple[str, float], ...] = ()

    @property
    def busy_s(self) -> float:
        """The shortest time for its work with its parallel calls."""
        return self.work_s / self.parallel

    @property
    def index(self) -> int | None:
        """The number of stages before it; None if unknown. A fused stage has the index of its first stage."""
        match = _INDEX.search(self.name)
        return int(match[1]) if match else None


@dataclass
class _Sum:
    kind: str
    calls: int = 0
    work: int = 0
    parallel: int = 1
    runs: set[int] = field(default_factory=set)


def input_stages(lines: Iterable[Line]) -> tuple[InputStage, ...]:
    """Sums the work of each stage of the input, the busiest first.

    The work of a stage that runs in the thread of the next one is the time of its iterator minus the previous stage.
    The work of a stage that calls its function in its own threads (`ParallelMap`) is the time of these calls.
    """
    lines = list(lines)
    stages, names = _iterators(lines)
    ends: dict[int, int] = {}  # of each run of a function
    for event in (event for line in lines for event in line.events):
        if event.name in ("ExecutorDoneCallback", "ExecutorState::Process") and "id" in event.stats:
            ends[event.stats["id"]] = max(ends.get(event.stats["id"], 0), event.end)
    for line in lines:
        makers: dict[int, str] = {}  # the stage that an event produces elements for, by the event's start
        for item in nested(line):
            _add(item, stages, names, ends, makers)
    inside = _operations(lines, stages)
    found = []
    for name, one in stages.items():
        longest = tuple((kind, own / 1e9) for kind, own in inside[name].most_common(3))
        found.append(InputStage(name, one.kind, one.calls, one.work / 1e9, one.parallel, longest))
    # TensorFlow's own generator feeds replicas or another device; its time is waiting.
    work = (one for one in found if one.kind != "Generator" or any("PyFunc" in kind for kind, _ in one.operations))
    return tuple(sorted(work, key=lambda stage: -stage.busy_s))


def _iterators(lines: list[Line]) -> tuple[dict[str, _Sum], dict[int, str]]:
    stages, names = {}, {}
    for line in lines:
        for event in line.events:
            if _is_stage(event):
                name = _name(event)
                kind = re.sub(r"\[\d+\]|V\d+$", "", event.name.rsplit("::", 1)[-1])
                stage = stages.setdefault(name, _Sum(kind))
                parallel = str(event.stats.get("parallelism", ""))  # "unavailable" until the first calls
                stage.parallel = max(stage.parallel, int(parallel) if parallel.isdecimal() else 1)
                names[event.stats.get("id")] = name
    return stages, names


def _is_stage(event: Event) -> bool:
    """Whether it is the iterator of a stage; the root iterator, which repeats the last stage's name, is not."""
    return event.name.startswith("Iterator::") and event.name != "Iterator::Root"


def _name(event: Event) -> str:
    return str(event.stats.get("name") or event.name)


def _add(item: Nested, stages: dict, names: dict[int, str], ends: dict[int, int], makers: dict[int, str]) -> None:
    event = item.event
    if _is_stage(event):
        stage = stages[_name(event)]
        if not stage.kind.startswith(_WAITING):
            stage.calls += 1
            stage.work += event.length
        parent = next((e for e in reversed(item.outer) if _is_stage(e)), None)
        if item.outer and item.outer[-1].name in _PRODUCES:
            makers[item.outer[-1].start] = names.get(event.stats.get("parent_id"), "")
        if parent is not None and not (outer := stages[_name(parent)]).kind.startswith(_WAITING):
            outer.work -= event.length
    elif event.name.startswith("InstantiatedCapturedFunction::Run"):
        run = event.stats.get("id")
        owner = _owner(item, makers)
        if owner in stages:
            stages[owner].runs.add(run)
            if stages[owner].kind.startswith(_WAITING):
                stages[owner].calls += 1
                stages[owner].work += max(event.end, ends.get(run, 0)) - event.start


def _owner(item: Nested, makers: dict[int, str]) -> str | None:
    """The stage whose function ran: the enclosing iterator, or the parallel stage that requested the element."""
    for outer in reversed(item.outer):
        if _is_stage(outer):
            return _name(outer)
        if outer.name in _PRODUCES:
            return makers.get(outer.start)
    return None


def _operations(lines: list[Line], stages: dict[str, _Sum]) -> dict[str, Counter[str]]:
    """Nanoseconds of the operations in each stage's functions, by kind."""
    inside: dict[str, Counter[str]] = defaultdict(Counter)
    owners = {run: name for name, stage in stages.items() for run in stage.runs}
    for line in lines:
        for item in nested(line):
            match = _OPERATION.fullmatch(item.event.name)
            run = next((e.stats["id"] for e in reversed(item.outer) if e.stats.get("id") in owners), None)
            if match and run is not None:
                inside[owners[run]][match[1]] += item.own
    return inside

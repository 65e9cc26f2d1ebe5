"""Finds the slow stage of a tf.data pipeline from the events of its iterators."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tfgpu.measure.profiling.sorting import Nested, nested
from tfgpu.measure.profiling.trace import Event, Line

_WAITING = ("Prefetch", "ParallelMap", "MapAndBatch", "ParallelInterleave", "ParallelBatch", "ParallelFilter")
_PRODUCES = ("ParallelMapProduce", "MapAndBatchProduce")
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
    ends = _ends(lines)
    inside = defaultdict(lambda: defaultdict(int))
    for line in lines:
        makers: dict[int, str] = {}  # the stage that an event produces elements for, by the event's start
        for item in nested(line):
            _add(item, stages, names, ends, makers)
    _operations(lines, stages, inside)
    found = [
        InputStage(name, one.kind, one.calls, one.work / 1e9, one.parallel, _longest(inside[name]))
        for name, one in stages.items()
    ]
    return tuple(sorted((stage for stage in found if not _only_hands_on(stage)), key=lambda stage: -stage.busy_s))


def _only_hands_on(stage: InputStage) -> bool:
    """Whether it is TensorFlow's own stage that feeds replicas or another device, whose time is waiting."""
    return stage.kind == "Generator" and not any("PyFunc" in kind for kind, _ in stage.operations)


def _iterators(lines: list[Line]) -> tuple[dict[str, _Sum], dict[int, str]]:
    stages, names = {}, {}
    for line in lines:
        for event in line.events:
            if _is_stage(event):
                name = _name(event)
                stage = stages.setdefault(name, _Sum(_kind(event)))
                parallel = str(event.stats.get("parallelism", ""))  # "unavailable" until the first calls
                stage.parallel = max(stage.parallel, int(parallel) if parallel.isdecimal() else 1)
                names[event.stats.get("id")] = name
    return stages, names


def _is_stage(event: Event) -> bool:
    """Whether it is the iterator of a stage; the root iterator, which repeats the last stage's name, is not."""
    return event.name.startswith("Iterator::") and event.name != "Iterator::Root"


def _name(event: Event) -> str:
    return str(event.stats.get("name") or event.name)


def _kind(event: Event) -> str:
    return re.sub(r"\[\d+\]|V\d+$", "", event.name.rsplit("::", 1)[-1])


def _ends(lines: list[Line]) -> dict[int, int]:
    """The end of each run of a function."""
    ends = {}
    for line in lines:
        for event in line.events:
            if event.name in ("ExecutorDoneCallback", "ExecutorState::Process") and "id" in event.stats:
                run = event.stats["id"]
                ends[run] = max(ends.get(run, 0), event.end)
    return ends


def _add(item: Nested, stages: dict, names: dict[int, str], ends: dict[int, int], makers: dict[int, str]) -> None:
    event = item.event
    if _is_stage(event):
        stage = stages[_name(event)]
        stage.calls += not stage.kind.startswith(_WAITING)
        if not stage.kind.startswith(_WAITING):
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


def _operations(lines: list[Line], stages: dict[str, _Sum], inside: dict) -> None:
    owners = {run: name for name, stage in stages.items() for run in stage.runs}
    for line in lines:
        for item in nested(line):
            kind = item.event.name.rpartition(":")[2]
            if (
                "::" in item.event.name
                or not kind[:1].isalpha()
                or ":" not in item.event.name
                or " " in item.event.name
            ):
                continue
            run = next((e.stats["id"] for e in reversed(item.outer) if e.stats.get("id") in owners), None)
            if run is not None:
                inside[owners[run]][kind] += item.own


def _longest(operations: dict[str, int]) -> tuple[tuple[str, float], ...]:
    found = sorted(operations.items(), key=lambda item: -item[1])[:3]
    return tuple((kind, own / 1e9) for kind, own in found)

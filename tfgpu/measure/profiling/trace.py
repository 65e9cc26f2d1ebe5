"""Reads the trace of TensorFlow's profiler as plain events, and computes with their time spans.

TensorFlow writes an XSpace: planes (the host, each GPU) of lines (a thread, a stream) of events. The layout is defined
in `tsl/profiler/protobuf/xplane.proto`; names and stats of events in `tsl/profiler/utils/xplane_schema.h`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tfgpu.errors import InputError

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Sorts spans, joins those that touch, and drops empty ones.

    Example:
        >>> merged([(5, 7), (0, 2), (1, 3), (4, 4)])
        [(0, 3), (5, 7)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(spans: list[Span], others: list[Span]) -> list[Span]:
    """Subtracts other merged spans from merged spans.

    Example:
        >>> without([(0, 10)], [(2, 3), (8, 12)])
        [(0, 2), (3, 8)]
    """
    found, at = [], 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            if others[here][0] > start:
                found.append((start, others[here][0]))
            start = max(start, others[here][1])
            here += 1
        if start < end:
            found.append((start, end))
    return found


def divided(claims: dict[str, Iterable[Span]], start: int, end: int) -> dict[str, list[Span]]:
    """Divides a time span among claims: each instant goes to the first claim that covers it.

    Args:
        claims: spans by name, in order of priority.
        start: the start of the time span.
        end: its end.

    Returns:
        The merged spans of each claim, by name.

    Example:
        >>> divided({"work": [(2, 4)], "wait": [(0, 3), (6, 9)], "rest": [(0, 10)]}, 0, 10)
        {'work': [(2, 4)], 'wait': [(0, 2), (6, 9)], 'rest': [(4, 6), (9, 10)]}
    """
    edges = []
    for rank, spans in enumerate(claims.values()):
        for begin, stop in merged(spans):
            if max(begin, start) < min(stop, end):
                edges.append((max(begin, start), rank))
                edges.append((min(stop, end), -rank - 1))
    found: dict[str, list[Span]] = {name: [] for name in claims}
    parts, covers = list(found.values()), [False] * len(found)
    owner, since = None, start
    for at, rank in sorted(edges):
        covers[rank if rank >= 0 else -rank - 1] = rank >= 0
        new = next((each for each, covered in enumerate(covers) if covered), None)
        if new != owner:
            if owner is not None and since < at:
                parts[owner].append((since, at))
            owner, since = new, at
    return {name: merged(spans) for name, spans in found.items()}


def clipped(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Clips spans to a time span.

    Example:
        >>> clipped([(0, 4), (6, 9)], 3, 7)
        [(3, 4), (6, 7)]
    """
    return [(max(begin, start), min(stop, end)) for begin, stop in spans if begin < end and stop > start]


def total(spans: Iterable[Span]) -> int:
    """The total length of spans.

    Example:
        >>> total([(0, 4), (6, 9)])
        7
    """
    return sum(end - start for start, end in spans)


NOISE = ("ThreadpoolListener::", "end: ")
"""Prefixes of the names of irrelevant events."""


class Event(NamedTuple):
    """An event with a duration.

    Args:
        name: TensorFlow's name.
        start: nanoseconds since the trace began.
        end: likewise.
        stats: further values by name.
    """

    name: str
    start: int
    end: int
    stats: Mapping[str, Any]

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Line:
    """A thread or a stream.

    Args:
        name: the thread's name, or a stream such as `"Stream #13(Compute)"`.
        events: sorted by start; enclosing events come first.
    """

    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Trace:
    """A recorded trace.

    Args:
        host: the threads of the host.
        devices: the streams of each recorded GPU.
        length: nanoseconds from the first event to the end of the last.
    """

    host: tuple[Line, ...]
    devices: dict[str, tuple[Line, ...]]
    length: int


def read(path: str | Path) -> Trace:
    """Reads an `.xplane.pb` file, or the newest one below a folder.

    Args:
        path: the file, or a folder that a profile or TensorBoard's callback was written to.

    Raises:
        InputError: there is no trace, or it is truncated, damaged or empty.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise InputError(f"There is no trace in {str(path)!r}. Give an .xplane.pb file, or a folder with one.")
    from google.protobuf.message import DecodeError

    # TensorFlow's own description of the message; no public module has it.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    try:
        space = xplane_pb2.XSpace.FromString(files[-1].read_bytes())
    except (DecodeError, OSError) as error:
        reason = error if isinstance(error, OSError) else "it does not parse"
        raise InputError(f"{files[-1]} is not a complete trace: {reason}. Give an undamaged file.") from error
    if not space.planes:
        raise InputError(f"{files[-1]} is empty. Give the .xplane.pb file of a completed profile.")
    return of_space(space)


def of_space(space: Any) -> Trace:
    """Reads the events of an `XSpace` message."""
    origin = min((line.timestamp_ns for plane in space.planes for line in plane.lines if line.events), default=0)
    planes = [(plane.name, _lines(plane, origin)) for plane in space.planes]
    host = tuple(line for name, lines in planes if name.startswith("/host:CPU") for line in lines)
    devices = {}
    for name, lines in planes:
        streams = tuple(line for line in lines if line.name.startswith("Stream") and line.events)
        if name.startswith("/device:GPU") and streams:
            devices[name.removeprefix("/device:")] = streams
    ends = (event.end for _, lines in planes for line in lines for event in line.events)
    return Trace(host, devices, max(ends, default=0))


def _lines(plane: Any, origin: int) -> list[Line]:
    """The threads or streams of the host or a device."""
    names = {key: about.name for key, about in plane.event_metadata.items()}
    stats = {key: about.name for key, about in plane.stat_metadata.items()}
    general = {key: _stats(about.stats, stats) for key, about in plane.event_metadata.items()}
    lines = []
    for line in plane.lines:
        found = []
        for event in line.events:
            name, start = names.get(event.metadata_id, ""), line.timestamp_ns - origin + event.offset_ps // 1000
            if not name.startswith(NOISE):
                about = general.get(event.metadata_id, {}) | _stats(event.stats, stats)
                found.append(Event(name, start, start + event.duration_ps // 1000, about))
        found.sort(key=lambda event: (event.start, -event.end))
        lines.append(Line(line.display_name or line.name, tuple(found)))
    return lines


def _stats(stats: Any, names: Mapping[int, str]) -> dict[str, Any]:
    found = {}
    for stat in stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind) if kind else None
        found[names.get(stat.metadata_id, "")] = names.get(value, "") if kind == "ref_value" else value
    return found

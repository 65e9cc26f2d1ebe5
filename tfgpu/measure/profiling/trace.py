"""Reads the trace of TensorFlow's profiler as plain events.

TensorFlow writes an XSpace: planes (the host, each GPU) of lines (a thread, a stream) of events. The layout is defined
in `tsl/profiler/protobuf/xplane.proto`; names and stats of events in `tsl/profiler/utils/xplane_schema.h`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tfgpu.errors import InputError
from tfgpu.measure.profiling import hooks

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
class Plane:
    """The host or a device.

    Args:
        name: such as `"/host:CPU"` or `"/device:GPU:0"`.
        lines: its threads or streams.
    """

    name: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Trace:
    """A recorded trace.

    Args:
        planes: the host and the devices.
    """

    planes: tuple[Plane, ...]

    @property
    def host(self) -> tuple[Line, ...]:
        """The threads of the host."""
        return tuple(line for plane in self.planes if plane.name.startswith("/host:CPU") for line in plane.lines)

    @property
    def devices(self) -> dict[str, tuple[Line, ...]]:
        """The streams of each recorded GPU."""
        found = {}
        for plane in self.planes:
            if plane.name.startswith("/device:GPU"):
                streams = [line for line in plane.lines if line.name.startswith("Stream")]
                found[plane.name.removeprefix("/device:")] = tuple(line for line in streams if line.events)
        return {name: lines for name, lines in found.items() if lines}

    @property
    def length(self) -> int:
        """Nanoseconds from the first event to the end of the last."""
        return max((event.end for plane in self.planes for line in plane.lines for event in line.events), default=0)


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
    try:
        space = hooks.space_of(files[-1])
    except (hooks.BrokenSpace, OSError) as error:
        raise InputError(f"{files[-1]} is not a complete trace: {error}. Give an undamaged file.") from error
    if not space.planes:
        raise InputError(f"{files[-1]} is empty. Give the .xplane.pb file of a completed profile.")
    return of_space(space)


def of_space(space: Any) -> Trace:
    """Reads the events of an `XSpace` message."""
    starts = [line.timestamp_ns for plane in space.planes for line in plane.lines if line.events]
    origin = min(starts, default=0)
    return Trace(tuple(_plane(plane, origin) for plane in space.planes))


def _plane(plane: Any, origin: int) -> Plane:
    names = {key: about.name for key, about in plane.event_metadata.items()}
    stats = {key: about.name for key, about in plane.stat_metadata.items()}
    general = {key: _stats(about.stats, stats) for key, about in plane.event_metadata.items() if about.stats}
    quiet = {key for key, name in names.items() if name.startswith(NOISE)}
    lines = []
    for line in plane.lines:
        begin, found = line.timestamp_ns - origin, []
        for event in line.events:
            if event.metadata_id in quiet:
                continue
            start = begin + event.offset_ps // 1000
            about = _stats(event.stats, stats) if event.stats else {}
            if event.metadata_id in general:
                about = general[event.metadata_id] | about
            found.append(Event(names.get(event.metadata_id, ""), start, start + event.duration_ps // 1000, about))
        found.sort(key=lambda event: (event.start, -event.end))
        lines.append(Line(line.display_name or line.name, tuple(found)))
    return Plane(plane.name, tuple(lines))


def _stats(stats: Any, names: Mapping[int, str]) -> dict[str, Any]:
    found = {}
    for stat in stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind) if kind else None
        found[names.get(stat.metadata_id, "")] = names.get(value, "") if kind == "ref_value" else value
    return found

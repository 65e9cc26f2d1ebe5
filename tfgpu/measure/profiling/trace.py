"""What TensorFlow's profiler recorded, as plain events.

TensorFlow writes an XSpace: planes (the host, each GPU) of lines (a thread, a stream) of events. The layout is
published in `tsl/profiler/protobuf/xplane.proto`; names and stats of events in `tsl/profiler/utils/xplane_schema.h`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tfgpu.core import profiling_hooks
from tfgpu.errors import InputError

NOISE = ("ThreadpoolListener::", "end: ")
"""Beginnings of names that say nothing about time."""


class Event(NamedTuple):
    """Something that took time.

    Args:
        name: as TensorFlow calls it.
        start: nanoseconds since the trace began.
        end: likewise.
        stats: what else is known of it, by name.
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
        name: of the thread, or such as `"Stream #13(Compute)"`.
        events: by start; one that holds others comes before them.
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
    """All that was recorded.

    Args:
        planes: the host's and the devices'.
    """

    planes: tuple[Plane, ...]

    @property
    def host(self) -> tuple[Line, ...]:
        """The threads of the host."""
        return tuple(line for plane in self.planes if plane.name.startswith("/host:CPU") for line in plane.lines)

    @property
    def devices(self) -> dict[str, tuple[Line, ...]]:
        """The streams of each GPU; empty where none was recorded."""
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
        InputError: there is none, it is cut off or something else, or it holds nothing.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise InputError(f"There is no trace in {str(path)!r}. Give an .xplane.pb file, or a folder with one.")
    try:
        space = profiling_hooks.space_of(files[-1])
    except (profiling_hooks.BrokenSpace, OSError) as error:
        raise InputError(f"{files[-1]} is no whole trace: {error}. Give the file as it was written.") from error
    if not space.planes:
        raise InputError(f"{files[-1]} holds nothing. Give the .xplane.pb file of a profile that came to its end.")
    return of_space(space)


def of_space(space: Any) -> Trace:
    """Takes the events out of an `XSpace` message."""
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

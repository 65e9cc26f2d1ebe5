"""The files of a profile: the verdict as text and JSON, a trace for Perfetto, and a page with charts."""

import gzip
import json
from pathlib import Path
from typing import Any

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.measure.profiling import drawing
from tfgpu.measure.profiling.reading import PARTS
from tfgpu.measure.profiling.trace import Event, Line, Trace
from tfgpu.measure.profiling.verdict import Report

MOST_EVENTS = 500_000
"""The most events of the Perfetto trace, which the browser keeps in memory; the shortest are dropped beyond that."""
FILES = ("verdict.txt", "verdict.json", "trace.json.gz", "profile.html")


def check_folder(folder: Path) -> None:
    """Checks, before recording, that the folder exists or can be created.

    Raises:
        InputError: it, or one of its parents, is a file.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise InputError(f"The output must be a folder. Received: {str(folder)!r}, but {nearest} is a file.")


def write(report: Report, trace: Trace, folder: Path) -> None:
    """Writes all files.

    Args:
        report: the result.
        trace: the trace.
        folder: the output folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / "verdict.txt", text(report) + "\n")
    atomic.write_text(folder / "verdict.json", json.dumps(report.as_json(), indent=2) + "\n")
    found = json.dumps(chrome(trace), separators=(",", ":"))  # dump() is ten times slower, since it writes small pieces
    atomic.write_bytes(folder / "trace.json.gz", gzip.compress(found.encode(), compresslevel=4, mtime=0))
    atomic.write_text(folder / "profile.html", drawing.page(report, text(report)))


def text(report: Report) -> str:
    """Formats the report as text: the verdict, the shares, each finding with its advice, what is unknown."""
    shares = ", ".join(f"{name} {report.shares[name]:.0%}" for name in PARTS if report.shares[name] >= 0.005)
    lines = [f"Verdict: {report.verdict}.", f"Where the time went: {shares or 'nothing was recorded'}."]
    if report.step_s is not None:
        rows = f", batches of {report.batch}" if report.batch else ""
        lines.append(f"{report.window.steps} steps of {1e3 * report.step_s:.3g} ms on average{rows}.")
    if report.tensor_cores is not None:
        on, could = report.tensor_cores
        lines.append(f"Tensor Cores: {on:.0%} of the kernel time; {could:.0%} multiplies matrices.")
    lines.append("")
    if not report.findings:
        lines.append("No known problem was found.")
    for number, finding in enumerate(report.findings, 1):
        where = f" at {finding.where}" if finding.where else ""
        lines += [f"{number}. {finding.name}{where}", f"   {finding.seen}", f"   Try: {finding.knob}"]
    lines += ["", "The longest operations:"]
    lines += [f"  {one.share:4.0%}  {one.runs:6,} x {one.kind}  {one.name}" for one in report.top[:5]] or ["  none"]
    lines += ["The longest times in which nothing computed:"]
    lines += [f"  {1e3 * gap.seconds:.3g} ms: {gap.during}" for gap in report.gaps[:3]] or ["  none"]
    if report.unknown:
        lines += ["", *report.unknown]
    return "\n".join(lines)


def chrome(trace: Trace) -> dict[str, Any]:
    """Converts a trace to Chrome's JSON format for ui.perfetto.dev.

    Slices of a track must be nested or disjoint; overlapping ones go to additional tracks.
    Source: Trace Event Format, Google, 2016; Perfetto's "External trace formats".
    """
    shortest = _shortest(trace)
    found: list[dict[str, Any]] = []
    track = 0
    for process, plane in enumerate(trace.planes, 1):
        found.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": plane.name}})
        for line in plane.lines:
            for events in _tracks(line, shortest):
                track += 1
                about = {"ph": "M", "pid": process, "tid": track}
                found.append({**about, "name": "thread_name", "args": {"name": line.name.split("/")[0]}})
                found.append({**about, "name": "thread_sort_index", "args": {"sort_index": track}})
                found.extend(_slice(event, process, track) for event in events)
    return {"displayTimeUnit": "ns", "traceEvents": found}


def _shortest(trace: Trace) -> int:
    lengths = sorted((e.length for plane in trace.planes for line in plane.lines for e in line.events), reverse=True)
    return lengths[MOST_EVENTS] + 1 if len(lengths) > MOST_EVENTS else 0


def _tracks(line: Line, shortest: int) -> list[list[Event]]:
    tracks: list[list[Event]] = []
    ends: list[list[int]] = []  # of the slices that are open on each track
    for event in line.events:
        if event.length < shortest:
            continue
        at = next((at for at, open_ in enumerate(ends) if _fits(event, open_)), len(tracks))
        if at == len(tracks):
            tracks.append([])
            ends.append([])
        tracks[at].append(event)
        ends[at].append(event.end)
    return tracks


def _fits(event: Event, open_: list[int]) -> bool:
    while open_ and open_[-1] <= event.start:
        open_.pop()
    return not open_ or event.end <= open_[-1]


def _slice(event: Event, process: int, track: int) -> dict[str, Any]:
    about = {"ph": "X", "pid": process, "tid": track, "name": event.name}
    about |= {"ts": event.start / 1e3, "dur": event.length / 1e3}
    args = {name: value for name, value in event.stats.items() if isinstance(value, (str, int, float))}
    # Browsers read numbers as doubles, which cannot hold larger integers exactly.
    args = {
        name: str(value) if isinstance(value, int) and abs(value) > 2**53 else value for name, value in args.items()
    }
    return about | ({"args": args} if args else {})

"""The files of a profile: the verdict as text and JSON, and a page with charts."""

import json
from html import escape
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.measure.profiling import reading, trace
from tfgpu.measure.profiling.reading import PARTS
from tfgpu.measure.profiling.verdict import Report

_LOOKS = {
    "compute": ("#009e73", "operations compute"),
    "communication": ("#cc79a7", "collectives alone"),
    "copy in": ("#e69f00", "copies to the device"),
    "copy out": ("#b37700", "copies from the device"),
    "compile": ("#5d3a9b", "XLA compiles"),
    "graphs": ("#8f73c2", "Python traces graphs"),
    "input": ("#d55e00", "waiting for input"),
    "python": ("#0072b2", "Python in the step"),
    "launch": ("#56b4e9", "launching"),
    "between": ("#bbbbbb", "between steps"),
}
"""Each part's color and words. These are the colors of Okabe and Ito, which color-blind readers can distinguish; each
part also has its row or number."""
COLORS, WORDS = ({name: look[at] for name, look in _LOOKS.items()} for at in (0, 1))
_STEPS_DRAWN = 4
_FINEST = 1500  # bars that can be distinguished from left to right


def timeline(report: Report) -> Figure:
    """Draws a few steps from the middle of the window, with one row for each part of the time."""
    begin, end = _middle(report)
    parts = {name: trace.clipped(report.parts.get(name, ()), begin, end) for name in reading.PARTS}
    rows = [name for name in reading.PARTS if parts[name]]
    figure = Figure(figsize=(10, 1.2 + 0.32 * max(1, len(rows))), layout="constrained")
    axis = figure.subplots()
    scale, unit = (1e6, "ms") if end - begin < 10e9 else (1e9, "s")
    least = (end - begin) // _FINEST
    for row, name in enumerate(rows):
        # Gaps that are too narrow to see are closed, and bars that are too thin to see widened.
        visible = trace.merged((start, max(stop, start + least)) for start, stop in parts[name])
        bars = [((start - begin) / scale, (stop - start) / scale) for start, stop in visible]
        axis.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[name])
    axis.set_yticks(range(len(rows)), [WORDS[name] for name in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, max(1, end - begin) / scale)
    axis.set_xlabel(f"time, {unit}")
    return _plain(figure, axis)


def _middle(report: Report) -> tuple[int, int]:
    """The time span of a few steps in the middle of the window; for blocks of steps, around the end of a block."""
    window = report.window
    step = window.length // max(1, window.steps or 1)
    length = step * min(_STEPS_DRAWN, window.steps or 1)
    at = len(window.inside) // 2
    if len(window.inside) > 1:
        left, right = window.inside[at - 1][1], window.inside[at][0]
        return max(window.start, left - length // 2), min(window.end, right + length // 2)
    begin = (window.start + window.end - length) // 2
    return begin, begin + length


def shares(report: Report) -> Figure:
    """Draws the shares of the time as one bar."""
    figure = Figure(figsize=(10, 1.5), layout="constrained")
    axis = figure.subplots()
    left, looks = 0.0, []
    for name in reading.PARTS:
        share = report.shares[name]
        if share < 0.005:
            continue
        axis.barh(0, share, 0.8, left, color=COLORS[name], edgecolor="white")
        if share >= 0.04:
            axis.text(left + share / 2, 0, f"{share:.0%}", ha="center", va="center", fontsize=10)
        looks.append(Patch(color=COLORS[name], label=f"{WORDS[name]} {share:.0%}"))
        left += share
    axis.set_xlim(0, max(left, 1e-9))
    axis.set_axis_off()
    if looks:
        figure.legend(handles=looks, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def operations(report: Report) -> Figure:
    """Draws the longest operations."""
    top = report.top[:10]
    figure = Figure(figsize=(10, 0.9 + 0.3 * max(1, len(top))), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(top)), [100 * one.share for one in top], color=COLORS["compute"])
    names = [one.name if len(one.name) <= 60 else f"…{one.name[-59:]}" for one in top]
    labels = [f"{name}  ({one.runs:,} x {one.kind[:30]})" for name, one in zip(names, top, strict=True)]
    axis.set_yticks(range(len(top)), labels, fontsize=8)
    axis.set_ylim(max(1, len(top)) - 0.5, -0.5)
    axis.set_xlabel("% of the time of all operations")
    return _plain(figure, axis)


def _plain(figure: Figure, axis) -> Figure:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    return figure


def svg(figure: Figure) -> str:
    """Returns a figure as an SVG element."""
    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tfgpu", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]


def page(report: Report, words: str) -> str:
    """Returns a self-contained page with the verdict and the charts."""
    pictures = [("Where the time went", shares(report)), ("A few steps from the middle", timeline(report))]
    pictures += [("The longest operations", operations(report))] if report.top else []
    body = "\n".join(f"<h2>{title}</h2>\n<figure>{svg(figure)}</figure>" for title, figure in pictures)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Profile: {report.verdict}</title>\n<style>'
        "body{font:16px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}"
        "pre{white-space:pre-wrap;background:#f5f6f7;padding:1em;font-size:14px}figure{margin:0}"
        "svg{max-width:100%;height:auto}</style>\n"
        f"<h1>{report.verdict}</h1>\n<pre>{escape(words)}</pre>\n{body}\n</html>\n"
    )


FILES = ("verdict.txt", "verdict.json", "profile.html")


def create_folder(folder: Path) -> None:
    """Creates the folder, before anything is recorded.

    Raises:
        InputError: it, or one of its parents, is a file, or it cannot be created.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise InputError(f"The output must be a folder. Received: {str(folder)!r}, but {nearest} is a file.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"Cannot write in {str(folder)!r}: {error.strerror}. Use an output in a writable directory."
        ) from None


def write(report: Report, folder: Path) -> None:
    """Writes all files of a report to a folder that exists."""
    atomic.write_text(folder / "verdict.txt", text(report) + "\n")
    atomic.write_text(folder / "verdict.json", json.dumps(report.as_json(), indent=2) + "\n")
    atomic.write_text(folder / "profile.html", page(report, text(report)))


def text(report: Report) -> str:
    """Formats the report as text: the verdict, the shares, each finding with its advice, what is unknown."""
    seen = [name for name in PARTS if report.shares[name] >= 0.005]
    shares = ", ".join(f"{report.shares[name]:.0%} {WORDS[name]}" for name in seen)
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
    lines += [f"  {1e3 * gap.seconds:.3g} ms: {WORDS[gap.during]}" for gap in report.gaps[:3]] or ["  none"]
    if report.unknown:
        lines += ["", *report.unknown]
    return "\n".join(lines)

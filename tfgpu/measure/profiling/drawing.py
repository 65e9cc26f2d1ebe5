"""The charts of a profile (shares of the time, a timeline, the longest operations), and the page with them."""

from html import escape
from io import StringIO
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfgpu.measure.profiling import reading, spans

if TYPE_CHECKING:
    from tfgpu.measure.profiling.verdict import Report

COLORS = {
    "compute": "#009e73",
    "communication": "#cc79a7",
    "copy in": "#e69f00",
    "copy out": "#b37700",
    "compile": "#5d3a9b",
    "graphs": "#8f73c2",
    "input": "#d55e00",
    "python": "#0072b2",
    "launch": "#56b4e9",
    "between": "#bbbbbb",
}
"""The colors of Okabe and Ito, which color-blind readers can distinguish; each part also has its row or number."""
WORDS = {
    "compute": "operations compute",
    "communication": "collectives alone",
    "copy in": "copies to the device",
    "copy out": "copies from the device",
    "compile": "XLA compiles",
    "graphs": "Python traces graphs",
    "input": "waiting for input",
    "python": "Python in the step",
    "launch": "launching",
    "between": "between steps",
}
_STEPS_DRAWN = 4
_FINEST = 1500  # bars that can be distinguished from left to right


def timeline(report: "Report") -> Figure:
    """Draws a few steps from the middle of the window, with one row for each part of the time."""
    begin, end = _middle(report)
    parts = {name: spans.clipped(report.parts.get(name, ()), begin, end) for name in reading.PARTS}
    rows = [name for name in reading.PARTS if parts[name]]
    figure = Figure(figsize=(10, 1.2 + 0.32 * max(1, len(rows))), layout="constrained")
    axis = figure.subplots()
    scale, unit = (1e6, "ms") if end - begin < 10e9 else (1e9, "s")
    least = (end - begin) // _FINEST
    for row, name in enumerate(rows):
        bars = [((start - begin) / scale, (stop - start) / scale) for start, stop in _joined(parts[name], least)]
        axis.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[name])
    axis.set_yticks(range(len(rows)), [WORDS[name] for name in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, max(1, end - begin) / scale)
    axis.set_xlabel(f"time, {unit}")
    return _plain(figure, axis)


def _middle(report: "Report") -> tuple[int, int]:
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


def _joined(bars: list[spans.Span], least: int) -> list[spans.Span]:
    """Closes gaps that are too narrow to see, and widens bars that are too thin to see."""
    return spans.merged((start, max(end, start + least)) for start, end in bars)


def shares(report: "Report") -> Figure:
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


def operations(report: "Report") -> Figure:
    """Draws the longest operations."""
    top = report.top[:10]
    figure = Figure(figsize=(10, 0.9 + 0.3 * max(1, len(top))), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(top)), [100 * one.share for one in top], color=COLORS["compute"])
    axis.set_yticks(range(len(top)), [_label(one) for one in top], fontsize=8)
    axis.set_ylim(max(1, len(top)) - 0.5, -0.5)
    axis.set_xlabel("% of the time of all operations")
    return _plain(figure, axis)


def _label(one: reading.Top) -> str:
    name = one.name if len(one.name) <= 60 else f"…{one.name[-59:]}"
    return f"{name}  ({one.runs:,} x {one.kind[:30]})"


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


def page(report: "Report", words: str) -> str:
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

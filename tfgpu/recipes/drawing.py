"""SVG charts for self-contained pages, in the page's colors for light and dark mode."""

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tfgpu.redact import Cleaner

# Matplotlib writes these placeholder colors into the SVG. They are then replaced by CSS variables, so that one drawing
# suits light and dark mode.
INK, FAINT, FIRST, SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {INK: "var(--muted)", FAINT: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)"}


def environment() -> Environment:
    """Returns the template environment of the pages; text is escaped and cleaned of secrets, since pages are shared."""
    hide = Cleaner(os.environ).hide
    return Environment(
        finalize=lambda value: _visible(hide(value)) if type(value) is str else value,
        loader=PackageLoader("tfgpu.recipes", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible(text: str) -> str:
    """Replaces control, formatting and surrogate characters, which can affect terminals or text direction."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t" else c for c in text)


def figure() -> tuple[Figure, Any]:
    """Creates a transparent figure, and its axes."""
    made = Figure(figsize=(4.2, 2.5), layout="constrained")
    made.patch.set_alpha(0)
    return made, made.add_subplot()


def style(axes: Any, ticks: Any = None) -> None:
    """Applies the pages' style to axes; the horizontal one has integers."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel("epoch", color=INK, fontsize=9)
    if ticks:
        axes.yaxis.set_major_formatter(ticks)


def svg(figure: Figure, *, salt: str) -> Markup:
    """Renders the figure as SVG for a page.

    Args:
        figure: the drawing.
        salt: makes the ids of a page's drawings unique; different for each.
    """
    text = StringIO()
    # Text stays text (small, in the page's font); the salt makes ids unique and reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = text.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # unused, and the same in each drawing
    for color, variable in _VARIABLES.items():
        drawing = drawing.replace(color, variable)
    return Markup(drawing)


def chart(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    labels: Mapping[str, str] | None = None,
    best: int | None = None,
    scale: float = 1.0,
    ticks: Any = None,
    from_zero: bool = False,
) -> dict[str, Any] | None:
    """Draws a chart of one or two columns by epoch; None if no row has them.

    Args:
        title: above it.
        rows: one mapping per epoch.
        names: the columns.
        labels: their names in the legend; a column without a label is not in it.
        best: an epoch (from 1) to mark on the last column.
        scale: a factor for the values.
        ticks: a formatter for the vertical axis.
        from_zero: whether the vertical axis starts at zero.
    """
    columns = {name: _by_epoch(rows, name, scale) for name in names}
    columns = {name: points for name, points in columns.items() if points}
    if not columns:
        return None
    made, axes = figure()
    for points, color in zip(columns.values(), (FIRST, SECOND), strict=False):
        size = 3 if len(points) < 3 else 0
        axes.plot([*points], [*points.values()], color=color, linewidth=1.8, marker="o", markersize=size)
    watched = columns.get(names[-1]) if best and len(names) > 1 else None
    if watched and best in watched:
        axes.plot([best], [watched[best]], "o", color=SECOND, markersize=5.5, zorder=5)
    values = [value for points in columns.values() for value in points.values()]
    if from_zero:
        axes.set_ylim(0, 1.08 * max(values) or 1.0)
    elif min(values) >= 0:
        axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))
    if len(rows) == 1:
        axes.set_xlim(0.5, 1.5)
    style(axes, ticks)
    return {
        "title": title,
        "svg": svg(made, salt=title),
        "legend": [labels[name] for name in columns if labels and name in labels],
        "best": best if watched else None,
    }


def _by_epoch(rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> dict[int, float]:
    """The values of a column by epoch, from 1."""
    return {n: row[name] * scale for n, row in enumerate(rows, start=1) if row.get(name) is not None}

"""Drawings for pages that need no other file: SVG whose colours are the page's own, light or dark."""

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tfgpu.redact import Cleaner

# Matplotlib writes these odd colours into the SVG; they are then exchanged for CSS variables, so that one
# drawing suits a light and a dark page.
INK, FAINT, FIRST, SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {INK: "var(--muted)", FAINT: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)"}


def environment(*packages: str) -> Environment:
    """Where the pages' templates are found; every text in them is escaped, and is without secrets: pages are shown.

    Args:
        packages: that hold templates, besides this one.
    """
    hide = Cleaner(os.environ).hide
    return Environment(
        finalize=lambda value: _visible(hide(value)) if type(value) is str else value,
        loader=ChoiceLoader([PackageLoader(package, ".") for package in (*packages, "tfgpu.recipes")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible(text: str) -> str:
    """The text with a replacement for what steers terminals, turns the writing round, or is no character at all."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t" else c for c in text)


def figure(width: float = 4.2, height: float = 2.5) -> tuple[Figure, Any]:
    """A figure of so many inches, without a background, and its axes."""
    made = Figure(figsize=(width, height), layout="constrained")
    made.patch.set_alpha(0)
    return made, made.add_subplot()


def style(axes: Any, ticks: Any = None, *, label: str = "epoch") -> None:
    """Gives axes the look of all pages; the horizontal one counts."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(label, color=INK, fontsize=9)
    if ticks:
        axes.yaxis.set_major_formatter(ticks)


def svg(figure: Figure, *, salt: str) -> Markup:
    """The figure as SVG for a page.

    Args:
        figure: the drawing.
        salt: keeps the ids of a page's drawings apart; another one for each.
    """
    text = StringIO()
    # Text stays text (small, in the page's font); the salt keeps ids apart and the same in every run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = text.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # Nothing refers to them, and each drawing has the same.
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
    """A chart by epoch of one or two columns, as the pages show it; None where no row has them.

    Args:
        title: above it.
        rows: one mapping an epoch.
        names: the columns.
        labels: what the legend calls them; a column without a label is not in it.
        best: an epoch (from 1) to be marked on the last column.
        scale: what values are multiplied by.
        ticks: a formatter for the vertical axis.
        from_zero: whether that axis begins there.
    """
    series = {
        name: (
            [n for n, row in enumerate(rows, start=1) if row.get(name) is not None],
            [row[name] * scale for row in rows if row.get(name) is not None],
        )
        for name in names
    }
    series = {name: points for name, points in series.items() if points[0]}
    if not series:
        return None
    made, axes = figure()
    for (epochs, values), color in zip(series.values(), (FIRST, SECOND), strict=False):
        axes.plot(epochs, values, color=color, linewidth=1.8, marker="o", markersize=3 if len(epochs) < 3 else 0)
    watched = series.get(names[-1]) if best and len(names) > 1 else None
    if watched and best in watched[0]:
        value = watched[1][watched[0].index(best)]
        axes.plot([best], [value], "o", color=SECOND, markersize=5.5, zorder=5)
    if from_zero:
        highest = max(value for _, values in series.values() for value in values)
        axes.set_ylim(0, 1.08 * highest or 1.0)
    style(axes, ticks)
    return {
        "title": title,
        "svg": svg(made, salt=title),
        "legend": [labels[name] for name in series if labels and name in labels],
        "best": best if watched else None,
    }

"""Drawings and templates of the pages that runs leave: SVG inside the HTML, in colours that suit light and dark."""

from io import StringIO
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Matplotlib writes these odd colours into the SVG; they are then exchanged for CSS variables, so that one
# drawing suits a light and a dark page.
INK, FAINT, FIRST, SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {INK: "var(--muted)", FAINT: "var(--line)", FIRST: "var(--first)", SECOND: "var(--second)"}


def page(template: str, **values: Any) -> str:
    """Makes a page from a template in this folder; every text in it is escaped."""
    environment = Environment(
        loader=PackageLoader("tfgpu.recipes", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def style(axes: Any, ticks: Any = None) -> None:
    """Gives axes over epochs the page's look.

    Args:
        axes: matplotlib's.
        ticks: a formatter of the values; None leaves matplotlib's.
    """
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel("epoch", color=INK, fontsize=9)
    if ticks:
        axes.yaxis.set_major_formatter(ticks)


def svg(figure: Figure, *, salt: str) -> Markup:
    """A drawing as SVG to be put into a page.

    Args:
        figure: what is drawn; text in it stays text.
        salt: what keeps its ids apart from those of other drawings, and the same each time.
    """
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = text.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for color, variable in _VARIABLES.items():
        drawing = drawing.replace(color, variable)
    return Markup(drawing)

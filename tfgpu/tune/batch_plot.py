"""Draws the results of a batch size search: rate and memory over the batch."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator


def draw(found: Any, path: str | Path | None = None) -> Figure:
    """Draws examples per second and memory over the batch, with a base-2 logarithmic axis.

    Args:
        found: a `BatchSizes`.
        path: a file to write, `.png` or `.svg`; None writes none.
    """
    fits = sorted((one for one in found.tries if one.fits), key=lambda one: one.batch)
    failed = [one.batch for one in found.tries if not one.fits]
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at = [one.batch for one in fits]
    rates = [one.examples_per_s for one in fits]
    ends = [[one.examples_per_s - one.spread[0] for one in fits], [one.spread[1] - one.examples_per_s for one in fits]]
    above.errorbar(at, rates, yerr=ends, marker="o", markersize=4, capsize=3, color="tab:blue", label="median, spread")
    above.set(ylabel="examples/s", ylim=(0, 1.08 * max(one.spread[1] for one in fits)))
    memory = [one.memory_bytes / 1e9 for one in fits]
    below.plot(at, memory, marker="o", markersize=4, color="tab:blue")
    below.set(ylabel="peak memory, GB", xlabel="global batch", ylim=(0, 1.15 * max(memory)))
    for axes in (above, below):
        axes.axvline(found.fastest, color="tab:orange", zorder=0, label=f"fastest: {found.fastest:,}")
        if found.largest is not None and found.largest != found.fastest:
            axes.axvline(found.largest, color="0.5", linestyle="--", zorder=0, label=f"largest: {found.largest:,}")
        for number, batch in enumerate(failed):
            label = None if number else "does not fit"
            axes.axvline(batch, color="tab:red", linestyle=":", linewidth=1, zorder=0, label=label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    below.set_xscale("log", base=2)
    below.xaxis.set_major_locator(FixedLocator(_apart(sorted({*at, *failed}))))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above.legend(frameon=False)
    figure.align_ylabels()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _apart(batches: list[int]) -> list[int]:
    """The batches whose labels do not overlap: each at least 1.6 times (1.9 times if many) the previous one."""
    factor = 1.6 if len(batches) < 9 else 1.9
    kept: list[int] = []
    for batch in batches:
        if not kept or batch >= factor * kept[-1]:
            kept.append(batch)
    return kept

"""Plots of a run: the time of a step beside the hand-written loop's, and scaling. The same SVG for the same JSON."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402

from benchmarks.figures import Cell, cells  # noqa: E402
from benchmarks.peers.table import OURS, PEERS, REFERENCE  # noqa: E402
from benchmarks.peers.works import WORKS  # noqa: E402
from benchmarks.report import TITLES, scale  # noqa: E402

OURS_COLOR, OTHERS_COLOR, IDEAL_COLOR = "#d1495b", "#30638e", "#888888"


def draw(results: dict, folder: Path) -> list[Path]:
    """Draws what there are figures for.

    Args:
        results: as for `report.document`.
        folder: for the pictures, which is made.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, files = cells(results), []
    with pyplot.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none", "font.size": 9}):
        for topology, title in TITLES.items():
            rows = {work: found[topology, work] for work in WORKS if (topology, work) in found}
            rows = {work: cell for work, cell in rows.items() if _peers(cell)}
            if rows:
                files.append(_save(_beside(rows, title), folder / f"{topology}.svg"))
        scales = {kind: _scales(found, kind) for kind in ("mirrored", "workers")}
        if any(scales.values()):
            files.append(_save(_scaling(scales), folder / "scaling.svg"))
    return files


def _peers(cell: Cell) -> list[str]:
    return [name for name in cell.names() if name != REFERENCE and cell.ratio(name)]


def _beside(rows: dict[str, Cell], title: str):
    """A panel a model: a dot a peer with its quartiles, on a scale of ratios; in words what is not compared."""
    others = [peer.name for peer in PEERS.values() if peer.name != REFERENCE and not peer.is_floor]
    shown = [name for name in others if any(cell.row(name) for cell in rows.values())][::-1]
    across, down = min(2, len(rows)), -(-len(rows) // 2)
    size = (4.2 * across + 1.6, (0.33 * len(shown) + 0.6) * down + 0.4)
    figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, (work, cell) in zip(axes.flat, rows.items(), strict=False):
        for place, name in enumerate(shown):
            _dot(axis, place, cell, name)
        axis.axvline(1, color=IDEAL_COLOR, linewidth=1, linestyle="--", zorder=0)
        ratios = [cell.ratio(name) for name in _peers(cell)]
        _ratio_scale(axis, [edge for ratio in ratios for edge in (ratio.lower, ratio.upper)])
        axis.set_yticks(range(len(shown)), [PEERS[name].label.replace("`", "") for name in shown])
        axis.set_ylim(-0.5, len(shown) - 0.5)
        axis.set_title(f"{work} (1 is {cell.step_us(REFERENCE).median:,.0f} us a step)", fontsize=9)
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    figure.suptitle(f"{title}: times the hand-written TensorFlow loop (left is faster)", fontsize=10)
    return figure


def _dot(axis, place: int, cell: Cell, name: str) -> None:
    ratio = cell.ratio(name)
    if ratio is None:
        words = cell.row(name).get("status", "")
        axis.text(0.99, place, words, transform=axis.get_yaxis_transform(), ha="right", va="center", color=IDEAL_COLOR)
        return
    color = OURS_COLOR if name in OURS else OTHERS_COLOR
    axis.plot([ratio.lower, ratio.upper], [place, place], color=color, linewidth=4, alpha=0.4)
    axis.plot(ratio.median, place, "o", color=color)
    axis.annotate(f"{ratio.median:.2f}", (ratio.upper, place), (6, 0), textcoords="offset points", va="center")


def _ratio_scale(axis, values: list[float]) -> None:
    low, high = min(0.9, *values) / 1.1, max(1.25, *values) * 1.1
    low, high = low, high * (high / low) ** 0.12  # room for the last number
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    wide, narrow = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200], [0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 2.5, 3]
    axis.set_xticks([tick for tick in (wide if high / low > 4 else narrow) if low <= tick <= high])
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.grid(axis="x", alpha=0.3)


def _scales(found: dict, kind: str) -> dict[str, dict[str, float]]:
    """By peer, by model."""
    by_peer = {}
    for peer in (REFERENCE, *OURS, "torch-ddp"):
        speeds = {work: scale(found, work, peer, kind) for work in WORKS}
        if known := {work: speed for work, speed in speeds.items() if speed is not None}:
            by_peer[peer] = known
    return by_peer


def _scaling(scales: dict[str, dict[str, dict[str, float]]]):
    figure, axes = pyplot.subplots(1, 2, figsize=(8.5, 3.1), layout="constrained")
    titles = {"mirrored": ("2 replicas on the cores of 1", 1), "workers": ("2 workers, each with its cores", 2)}
    colors = {REFERENCE: IDEAL_COLOR, OURS[0]: OURS_COLOR, OURS[1]: "#edae49", "torch-ddp": OTHERS_COLOR}
    works = [work for work in WORKS if any(work in speeds for kind in scales.values() for speeds in kind.values())]
    width, bars = 0.8 / len(colors), {}
    for axis, (kind, by_peer) in zip(axes, scales.items(), strict=True):
        for place, peer in enumerate(colors):
            speeds = by_peer.get(peer, {})
            at = [works.index(work) + (place - 1.5) * width for work in speeds]
            if speeds:
                bars[PEERS[peer].label.replace("`", "")] = axis.bar(
                    at, speeds.values(), width * 0.9, color=colors[peer]
                )
        title, ideal = titles[kind]
        axis.axhline(ideal, color="black", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(works)), works)
        axis.set_ylim(0, 1.1 * max([ideal, *(speed for speeds in by_peer.values() for speed in speeds.values())]))
        axis.set_title(title, fontsize=9)
    figure.legend(bars.values(), bars, loc="outside lower center", ncols=len(colors), fontsize=8)
    axes[0].set_ylabel("speed over that of one")
    return figure


def _save(figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path

"""Writes the tables and the picture of docs/measured/scale.md: predictions of `benchmarks.scaling_model`, measurements.

`python -m benchmarks.scale` writes them between the page's marks. What two workers took is in `benchmarks.json`
there; what stragglers and failures cost, as `benchmarks.stragglers` and `benchmarks.failures` measure it, is in
docs/measured/scale.
"""

import argparse
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import failures, stragglers
from benchmarks.figures import Cell, cells
from benchmarks.scaling_model import (
    Link,
    daly_s,
    fit_link,
    hierarchical_s,
    lost_fraction,
    mtbf_s,
    ring_s,
    slowest_s,
    tree_s,
)

DOCS = Path(__file__).parents[1] / "docs" / "measured"
PAGE, RESULTS, PICTURE = DOCS / "scale.md", DOCS / "benchmarks.json", DOCS / "scale" / "useful.svg"
WORKERS = (1, 2, 8, 16, 64, 256, 1024, 4096, 10_000)
DAY_S = 86_400
LOOP, FLOOR = "tfgpu-loop", "no-network"


@dataclass(frozen=True)
class Run:
    """An imagined run. Everything here is assumed, except where a comment names who measured it.

    Attributes:
        parameters: of the model; gradients are float32, and an Adam checkpoint has three numbers for each.
        compute_s: one worker's step on its own rows, which are the same whatever the number of workers.
        deviation: of a step, as a share of it; independent from worker to worker.
        per_node: GPUs in a machine.
        within: between GPUs of a machine: half of NVLink's 900 GB/s on an H100.
        across: between machines, for each GPU: 400 Gbit/s.
        save_s: what a checkpoint stops training for: the arrays are copied, and written in the background.
        detect_s: until the launcher knows: the longest of FACTS (measured here: 0.1 to 11 s).
        start_s: from the launcher's start to the first step (measured here: 3.4 s), and a minute to schedule.
        storage_bytes_s: at which all workers together read a checkpoint.
        gpu_mtbf_s: Llama 3 (2024): 419 unexpected interruptions in 54 days on 16,384 GPUs.
    """

    parameters: float = 100e6
    compute_s: float = 0.25
    deviation: float = 0.03
    per_node: int = 8
    within: Link = Link(bandwidth_bytes_s=450e9, latency_s=5e-6)
    across: Link = Link(bandwidth_bytes_s=50e9, latency_s=15e-6)
    save_s: float = 1.0
    detect_s: float = 11.0
    start_s: float = 63.4
    storage_bytes_s: float = 50e9
    gpu_mtbf_s: float = 54 * DAY_S * 16_384 / 419

    @property
    def gradient_bytes(self) -> float:
        return 4 * self.parameters

    @property
    def checkpoint_bytes(self) -> float:
        return 12 * self.parameters


@dataclass(frozen=True)
class Point:
    """What the formulas say of a run on so many workers. Times in seconds."""

    workers: int
    ring_s: float
    tree_s: float
    hierarchical_s: float
    slowest_s: float
    mtbf_s: float
    restart_s: float
    interval_s: float
    lost: float
    step: float

    @property
    def useful(self) -> float:
        """The share of the time that is a worker's own computing, once."""
        return self.step * (1 - self.lost)


def point(run: Run, workers: int) -> Point:
    """Computes one row of the table."""
    per_node = min(workers, run.per_node)
    links = {"within": run.within, "across": run.across}
    network = hierarchical_s(run.gradient_bytes, max(1, workers // run.per_node), per_node, **links)
    slowest = slowest_s(run.compute_s, run.deviation * run.compute_s, workers)
    failures_s = mtbf_s(run.gpu_mtbf_s, workers)
    restart = run.detect_s + run.start_s + workers * run.checkpoint_bytes / run.storage_bytes_s
    interval = daly_s(run.save_s, failures_s)
    flat = run.within if workers <= run.per_node else run.across
    return Point(
        workers=workers,
        ring_s=ring_s(run.gradient_bytes, workers, flat),
        tree_s=tree_s(run.gradient_bytes, workers, flat),
        hierarchical_s=network,
        slowest_s=slowest,
        mtbf_s=failures_s,
        restart_s=restart,
        interval_s=interval,
        lost=lost_fraction(interval, save_s=run.save_s, restart_s=restart, mtbf_s=failures_s),
        # Nothing overlaps: tfgpu's gradients meet once, when the backward pass has ended.
        step=run.compute_s / (slowest + network),
    )


@dataclass(frozen=True)
class Measured:
    """Two workers of docs/measured/benchmarks.json: what the network took of a step."""

    work: str
    size_bytes: float
    collectives: int
    network_s: float

    @classmethod
    def of(cls, cell: Cell) -> "Measured":
        row = cell.row(LOOP)
        step_us, alone_us = cell.step_us(LOOP).median, cell.step_us(FLOOR).median
        return cls(cell.work, 4.0 * row["parameters"], row["collectives"]["a_step"], (step_us - alone_us) / 1e6)


def measured(results: dict) -> list[Measured]:
    found = [cell for (topology, _), cell in cells(results).items() if topology == "workers-2"]
    return [Measured.of(cell) for cell in found if cell.step_us(LOOP) and cell.step_us(FLOOR)]


def link(rows: list[Measured]) -> Link:
    """The link between the two workers that explains the rows best."""
    sizes, counts, times = zip(*((row.size_bytes, row.collectives, row.network_s) for row in rows), strict=True)
    return fit_link(list(sizes), list(counts), list(times), workers=2)


def predicted_s(row: Measured, found: Link) -> float:
    return row.collectives * ring_s(row.size_bytes / row.collectives, 2, found)


def check_table(rows: list[Measured]) -> list[str]:
    """Each model's network time, beside what a link says that was fitted to the other models alone."""
    lines = [
        "| model | gradients | all-reduces a step | measured | modeled from the other three | modeled / measured |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        others = link([other for other in rows if other.work != row.work])
        modeled = predicted_s(row, others)
        cells = [row.work, _size(row.size_bytes), str(row.collectives), _time(row.network_s), _time(modeled)]
        lines.append(_row([*cells, f"{modeled / row.network_s:.2f}"]))
    found = link(rows)
    return [
        *lines,
        "",
        f"All of them together: {found.bandwidth_bytes_s / 1e6:.0f} MB/s and {found.latency_s * 1e6:.0f} us a message.",
    ]


def scale_table(points: list[Point], grpc: list[float]) -> list[str]:
    heads = ["workers", "ring over gRPC, this machine's link", "flat ring", "two trees", "nodes of 8", "slowest worker"]
    heads += ["step's efficiency", "a failure each", "restart", "checkpoint each", "lost", "useful"]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for row, ours in zip(points, grpc, strict=True):
        times = (ours, row.ring_s, row.tree_s, row.hierarchical_s, row.slowest_s)
        cells = [f"{row.workers:,}", *(_time(time) for time in times), f"{row.step:.1%}"]
        cells += [_time(row.mtbf_s), _time(row.restart_s), _time(row.interval_s)]
        lines.append(_row([*cells, f"{row.lost:.2%}", f"{row.useful:.1%}"]))
    return lines


def interval_table(run: Run, workers: int) -> list[str]:
    """What a wrong interval costs on so many workers."""
    row = point(run, workers)
    lines = [f"| checkpoint each, {workers:,} workers | lost |", "|---|---|"]
    for factor in (0.1, 0.5, 1, 2, 10):
        interval = row.interval_s * factor
        lost = lost_fraction(interval, save_s=run.save_s, restart_s=row.restart_s, mtbf_s=row.mtbf_s)
        lines.append(f"| {_time(interval)}{', the optimum' if factor == 1 else ''} | {lost:.2%} |")
    hourly = lost_fraction(3600, save_s=run.save_s, restart_s=row.restart_s, mtbf_s=row.mtbf_s)
    return [*lines, f"| 1 h | {hourly:.2%} |"]


def batch_table(run: Run, rows: int) -> list[str]:
    """The same global batch, cut into ever smaller pieces."""
    heads = ["workers", "rows of each", "computing", "network", "efficiency", "times one worker's speed"]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for workers in (8, 16, 64, 256, 1024):
        part = replace(run, compute_s=run.compute_s * 8 / workers)
        row = point(part, workers)
        cells = [f"{workers:,}", str(rows // workers), _time(part.compute_s), _time(row.hierarchical_s)]
        lines.append(_row([*cells, f"{row.step:.1%}", f"{workers * row.step:,.0f}"]))
    return lines


def filled(page: str, tables: dict[str, list[str]]) -> str:
    """Puts tables between the page's marks.

    Example:
        >>> filled("a <!-- t -->old<!-- end --> b", {"t": ["new"]})
        'a <!-- t -->\\nnew\\n<!-- end --> b'
    """
    for name, lines in tables.items():
        body = f"<!-- {name} -->\n" + "\n".join(lines) + "\n<!-- end -->"
        page, count = re.subn(rf"<!-- {name} -->.*?<!-- end -->", lambda _, body=body: body, page, flags=re.DOTALL)
        assert count == 1, f"the page has {count} marks for {name}"
    return page


def page(results: dict, run: Run, text: str) -> str:
    """Returns the page with new tables."""
    rows = measured(results)
    points = [point(run, workers) for workers in WORKERS]
    slow = link(rows)
    grpc = [ring_s(run.gradient_bytes, workers, slow) for workers in WORKERS]
    return filled(
        text,
        {
            "check": check_table(rows),
            "stragglers": stragglers.table(json.loads(stragglers.RESULTS.read_text())),
            "failures": failures.table(json.loads(failures.RESULTS.read_text())),
            "scale": scale_table(points, grpc),
            "interval": interval_table(run, 10_000),
            "batch": batch_table(run, 8192),
        },
    )


def draw(run: Run, file: Path) -> None:
    """Draws where the time goes, the same SVG for the same run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workers = sorted({round(10 ** (step / 20)) for step in range(81)})
    points = [point(run, count) for count in workers]
    waiting = [(row.slowest_s - run.compute_s) / (row.slowest_s + row.hierarchical_s) for row in points]
    network = [row.hierarchical_s / (row.slowest_s + row.hierarchical_s) for row in points]
    left = [1 - row.lost for row in points]
    parts = {
        "computing": ("#30638e", [row.useful for row in points]),
        "network": ("#edae49", [share * rest for share, rest in zip(network, left, strict=True)]),
        "waiting for the slowest": ("#9a9a9a", [share * rest for share, rest in zip(waiting, left, strict=True)]),
        "checkpoints, failures, restarts": ("#d1495b", [row.lost for row in points]),
    }
    with pyplot.rc_context({"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 9}):
        figure, axis = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
        colors, shares = zip(*parts.values(), strict=True)
        percent = [[100 * each for each in share] for share in shares]
        axis.stackplot(workers, *percent, labels=list(parts), colors=colors)
        axis.set(xscale="log", xlim=(1, workers[-1]), ylim=(60, 100), xlabel="workers", ylabel="share of the time, %")
        axis.legend(loc="lower left", reverse=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    for size, unit in ((DAY_S, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.0f} {unit}" if seconds >= 100 * size else f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.3g} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.3g} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tables of docs/measured/scale.md, and its picture.")
    parser.add_argument("--parameters", type=float, default=Run.parameters, help="of the model")
    parser.add_argument("--compute-s", type=float, default=Run.compute_s, help="seconds of a worker's step")
    parser.add_argument("--deviation", type=float, default=Run.deviation, help="of a step, as a share of it")
    parser.add_argument("--save-s", type=float, default=Run.save_s, help="seconds that a checkpoint stops training")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; its tables are replaced")
    asked = parser.parse_args()
    run = Run(parameters=asked.parameters, compute_s=asked.compute_s, deviation=asked.deviation, save_s=asked.save_s)
    asked.output.write_text(page(json.loads(RESULTS.read_text()), run, PAGE.read_text()))
    draw(run, asked.output.parent / "scale" / PICTURE.name)


if __name__ == "__main__":
    main()

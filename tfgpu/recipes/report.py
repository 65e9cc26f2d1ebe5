"""`report.html`: a run's results and its machines' resource use, on one self-contained page."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter

from tfgpu.recipes import drawing, wording
from tfgpu.sensors import table
from tfgpu.sensors.sample import Value

MOST_CLASSES = 20  # larger confusion matrices are hard to read
_PERCENT = FuncFormatter(lambda value, _: f"{value:.4g}%")
_FILE = re.compile(r"monitor-epochs-worker(\d+)\.csv")
_GPU = re.compile(r"gpu(\d+)_(\w+)")

Machines = Mapping[int, Sequence[Mapping[str, Value]]]
"""By worker: the rows of `Monitor`'s table, ordered by epoch."""


@dataclass(frozen=True)
class Report:
    """The content of a report.

    Args:
        title: such as `"cnn on digits"`.
        subtitle: one line below it: date and devices.
        tested: the metrics on the test split by name; empty without one.
        rows: one mapping per epoch, with the columns of `metrics.csv`.
        cards: the key numbers, as (label, value, remark).
        facts: sections of the table of facts: name -> (label -> value).
        settings: the recipe.
        advice: sentences about layer sizes and Tensor Cores.
        confusion: counts [true class][predicted class], or None.
        class_names: one per row of `confusion`.
        metrics: the names of the metrics in `rows` except the loss, the main one first.
        monitor: the machines' resource use during training; None if it was not monitored.
        samples: what a language model wrote: objects with `prompt`, `expected` and `written`.
    """

    title: str
    subtitle: str
    tested: Mapping[str, float]
    rows: Sequence[Mapping[str, float]]
    cards: Sequence[tuple[str, str, str]] = ()
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    advice: Sequence[str] = ()
    confusion: Sequence[Sequence[int]] | None = None
    class_names: Sequence[str] = ()
    metrics: Sequence[str] = ("accuracy",)
    monitor: Machines | None = None
    samples: Sequence[Any] = ()

    @property
    def score(self) -> tuple[str, str]:
        """The main score and its name: of the test, else of the last epoch's validation, else of its training."""
        order = ("perplexity", "accuracy", *self.metrics, "loss")
        if len(self.metrics) > 1 and not {"perplexity", "accuracy", "mae"} & set(self.metrics):
            order = ("loss",)  # several targets: no metric stands for all
        last = self.rows[-1] if self.rows else {}
        tested = {f"test_{name}": number for name, number in self.tested.items()}
        for numbers, prefix in ((tested, "test_"), (last, "val_"), (last, "")):
            for name in order:
                if f"{prefix}{name}" in numbers:
                    words = wording.title(f"{prefix}{name}")
                    value = wording.value(name, numbers[f"{prefix}{name}"])
                    return value, words if prefix else f"training {words}"
        return "-", "no test part"


def render(report: Report) -> str:
    """Renders the page.

    Args:
        report: its content; all text is escaped.

    Returns:
        HTML with embedded style and charts.

    Example:
        >>> "<html" in render(Report("cnn on digits", "", {"accuracy": 0.99}, rows=[{"loss": 0.1}]))
        True
    """
    template = drawing.environment().get_template("report.html.j2")
    return template.render(
        report=report,
        charts=_charts(report.rows, report.metrics),
        confusion=_confusion(report.confusion, report.class_names),
        confused=_most_confused(report.confusion, report.class_names),
        machine=machines(report.monitor) if report.monitor else None,
    )


def best_epoch(rows: Sequence[Mapping[str, float]]) -> int | None:
    """Returns the epoch (from 1) of the best validation: the lowest perplexity, highest accuracy, or lowest loss."""
    for name, sign in (("val_perplexity", 1), ("val_accuracy", -1), ("val_loss", 1)):
        values = [(sign * row[name], number) for number, row in enumerate(rows, start=1) if name in row]
        if values:
            return min(values)[1]
    return None


def _charts(rows: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> list[dict[str, Any]]:
    best = best_epoch(rows)

    def both(name: str) -> dict[str, Any] | None:
        words = wording.title(name)
        labels = {name: "training", f"val_{name}": "validation"}
        style = {"scale": 100, "ticks": _PERCENT} if name.endswith("accuracy") else {}
        return drawing.chart(words[0].upper() + words[1:], rows, tuple(labels), labels=labels, best=best, **style)

    drawn = [
        *(both(name) for name in (*metrics, "loss") if name != "perplexity"),
        drawing.chart("Learning rate", rows, ("learning_rate",)),
        drawing.chart("Step time, ms", rows, ("step_time_s",), scale=1000, from_zero=True),
    ]
    return [chart for chart in drawn if chart]


def _confusion(counts: Sequence[Sequence[int]] | None, names: Sequence[str]) -> list[dict[str, Any]] | None:
    if counts is None or len(counts) > MOST_CLASSES:
        return None
    return [
        {
            "name": names[true],
            "cells": [
                {"count": count, "share": round(count / max(sum(row), 1), 3), "right": true == guess}
                for guess, count in enumerate(row)
            ],
            "recall": f"{row[true] / max(sum(row), 1):.1%}",
        }
        for true, row in enumerate(counts)
    ]


def _most_confused(counts: Sequence[Sequence[int]] | None, names: Sequence[str]) -> list[str]:
    if counts is None:
        return []
    cells = [(count, true, guess) for true, row in enumerate(counts) for guess, count in enumerate(row)]
    wrong = sorted((cell for cell in cells if cell[0] and cell[1] != cell[2]), reverse=True)
    return [f"{names[true]} taken for {names[guess]}: {count}" for count, true, guess in wrong[:5]]


def monitored(folder: Path) -> Machines | None:
    """Reads the workers' tables of their resource use; None if there are none.

    Args:
        folder: of the tables.
    """
    found = {}
    for path in sorted(folder.glob("monitor-epochs-worker*.csv")):
        match = _FILE.fullmatch(path.name)
        try:
            rows = table.read(path) if match else []
        except OSError:  # a missing disk of another worker must not prevent the report
            continue
        # Of an epoch that ran again after a resume, the last row counts.
        last = {row.get("epoch"): row for row in rows}
        if match and last:
            found[int(match[1])] = [last[epoch] for epoch in sorted(last, key=_order)]
    return dict(sorted(found.items())) or None


def machines(workers: Machines) -> dict[str, Any]:
    """Returns the page's content: a sentence, charts of the first worker, a table of all workers."""
    first, rows = next(iter(workers.items()))
    drawn = [_with_gpus(row) for row in rows]
    has_gpu = any("gpu_utilization" in row for row in drawn)
    labels = {"gpu_utilization": "GPU", "cpu_share_mean": "CPU", "gpu_memory": "GPU", "memory_bytes_max": "process"}
    labels |= {"disk_read_bytes_per_s_mean": "read", "disk_written_bytes_per_s_mean": "written"}
    busy = ("gpu_utilization", "cpu_share_mean") if has_gpu else ("cpu_share_mean",)
    memory = ("gpu_memory", "memory_bytes_max") if has_gpu else ("memory_bytes_max",)
    title = "GPU and CPU, busy" if has_gpu else "CPU, busy (of its cores)"
    memory_title = "Memory, GiB" if has_gpu else "Memory of the process, GiB"
    disks = ("disk_read_bytes_per_s_mean", "disk_written_bytes_per_s_mean")

    def chart(title: str, names: Sequence[str], **how: Any) -> dict[str, Any] | None:
        return drawing.chart(title, drawn, names, from_zero=True, **how)

    charts = [
        chart(title, busy, labels=labels if has_gpu else None, scale=100, ticks=_PERCENT),
        chart("Waiting for data", ("input_wait",), scale=100, ticks=_PERCENT),
        chart(memory_title, memory, labels=labels if has_gpu else None, scale=2**-30),
        chart("Disks, MB/s", disks, labels=labels, scale=1e-6),
        chart("Energy per example, J", ("energy_per_example_j",)),
        chart("Power of the GPUs, W", ("gpu_power",)),
    ]
    return {
        "limit": limited(rows),
        "worker": first if len(workers) > 1 else None,
        "charts": [chart for chart in charts if chart],
        "table": _table(workers),
    }


def limited(rows: Sequence[Mapping[str, Value]]) -> str:
    """Describes the most frequent bottleneck, with the figures of its last epoch.

    Example:
        >>> limited([{"limit": "CPU", "why": "the cores are 95% busy"}])
        'the CPU: the cores are 95% busy'
    """
    named = Counter(str(row["limit"]) for row in rows if row.get("limit"))
    if not named:
        return ""
    most = named.most_common(1)[0][0]
    words = {"input": "the input", "CPU": "the CPU", "host": "the host"}.get(most, most)
    return f"{words}: {[row for row in rows if row.get('limit') == most][-1].get('why')}"


def _with_gpus(row: Mapping[str, Value]) -> dict[str, Value]:
    """Adds totals over all GPUs to a row."""
    found: dict[str, list[float]] = {}
    for name, value in row.items():
        if (match := _GPU.fullmatch(name)) and isinstance(value, float):
            found.setdefault(match[2], []).append(value)
    whole = dict(row)
    if busy := found.get("utilization_mean"):
        whole["gpu_utilization"] = sum(busy) / len(busy)
    for name, column in (("gpu_memory", "memory_bytes_max"), ("gpu_power", "power_w_mean")):
        if told := found.get(column):
            whole[name] = sum(told)
    return whole


_COLUMNS = (
    ("step", "step_time_s", lambda value: f"{value * 1e3:.1f} ms"),
    ("examples/s", "examples_per_s", lambda value: f"{value:,.0f}"),
    ("waiting for data", "input_wait", lambda value: f"{value:.0%}"),
    ("GPU", "gpu_utilization", lambda value: f"{value:.0%}"),
    ("CPU", "cpu_share_mean", lambda value: f"{value:.0%}"),
    ("memory", "memory_bytes_max", lambda value: f"{value / 2**30:.2f} GiB"),
    ("GPU memory", "gpu_memory", lambda value: f"{value / 2**30:.1f} GiB"),
    ("power", "gpu_power", lambda value: f"{value:,.0f} W"),
    ("energy", "energy_j", lambda value: f"{value:,.0f} J"),
    ("per example", "energy_per_example_j", lambda value: f"{value:.3g} J"),
)
_SUMS, _MOST = ("energy_j",), ("memory_bytes_max", "gpu_memory")


def _table(workers: Machines) -> dict[str, Any]:
    """Returns the header and rows of a table of workers, without empty columns."""
    known = {worker: [_with_gpus(row) for row in rows] for worker, rows in workers.items()}
    columns = [
        each for each in _COLUMNS if any(row.get(each[1]) is not None for rows in known.values() for row in rows)
    ]
    lines = []
    for worker, rows in known.items():
        values = [_over(rows, name) for _, name, _ in columns]
        cells = ["-" if value is None else words(value) for value, (_, _, words) in zip(values, columns, strict=True)]
        lines.append([f"worker {worker}", *cells, limited(rows).partition(":")[0]])
    return {"head": ["", *(title for title, _, _ in columns), "limited by"], "rows": lines}


def _over(rows: Sequence[Mapping[str, Value]], name: str) -> float | None:
    told = [value for row in rows if isinstance(value := row.get(name), float)]
    if not told:
        return None
    return sum(told) if name in _SUMS else max(told) if name in _MOST else sum(told) / len(told)


def _order(epoch: Value) -> float:
    return epoch if isinstance(epoch, float) else 0.0

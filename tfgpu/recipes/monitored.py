"""Resource use during training, for the report: the tables of `Monitor`, by epoch and worker."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter

from tfgpu.recipes import drawing
from tfgpu.sensors import table
from tfgpu.sensors.sample import Value

_FILE = re.compile(r"monitor-epochs-worker(\d+)\.csv")
_GPU = re.compile(r"gpu(\d+)_(\w+)")


@dataclass(frozen=True)
class Monitored:
    """The epochs of each worker.

    Attributes:
        workers: each worker's rows, ordered by epoch.
    """

    workers: Mapping[int, Sequence[Mapping[str, Value]]]


def read(folder: Path) -> Monitored | None:
    """Reads the workers' tables; None if there are none.

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
    return Monitored(dict(sorted(found.items()))) if found else None


def shown(monitored: Monitored) -> dict[str, Any]:
    """Returns the page's content: a sentence, charts of the first worker, a table of all workers."""
    first, rows = next(iter(monitored.workers.items()))
    percent = FuncFormatter(lambda value, _: f"{value:.4g}%")
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
        chart(title, busy, labels=labels if has_gpu else None, scale=100, ticks=percent),
        chart("Waiting for data", ("input_wait",), scale=100, ticks=percent),
        chart(memory_title, memory, labels=labels if has_gpu else None, scale=2**-30),
        chart("Disks, MB/s", disks, labels=labels, scale=1e-6),
        chart("Energy per example, J", ("energy_per_example_j",)),
        chart("Power of the GPUs, W", ("gpu_power",)),
    ]
    return {
        "limit": limited(rows),
        "worker": first if len(monitored.workers) > 1 else None,
        "charts": [chart for chart in charts if chart],
        "table": _table(monitored),
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


def _table(monitored: Monitored) -> dict[str, Any]:
    """Returns the header and rows of a table of workers, without empty columns."""
    known = {worker: [_with_gpus(row) for row in rows] for worker, rows in monitored.workers.items()}
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

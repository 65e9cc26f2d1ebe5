"""Renders `tfgpu top`: the machine, GPUs and their processes, the workers of a run."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tfgpu.redact import printable
from tfgpu.sensors.sample import Gpu, Value
from tfgpu.sensors.view import SILENT_S, View, Worker

_BAR = 10
_FULL, _EMPTY = "━", "─"
_MOST_PROCESSES = 8
_WIDE = 110
_NARROW = 72
"""Below this many terminal columns, bars are short and workers have fewer columns."""


def drawn(view: View, *, width: int) -> RenderableType:
    """Renders the whole screen, `width` columns wide."""
    view = _printable(view)
    parts = _machine(view, width)
    if view.workers:
        parts += [Text(), _workers(view.workers, width), *_limits(view.workers)]
    return Group(*parts, *_processes(view))


def _printable(value: Any) -> Any:
    """Removes control sequences from the texts of a view, since processes choose their names."""
    if dataclasses.is_dataclass(value):
        parts = {each.name: _printable(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_printable, value))
    return printable(value) if isinstance(value, str) else value


def _machine(view: View, width: int) -> list[RenderableType]:
    sample = view.sample
    head = Text.assemble((view.host, "bold"), f"  {time.strftime('%H:%M:%S', time.localtime(sample.time))}")
    if view.load is not None:
        head.append(f"  load {view.load:.1f}", "dim")
    grid = _table(show_header=False)
    size = _BAR if width >= _NARROW else 3
    for least in (len("network"), size + len(" 100%"), None):
        grid.add_column(no_wrap=least is not None or width >= _NARROW, min_width=least)
    busy = sample.machine_cpu_share
    grid.add_row("CPU", _bar(busy, size), f"of {len(view.cpus)} cores{_cores(view.cpus, width)}")
    used, total = sample.machine_memory_bytes, sample.machine_memory_total_bytes
    grid.add_row("memory", _bar(_part(used, total), size), f"{_size(used)} of {_size(total)}")
    if sample.memory_limit_bytes and sample.group_memory_bytes is not None:
        used, total = sample.group_memory_bytes, sample.memory_limit_bytes
        grid.add_row("limit", _bar(_part(used, total), size), f"{_size(used)} of {_size(total)}")
    free = f"  {_size(view.disk_free_bytes)} free" if view.disk_free_bytes is not None else ""
    rates = f"read {_rate(sample.disk_read_bytes_per_s)}  written {_rate(sample.disk_written_bytes_per_s)}{free}"
    if width < _NARROW:
        rates = free.strip()
    grid.add_row("disk", "", rates)
    sent, received = sample.network_sent_bytes_per_s, sample.network_received_bytes_per_s
    grid.add_row("network", "", f"sent {_rate(sent)}  received {_rate(received)}")
    return [head, grid, *_gpus(sample.gpus, sample.gpu_error, width)]


def _cores(shares: Sequence[float], width: int) -> str:
    """One bar per core, if they all fit."""
    strokes = "▁▂▃▄▅▆▇█"
    text = "".join(strokes[min(7, int(share * 8))] for share in shares)
    return f"  {text}" if 1 < len(text) <= width - 40 else ""


def _gpus(gpus: Sequence[Gpu], error: str, width: int) -> list[RenderableType]:
    lost = [Text(f"GPU figures are missing: {error}", "yellow")] if gpus and error else []
    if not gpus:
        return [Text("No NVIDIA GPU here.", "dim")]
    table = _table()
    columns: list[tuple[str, Callable[[Gpu], Text | str]]] = [
        ("GPU", lambda gpu: gpu.label),
        ("busy", lambda gpu: _bar(gpu.utilization)),
        ("memory", lambda gpu: _bar(_part(gpu.memory_bytes, gpu.memory_total_bytes), size=6)),
        ("", lambda gpu: _size(gpu.memory_bytes)),
        ("power", lambda gpu: _number(gpu.power_w, "W")),
        ("", lambda gpu: _number(gpu.temperature_c, "°C")),
        ("clock", lambda gpu: _number(gpu.sm_clock_mhz, "MHz")),
        ("PCIe", lambda gpu: _rate(_sum(gpu.pcie_sent_bytes_per_s, gpu.pcie_received_bytes_per_s))),
        ("NVLink", lambda gpu: _rate(_sum(gpu.nvlink_sent_bytes_per_s, gpu.nvlink_received_bytes_per_s))),
        ("slowed by", lambda gpu: gpu.slowed_by or ""),
    ]
    if width >= _WIDE:
        columns[1:1] = [("name", lambda gpu: gpu.name.removeprefix("NVIDIA "))]
        columns[3:3] = [("traffic", lambda gpu: _share(gpu.memory_utilization))]
    else:
        del columns[-2:]
    for title, _ in columns:
        table.add_column(title, no_wrap=True, justify="left" if title in ("GPU", "name", "busy", "memory") else "right")
    for gpu in gpus:
        table.add_row(*(cell(gpu) for _, cell in columns))
    return [Text(), table, *lost]


def _workers(workers: Sequence[Worker], width: int) -> Table:
    table = _table()
    columns: list[tuple[str, Callable[[Worker], str]]] = [
        ("worker", lambda worker: str(worker.number)),
        ("epoch", lambda worker: _plain(worker.now.get("epoch"))),
        ("step", lambda worker: _plain(worker.now.get("step"))),
        ("step time", lambda worker: _milliseconds(_newest(worker, "step_time_s"))),
        ("ex/s", lambda worker: _plain(_newest(worker, "examples_per_s"))),
        ("waits", lambda worker: _share(_newest(worker, "input_wait"))),
        ("CPU", lambda worker: _share(worker.now.get("cpu_share"))),
        ("memory", lambda worker: _size(worker.now.get("memory_bytes"))),
        ("J/ex", lambda worker: _plain(worker.epoch.get("energy_per_example_j"), ".3g")),
    ]
    if width < _NARROW:
        columns = [each for each in columns if each[0] in ("worker", "step", "step time", "waits")]
    if width >= _WIDE:
        columns.append(("J/epoch", lambda worker: _plain(worker.epoch.get("energy_j"))))
        columns.append(("last sample", lambda worker: _ago(worker.age_s)))
    for title, _ in columns:
        table.add_column(title, no_wrap=True, justify="left" if title == "worker" else "right")
    for worker in workers:
        table.add_row(*(cell(worker) for _, cell in columns), style="dim" if worker.age_s > SILENT_S else "")
    return table


def _limits(workers: Sequence[Worker]) -> list[Text]:
    """What limits the workers, grouped by resource."""
    silent = [worker for worker in workers if worker.age_s > SILENT_S]
    lines = []
    for resource in dict.fromkeys(worker.limit.resource for worker in workers if worker not in silent):
        named = [worker for worker in workers if worker not in silent and worker.limit.resource == resource]
        which = "" if len(named) == len(workers) else f"  (worker {', '.join(str(worker.number) for worker in named)})"
        lines.append(Text.assemble("limited by ", (resource, "bold yellow"), f": {named[0].limit.why}{which}"))
    if silent:
        named_all = ", ".join(str(worker.number) for worker in silent)
        ages = _ago(min(worker.age_s for worker in silent))
        lines.append(Text(f"worker {named_all}: no sample for {ages}: it has ended or hangs", "dim"))
    return lines


def _processes(view: View) -> list[RenderableType]:
    """The processes on the GPUs."""
    if not view.processes:
        return []
    table = _table()
    for title in ("GPU", "pid", "memory", "process"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("pid", "memory") else "left")
    for process in view.processes[:_MOST_PROCESSES]:
        name = process["name"] or "(not seen from here)"
        table.add_row(str(process["gpu"]), str(process["pid"]), _size(process["bytes"]), name)
    more = len(view.processes) - _MOST_PROCESSES
    return [Text(), table, *([Text(f"and {more} more", "dim")] if more > 0 else [])]


def _table(show_header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=show_header)


def _bar(share: float | None, size: int = _BAR) -> Text:
    if share is None:
        return Text("-", "dim")
    share = min(1.0, max(0.0, share))
    full = round(share * size)
    color = "green" if share < 0.6 else "yellow" if share < 0.9 else "red"
    return Text.assemble((_FULL * full, color), (_EMPTY * (size - full), "dim"), f" {share:4.0%}")


def _newest(worker: Worker, name: str) -> Value:
    """The mean of the last samples; if steps are longer than samples, the value of the last epoch."""
    value = worker.now.get(name)
    return value if value is not None else worker.epoch.get(name)


def _part(value: float | None, total: float | None) -> float | None:
    return value / total if value is not None and total else None


def _sum(*values: float | None) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) if told else None


def _size(value: Value) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.0f} MiB"


def _rate(value: Value) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value / 1e9:.1f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f} {unit}"


def _plain(value: Value, form: str = ",.0f") -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _share(value: Value) -> str:
    return _plain(value, ".0%")


def _milliseconds(value: Value) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value * 1e3:.2f} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms"


def _ago(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"

"""`tfgpu top`: a live view of machines and of a training."""

import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfgpu.cli import screen
from tfgpu.cli.flags import argument, option
from tfgpu.errors import InputError
from tfgpu.redact import printable
from tfgpu.sensors import Sampler
from tfgpu.sensors.sample import Gpu, Value
from tfgpu.sensors.view import SILENT_S, View, Viewer, Worker, folder_of

app = typer.Typer()
_FIRST_S = 0.5
_BAR = 10
_MOST_PROCESSES = 8
_STYLE = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0), "header_style": "dim"}
_Column = tuple[str, Callable[[Any], Text | str]]
_WIDE = 110
_NARROW = 72  # below this many terminal columns, bars are short and workers have fewer columns


@screen.command(app, "top")
def top(
    run: argument(Path | None, "RUN", "A run directory, or the folder of a Monitor.") = None,
    once: option(bool, "Print once and exit.", "--once") = False,
    as_json: option(bool, "Print one line of JSON per update; with --once, a single document.", "--json") = False,
    every: option(float, "Time between updates.", "SECONDS") = 1.0,
) -> None:
    """Show GPUs, CPUs, memory, and what limits a running training.

    Show GPUs, their processes, CPUs, memory and disks; with RUN also its step time, energy and bottleneck.

    Quit with q or Ctrl-C.

    tfgpu top
    tfgpu top runs/best
    tfgpu top --once --json
    """
    if not 0.1 <= every <= 3600:
        raise InputError(f"--every must be from 0.1 to 3600 seconds. Received: {every}. Try 1.")
    if run is not None:
        folder_of(run)
    with ExitStack() as held:
        _leave_at_sigterm(held)
        try:
            viewer = Viewer(run, held.enter_context(Sampler(everything=True)))
            time.sleep(_FIRST_S if once else min(_FIRST_S, every))
            _show(viewer.look, once, as_json, every)
        except KeyboardInterrupt:  # The usual way to end it.
            pass
        except BrokenPipeError:  # The reader has closed the pipe; without this, Python reports it again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show(look: Callable[[], View], once: bool, as_json: bool, every: float) -> None:
    console = _console()
    if as_json and once:
        print(json.dumps(look().as_json(), indent=2))
    elif as_json:
        while True:
            print(json.dumps(look().as_json()), flush=True)
            time.sleep(every)
    elif once or not console.is_terminal:
        console.print(drawn(look(), width=console.width))
    else:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(drawn(look(), width=console.width), refresh=True)
                if pressed(every) in ("q", "Q", "\x03"):
                    return


def _console(**settings: Any) -> Console:
    return Console(highlight=False, markup=False, emoji=False, **settings)


def _leave_at_sigterm(held: ExitStack) -> None:
    """Handles SIGTERM like Ctrl-C, so that the terminal is restored."""

    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, leave)
        held.callback(signal.signal, signal.SIGTERM, before)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Reads single keys; without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)

        def pressed(seconds: float) -> str:
            ready, _, _ = select.select([sys.stdin], [], [], seconds)
            # Not `sys.stdin.read`, which buffers. An empty read means that the terminal is gone.
            return (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if ready else ""

        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


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
    grid = Table(**_STYLE, show_header=False)
    size = _BAR if width >= _NARROW else 3
    for least in (len("network"), size + len(" 100%"), None):
        grid.add_column(no_wrap=least is not None or width >= _NARROW, min_width=least)
    cores = "".join("▁▂▃▄▅▆▇█"[min(7, int(share * 8))] for share in view.cpus)
    cores = f"  {cores}" if 1 < len(cores) <= width - 40 else ""
    grid.add_row("CPU", _bar(sample.machine_cpu_share, size), f"of {len(view.cpus)} cores{cores}")
    used = [("memory", sample.machine_memory_bytes, sample.machine_memory_total_bytes)]
    if sample.memory_limit_bytes and sample.group_memory_bytes is not None:
        used.append(("limit", sample.group_memory_bytes, sample.memory_limit_bytes))
    for name, part, total in used:
        grid.add_row(name, _bar(_part(part, total), size), f"{_size(part)} of {_size(total)}")
    free = f"  {_size(view.disk_free_bytes)} free" if view.disk_free_bytes is not None else ""
    rates = f"read {_rate(sample.disk_read_bytes_per_s)}  written {_rate(sample.disk_written_bytes_per_s)}{free}"
    grid.add_row("disk", "", free.strip() if width < _NARROW else rates)
    sent, received = sample.network_sent_bytes_per_s, sample.network_received_bytes_per_s
    grid.add_row("network", "", f"sent {_rate(sent)}  received {_rate(received)}")
    return [head, grid, *_gpus(sample.gpus, sample.gpu_error, width)]


def _gpus(gpus: Sequence[Gpu], error: str, width: int) -> list[RenderableType]:
    if not gpus:
        return [Text("No NVIDIA GPU here.", "dim")]
    lost = [Text(f"GPU figures are missing: {error}", "yellow")] if error else []
    columns: list[_Column] = [
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
        columns[3:3] = [("traffic", lambda gpu: _plain(gpu.memory_utilization, ".0%"))]
    else:
        del columns[-2:]
    return [Text(), _table(columns, gpus, left=("GPU", "name", "busy", "memory")), *lost]


def _workers(workers: Sequence[Worker], width: int) -> Table:
    columns: list[_Column] = [
        ("worker", lambda worker: str(worker.number)),
        ("epoch", lambda worker: _plain(worker.now.get("epoch"))),
        ("step", lambda worker: _plain(worker.now.get("step"))),
        ("step time", lambda worker: _milliseconds(_newest(worker, "step_time_s"))),
        ("ex/s", lambda worker: _plain(_newest(worker, "examples_per_s"))),
        ("waits", lambda worker: _plain(_newest(worker, "input_wait"), ".0%")),
        ("CPU", lambda worker: _plain(worker.now.get("cpu_share"), ".0%")),
        ("memory", lambda worker: _size(worker.now.get("memory_bytes"))),
        ("J/ex", lambda worker: _plain(worker.epoch.get("energy_per_example_j"), ".3g")),
    ]
    if width < _NARROW:
        columns = [each for each in columns if each[0] in ("worker", "step", "step time", "waits")]
    if width >= _WIDE:
        columns.append(("J/epoch", lambda worker: _plain(worker.epoch.get("energy_j"))))
        columns.append(("last sample", lambda worker: _ago(worker.age_s)))
    return _table(columns, workers, left=("worker",))


def _limits(workers: Sequence[Worker]) -> list[Text]:
    """What limits the workers, grouped by resource."""
    silent = [worker for worker in workers if worker.age_s > SILENT_S]
    heard = [worker for worker in workers if worker not in silent]
    lines = []
    for resource in dict.fromkeys(worker.limit.resource for worker in heard):
        named = [worker for worker in heard if worker.limit.resource == resource]
        which = "" if len(named) == len(workers) else f"  (worker {', '.join(str(worker.number) for worker in named)})"
        lines.append(Text.assemble("limited by ", (resource, "bold yellow"), f": {named[0].limit.why}{which}"))
    if silent:
        numbers, ages = ", ".join(str(worker.number) for worker in silent), _ago(min(one.age_s for one in silent))
        lines.append(Text(f"worker {numbers}: no sample for {ages}: it has ended or hangs", "dim"))
    return lines


def _processes(view: View) -> list[RenderableType]:
    """The processes on the GPUs."""
    if not view.processes:
        return []
    columns: list[_Column] = [
        ("GPU", lambda process: str(process["gpu"])),
        ("pid", lambda process: str(process["pid"])),
        ("memory", lambda process: _size(process["bytes"])),
        ("process", lambda process: process["name"] or "(not seen from here)"),
    ]
    table = _table(columns, view.processes[:_MOST_PROCESSES], left=("GPU", "process"))
    more = len(view.processes) - _MOST_PROCESSES
    return [Text(), table, *([Text(f"and {more} more", "dim")] if more > 0 else [])]


def _table(columns: Sequence[_Column], each: Sequence[Any], left: Sequence[str]) -> Table:
    table = Table(**_STYLE)
    for title, _ in columns:
        table.add_column(title, no_wrap=True, justify="left" if title in left else "right")
    for one in each:
        is_silent = isinstance(one, Worker) and one.age_s > SILENT_S
        table.add_row(*(cell(one) for _, cell in columns), style="dim" if is_silent else "")
    return table


def _bar(share: float | None, size: int = _BAR) -> Text:
    if share is None:
        return Text("-", "dim")
    share = min(1.0, max(0.0, share))
    full = round(share * size)
    color = "green" if share < 0.6 else "yellow" if share < 0.9 else "red"
    return Text.assemble(("━" * full, color), ("─" * (size - full), "dim"), f" {share:4.0%}")


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


def _milliseconds(value: Value) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value * 1e3:.2f} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms"


def _ago(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"

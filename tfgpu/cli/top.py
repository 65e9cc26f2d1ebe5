"""`tfgpu top`: what this machine does at this moment, and how far a run is."""

import contextlib
import csv
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tfgpu.errors import InputError
from tfgpu.sensors.gpus import Gpu
from tfgpu.sensors.sampling import Sample, Sensors

app = typer.Typer()
_BAR = 10


@app.command(
    help="Show GPUs, processors, memory, disks and network as they are used now; and how far a run is.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu top\n\n"
        "tfgpu top runs/best --every 5\n\n"
        "tfgpu top --once --json  [dim]# for a script[/]"
    ),
)
def top(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run directory, whose last epoch is shown too.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line each time.")] = False,
) -> None:
    if run is not None and not (run / "config.yaml").is_file():
        raise InputError(f"{run} is no run directory: it has no config.yaml. Name one that `tfgpu train` has made.")
    console = Console(highlight=False)
    with Sensors() as sensors, contextlib.suppress(KeyboardInterrupt):
        time.sleep(min(every, 0.5))  # rates are between two readings
        if as_json:
            _print_json(sensors, run, every, once)
        elif once:
            console.print(_screen(sensors.read(), sensors.why_no_gpus, run))
        else:
            with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while True:
                    live.update(_screen(sensors.read(), sensors.why_no_gpus, run), refresh=True)
                    time.sleep(every)


def _print_json(sensors: Sensors, run: Path | None, every: float, once: bool) -> None:
    while True:
        sample = asdict(sensors.read()) | ({"run": _last_row(run)} if run else {})
        print(json.dumps(sample), flush=True)
        if once:
            return
        time.sleep(every)


def _screen(sample: Sample, why_no_gpus: str, run: Path | None) -> Group:
    parts = [_machine(sample)]
    if sample.gpus:
        parts.append(_gpus(sample.gpus))
        if any(gpu.processes for gpu in sample.gpus):
            parts.append(_processes(sample.gpus))
    else:
        parts.append(Text(f"\nNo GPU: {why_no_gpus or 'they are gone'}.", style="dim"))
    if run is not None:
        row = _last_row(run)
        words = "  ".join(f"{name} {value:.4g}" for name, value in row.items()) or "no epoch is done yet"
        parts.append(Text(f"\n{run}: {words}"))
    return Group(*parts)


def _machine(sample: Sample) -> Table:
    host = sample.host
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    share = host.memory_used_bytes / max(host.memory_bytes, 1)
    table.add_row("CPU", bar(host.cpu), f"{host.cpu:.0%} of the machine; {host.cores:g} cores may be used here")
    table.add_row("memory", bar(share), f"{size(host.memory_used_bytes)} of {size(host.memory_bytes)}")
    read, write = host.disk_read_bytes_s, host.disk_write_bytes_s
    disk = "not told" if read is None or write is None else f"{size(read)}/s read, {size(write)}/s written"
    table.add_row("disk", "", disk)
    network = f"{size(host.network_read_bytes_s)}/s in, {size(host.network_write_bytes_s)}/s out"
    table.add_row("network", "", network)
    return table


def _gpus(gpus: tuple[Gpu, ...]) -> Table:
    """Two lines a GPU: how busy it is, and what it takes."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), title=" ", title_justify="left")
    for gpu in gpus:
        busy = "-" if gpu.utilization is None else f"{bar(gpu.utilization)} {gpu.utilization:.0%}"
        memory = None
        if gpu.memory_used_bytes is not None:
            memory = f"memory {size(gpu.memory_used_bytes)} of {size(gpu.memory_bytes)}"
        power = None if gpu.power_w is None else f"{gpu.power_w:.0f} W" + _of(gpu.power_limit_w, " W")
        heat = None if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
        clock = None if gpu.clock_mhz is None else f"{gpu.clock_mhz}" + _of(gpu.clock_max_mhz, " MHz")
        read, write = gpu.pcie_read_bytes_s, gpu.pcie_write_bytes_s
        pcie = None if read is None or write is None else f"PCIe {size(read)}/s in, {size(write)}/s out"
        held = f"held back by {', '.join(gpu.slowed_by)}" if gpu.slowed_by else None
        table.add_row(f"GPU {gpu.index}", _told(busy, memory, gpu.name.removeprefix("NVIDIA ")))
        table.add_row("", _told(power, heat, clock, pcie, held))
    return table


def _told(*parts: str | None) -> str:
    return "   ".join(part for part in parts if part)


def _processes(gpus: tuple[Gpu, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=" ", title_justify="left")
    for title in ("GPU", "process", "memory", "command"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for gpu in gpus:
        for process in gpu.processes:
            held = size(process.bytes) if process.bytes else "-"
            table.add_row(str(gpu.index), str(process.pid), held, _command(process.pid))
    return table


def _command(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "(not of this machine's view)"


def _last_row(run: Path) -> dict[str, float]:
    """The newest epoch of a run: its number, metrics, and how quick it was."""
    try:
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return {name: float(value) for name, value in rows[-1].items() if value} if rows else {}
    except (OSError, ValueError, TypeError):
        return {}


def bar(part: float) -> str:
    """A bar of ten places.

    Example:
        >>> bar(0.35)
        '███▌······'
    """
    halves = round(2 * _BAR * min(1.0, max(0.0, part)))
    return ("█" * (halves // 2) + "▌" * (halves % 2)).ljust(_BAR, "·")


def size(count: float | None) -> str:
    """Bytes for a person.

    Example:
        >>> size(1536), size(80 * 2**30)
        ('1.5 KiB', '80.0 GiB')
    """
    value, unit = float(count or 0), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _of(most: float | None, unit: str) -> str:
    return f" of {most:.0f}{unit}" if most is not None else ""

"""ResNet-50 on one GPU: precisions, XLA, CUDA graphs, synthetic and JPEG input, beside a CPU and published figures.

    python -m benchmarks.gpu                       # as much as eight minutes allow, the most telling first
    python -m benchmarks.gpu --minutes 30          # continues with the rest
    python -m benchmarks.gpu --tiny                # does everything run? Also without a GPU

Each cell runs in a process of its own and is written as soon as it is measured; an interrupted run continues.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import gpu_report, machine, runner
from benchmarks.children import ROOT
from benchmarks.gpu_cells import CELLS, GRAPHS, GpuCell

_LEAST_S = 30  # less is not worth starting a cell


def measure(cell: GpuCell, *, seconds: float, repeats: int, timeout_s: float, tiny: bool) -> dict:
    """Runs a cell; "message" says why there is no figure."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment["TFGPU_REPAIR"] = "0" if cell.path == "stock" else "1"
    if cell.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if flags := GRAPHS[cell.graphs]:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    given = {"cell": asdict(cell), "began": time.time(), "seconds": seconds, "repeats": repeats, "tiny": tiny}
    command = [sys.executable, "-m", "benchmarks.gpu_peer", json.dumps(given)]
    try:
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"message": f"no answer in {timeout_s:.0f} s"}
    if ended.returncode:
        return {"message": (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1][:300]}
    return json.loads(ended.stdout.strip().splitlines()[-1])


def main(
    minutes: Annotated[float, typer.Option(help="For the whole run.")] = 8,
    seconds: Annotated[float, typer.Option(help="Of measuring, for each cell, after the first epoch.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Epochs of a cell, if the seconds suffice.")] = 9,
    cell_timeout: Annotated[float, typer.Option(help="Seconds that a cell may take in all.")] = 180,
    results: Annotated[Path | None, typer.Option("--json", help="Where to write.")] = None,
    cells: Annotated[str, typer.Option(help="Only cells with this in their name.")] = "",
    again: Annotated[bool, typer.Option(help="Measure again what the file holds.")] = False,
    tiny: Annotated[bool, typer.Option(help="A small model, on the CPU if need be; writes to build/bench.")] = False,
) -> None:
    """Measures the cells that the file lacks, as far as the time goes, and prints the table."""
    default = ROOT / "build" / "bench" / "gpu-tiny.json" if tiny else ROOT / "docs" / "measured" / "benchmarks-gpu.json"
    path, until = results or default, time.monotonic() + 60 * minutes
    code = machine.code() + (" tiny" if tiny else "")
    found = json.loads(path.read_text()) if path.exists() and not again else {}
    if found.get("code") != code:
        found = {"code": code, "tiny": tiny, "cells": {}}
    for name, cell in CELLS.items():
        if cells not in name or "images_per_s" in found["cells"].get(name, {}):
            continue
        left = until - time.monotonic()
        if left < _LEAST_S:
            typer.echo(f"no time left for {name} and what comes after; run again to continue", err=True)
            break
        row = measure(cell, seconds=seconds, repeats=repeats, timeout_s=min(cell_timeout, left), tiny=tiny)
        facts = row.pop("facts", None)
        if facts and cell.device == "gpu":
            if found.get("facts", facts)["device"] != facts["device"]:
                found["cells"] = {}  # of another GPU
            found["facts"] = facts
        found["cells"][name] = row
        runner.write(path, found)
        rate = f"{max(row['images_per_s']):,.0f} images/s at best" if "images_per_s" in row else row["message"]
        typer.echo(f"{name}: {rate}", err=True)
    typer.echo("\n".join(gpu_report.section(found)))


if __name__ == "__main__":
    typer.run(main)

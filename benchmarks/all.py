"""Measures tfgpu beside its peers, side by side in one run, and writes docs/measured/benchmarks.md.

    make bench                                    # all; an hour or two on a machine that does nothing else
    python -m benchmarks.all --works mlp --topologies one
    python -m benchmarks.all --tiny               # does everything run? A page of figures that mean nothing
    python -m benchmarks.all --report             # the page again, from the JSON

Each cell (a work on a topology) lies in a file of its own under build/bench/cells; an interrupted run continues.
"""

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import machine, plots, report, runner, startup
from benchmarks.children import ROOT, Machine
from benchmarks.peers.table import PEERS, TOPOLOGIES
from benchmarks.peers.works import WORKS

PEERS_PYTHON = ROOT / "build" / "bench" / "venv" / "bin" / "python"


def chosen(kind: str, names: str, known: dict) -> list[str]:
    """Splits "a,b" and looks the names up; nothing means all."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise typer.BadParameter(f"no {kind} is called {unknown[0]!r}; there are {', '.join(known)}")
    return wanted


def gather(run: runner.RunSettings) -> dict:
    """Puts the files of the cells together, whole or not, that were measured with these settings."""
    files = [run.folder / f"{work}-{topology}.json" for topology in TOPOLOGIES for work in WORKS]
    measured = [json.loads(path.read_text()) for path in files if path.exists()]
    cores = len(run.machine.cores)
    found = {"facts": machine.facts() | {"cores": cores, "rounds": run.rounds, "warmup": run.warmup}}
    found["cells"] = [cell for cell in measured if cell["settings"] == run.settings()]
    path = run.folder / "startup.json"
    if path.exists() and (started := json.loads(path.read_text()))["code"] == run.code:
        found["startup"] = started["commands"]
    return found


def start_up(run: runner.RunSettings) -> None:
    """Measures how long programs take to start, unless it was measured for this code."""
    path = run.folder / "startup.json"
    if not path.exists() or json.loads(path.read_text())["code"] != run.code:
        runner.write(path, {"code": run.code, "commands": startup.measure(run.machine, rounds=run.rounds)})


def publish(results: Path, gpu: Path, docs: Path) -> None:
    """Writes the page and its pictures from the JSON."""
    found = json.loads(results.read_text())
    plots.draw(found, docs / "benchmarks")
    text = report.document(found, json.loads(gpu.read_text()) if gpu.exists() else None)
    (docs / "benchmarks.md").write_text(text)


def main(
    works: Annotated[str, typer.Option(help=f"Of {', '.join(WORKS)}; all by default.")] = "",
    topologies: Annotated[str, typer.Option(help=f"Of {', '.join(TOPOLOGIES)}; all by default.")] = "",
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}; writes under build/bench/some.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds that do not.")] = 3,
    cores: Annotated[int, typer.Option(min=0, help="How many cores to use; 0: all.")] = 0,
    folder: Annotated[Path, typer.Option(help="Of the cells.")] = ROOT / "build" / "bench" / "cells",
    docs: Annotated[Path, typer.Option(help="Of the page, its JSON and its pictures.")] = ROOT / "docs" / "measured",
    gpu: Annotated[Path | None, typer.Option(help="What benchmarks/gpu.py wrote; in docs by default.")] = None,
    peers_python: Annotated[Path, typer.Option(help="Python with PyTorch and JAX.")] = PEERS_PYTHON,
    tiny: Annotated[bool, typer.Option(help="Next to no work; writes under build/bench/tiny.")] = False,
    report: Annotated[bool, typer.Option(help="Measure nothing; write the page from the JSON.")] = False,
) -> None:
    """Measures what is not measured yet, then writes the JSON, the page and the pictures."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if tiny or peers:  # Neither is what the page is about.
        folder = ROOT / "build" / "bench" / ("tiny" if tiny else "some")
        docs = folder / "docs"
    if tiny:
        rounds, warmup = min(rounds, 2), min(warmup, 1)
    results = docs / "benchmarks.json"
    if not report:
        available = tuple(sorted(os.sched_getaffinity(0)))
        here = Machine(available[: cores or None], peers_python if peers_python.exists() else None)
        only = tuple(chosen("peer", peers, PEERS)) if peers else ()
        run = runner.RunSettings(here, folder, rounds, warmup, machine.code(), only, tiny)
        start_up(run)  # first: then what the peers import is in the file system's memory for all of them
        for topology in chosen("topology", topologies, TOPOLOGIES):
            for work in chosen("work", works, WORKS):
                if runner.peers_of(topology, only):
                    runner.measure(work, topology, run)
                    runner.write(results, gather(run))
    if not results.exists():
        raise typer.BadParameter(f"there is no {results}; measure first, without --report")
    publish(results, gpu or docs / "benchmarks-gpu.json", docs)
    typer.echo(f"{docs / 'benchmarks.md'} and {results}")


if __name__ == "__main__":
    typer.run(main)

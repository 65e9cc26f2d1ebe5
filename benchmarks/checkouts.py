"""Compares the step time of this checkout with that of another: `python -m benchmarks.checkouts ../before`.

Both train the same models side by side, each in processes of its own, and take turns round by round. Printed is, for
each model and topology, the median of the rounds' ratios (this checkout over the other) with its quartiles: above 1,
this checkout is slower.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.children import ROOT, Machine, Training
from benchmarks.peers.table import OURS, PEERS, TOPOLOGIES
from benchmarks.peers.works import WORKS


def ratios(other: Path, peer: str, work: str, topology: str, rounds: int, warmup: int, tiny: bool) -> list[float]:
    """The rounds' seconds here over those there, one after the other in turn."""
    machine = Machine(tuple(sorted(os.sched_getaffinity(0))))
    trainings, found = [], []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for root in (ROOT, other.resolve()):
                log = Path(logs, f"{len(trainings)}.log")
                how = {"tiny": tiny, "log": log, "timeout_s": 600, "root": root}
                trainings.append(Training(PEERS[peer], work, TOPOLOGIES[topology], machine, **how))
                trainings[-1].hear()
            for number in range(warmup + rounds):
                order = trainings if number % 2 else trainings[::-1]
                seconds = {id(each): each.round() for each in order}
                if number >= warmup:
                    found.append(seconds[id(trainings[0])] / seconds[id(trainings[1])])
        finally:
            for each in trainings:
                each.end()
    return found


def main(
    other: Annotated[Path, typer.Argument(help="The other checkout.", exists=True, file_okay=False)],
    works: Annotated[str, typer.Option(help="Models, by comma.")] = ",".join(WORKS),
    topologies: Annotated[str, typer.Option(help="Topologies, by comma.")] = "one,mirrored-2",
    peer: Annotated[str, typer.Option(help=f"One of {', '.join(OURS)}.")] = "tfgpu-fit",
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    warmup: Annotated[int, typer.Option(min=0)] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="Next to no work: does everything run?")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write every round's ratio here.")] = None,
) -> None:
    """Prints a line for each model and topology."""
    every = {}
    for topology in topologies.split(","):
        for work in works.split(","):
            every[f"{work} on {topology}"] = found = ratios(other, peer, work, topology, rounds, warmup, tiny)
            low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
            print(f"{work:12} {topology:12} {middle:.3f} ({low:.3f} to {high:.3f}), {len(found)} rounds", flush=True)
    if as_json:
        as_json.write_text(json.dumps(every))


if __name__ == "__main__":
    typer.run(main)

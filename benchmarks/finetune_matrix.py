"""What pretrained models' families learn in every layout, against one device: a table in Markdown.

Tiny models of KerasHub with random weights; all weights or LoRA, on a float32, int8 or int4 base; three updates of
AdamW with dropout, weight decay, clipping, gradients of two batches each, and a last batch that does not divide.

python -m benchmarks.finetune_matrix                                  # runs the cells that have no result, prints all
python -m benchmarks.finetune_matrix --only "gemma; int4" --again     # runs these again; `--only` goes several times
python -m benchmarks.finetune_matrix --lanes 0                        # runs none

Results are kept in docs/measured/fine-tuning.json, so a run that was interrupted goes on. Without `--only`, the
pairs (of family, kind and layout) of which fewest cells have run come first. A process trains many cells; one that
ends or stands still is the result of its cell, and another process goes on with the rest.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import children
from tfgpu import atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "measured" / "fine-tuning.json"
FAMILIES = ("gemma", "llama3", "qwen3", "gpt2", "bert", "mixtral", "vit", "whisper")
KINDS = ("full", "LoRA", "int8 + LoRA", "int4 + LoRA")
LAYOUTS = ("mirrored 2", "2 workers", "ZeRO 3", "pipeline 2", "tensor 2", "data 2 x tensor 2")
LIMITS = "../explained/limits.md#models-over-several-devices"
REFUSALS = {"quantized": "quantized"}
"""Names of the refusals, each with words of its message; the page of limits says why."""
BOUND = 1e-5
ROUND = 24
"""Cells that run in one process before those of two workers among them."""

Cell = tuple[str, str, str]
"""Family, kind and layout."""


@dataclass
class Results:
    """Cells that have run, in a file.

    Attributes:
        path: of the file.
        cells: what each gave, by its name.
    """

    path: Path
    cells: dict[str, dict] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> None:
        if self.path.exists():
            self.cells = json.loads(self.path.read_text())["cells"]

    def add(self, cell: Cell, found: dict) -> None:
        with self._lock:
            self.cells[name_of(cell)] = found
            ordered = {name_of(each): self.cells[name_of(each)] for each in table() if name_of(each) in self.cells}
            atomic.write_text(self.path, json.dumps({"cells": ordered}, indent=1) + "\n")
            print(f"{len(ordered)} of {len(table())}: {name_of(cell)}: {shown(found)}", file=sys.stderr, flush=True)


def table() -> list[Cell]:
    """All cells."""
    return [(family, kind, layout) for family in FAMILIES for kind in KINDS for layout in LAYOUTS]


def name_of(cell: Cell) -> str:
    return "; ".join(cell)


def shown(found: dict | None) -> str:
    """The text of a table cell: the difference from one device, or why it was not measured."""
    if found is None:
        return "not run"
    if "refused" in found:
        names = [name for name, words in REFUSALS.items() if words in found["refused"].lower()]
        return f"[{names[0]}]({LIMITS})" if names else "refused"
    if "weights" not in found:
        return f"**{next(iter(found))}**"
    largest = max(found["weights"], found["logs"])
    text = f"{largest:.0e}"
    return text if largest <= max(BOUND, 2 * found.get("yardstick", 0)) else f"**{text}**"


def markdown(cells: dict[str, dict]) -> str:
    """The table: a row for each family and kind."""
    lines = [f"| family | trained | {' | '.join(LAYOUTS)} |", "|---" * (2 + len(LAYOUTS)) + "|"]
    for family in FAMILIES:
        for kind in KINDS:
            row = [shown(cells.get(name_of((family, kind, layout)))) for layout in LAYOUTS]
            lines.append(f"| {family} | {kind} | {' | '.join(row)} |")
    return "\n".join(lines)


def reference(folder: Path, family: str, kind: str) -> Path:
    """The file of what one device has learned."""
    return folder / f"{family} {kind}.npz".replace(" ", "_").replace("+", "and")


def run(cells: list[Cell], results: Results, folder: Path, timeout_s: float) -> None:
    """Trains cells in rounds: of each, all that run in one process, then those of two workers."""
    for begin in range(0, len(cells), ROUND):
        these = cells[begin : begin + ROUND]
        alone = []
        for cell in these:
            one = (*cell[:2], "one")
            if one not in alone and not reference(folder, *cell[:2]).exists():
                alone.append(one)
            alone += [cell] if cell[2] != "2 workers" else []
        _run_all(alone, 1, results, folder, timeout_s)
        _run_all([cell for cell in these if cell[2] == "2 workers"], 2, results, folder, timeout_s)


def _run_all(cells: list[Cell], count: int, results: Results, folder: Path, timeout_s: float) -> None:
    """Trains cells in as many processes, one after another, as crashes and hangs need."""
    left = list(cells)
    while left:
        folder.mkdir(parents=True, exist_ok=True)
        logs = Path(tempfile.mkdtemp(prefix=f"{left[0][0]} {left[0][1]} {count} ".replace(" ", "-"), dir=folder))
        done, began, why = _attend(_start(left, count, folder, logs), left, logs, results, timeout_s)
        stuck = began if began in left and began not in done else left[0] if not done else None
        if stuck is not None:
            _keep(stuck, {why: f"see {logs}"}, results)
            done.append(stuck)
        left = [cell for cell in left if cell not in done]


def _keep(cell: Cell, found: dict, results: Results) -> None:
    if cell[2] != "one":
        results.add(cell, found)
    elif "weights" not in found and found.keys() - {"cpu_s"}:
        print(f"{name_of(cell)}: {found}", file=sys.stderr, flush=True)


def _start(cells: list[Cell], count: int, folder: Path, logs: Path) -> list[subprocess.Popen]:
    """Starts a process for each worker, on CPUs."""
    job = json.dumps({"cells": cells, "folder": str(folder), "log": str(logs)})
    addresses = children.free_addresses(count)
    processes = []
    for rank in range(count):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "TFGPU_CACHE": "off"}
        if count > 1:
            task = {"type": "worker", "index": rank}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        with (logs / f"{rank}.log").open("w") as log:
            command = [sys.executable, "-m", "benchmarks.finetune_cells", job]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
    return processes


def _attend(
    processes: list[subprocess.Popen], cells: list[Cell], logs: Path, results: Results, timeout_s: float
) -> tuple[list[Cell], Cell | None, str]:
    """Keeps results as they come, until the processes have ended or stand still.

    Returns:
        The cells that are done, the last one that began, and `"dies"` or `"hangs"`.
    """
    done: list[Cell] = []
    seen, since, began = 0, time.monotonic(), None
    try:
        while True:
            ended = [process.poll() is not None for process in processes]
            lines = [_lines(logs / f"{rank}.jsonl") for rank in range(len(processes))]
            found = [{tuple(line["cell"]): line["found"] for line in each if "cell" in line} for each in lines]
            began = next((tuple(line["begins"]) for line in reversed(lines[0]) if "begins" in line), None)
            for cell in cells:
                if cell not in done and all(cell in each for each in found):
                    _keep(cell, _worst([each[cell] for each in found]), results)
                    done.append(cell)
            if (count := sum(map(len, lines))) > seen:
                seen, since = count, time.monotonic()
            if all(ended) or (any(ended) and len(done) < len(cells) and time.monotonic() - since > 60):
                return done, began, "dies"
            if time.monotonic() - since > timeout_s:
                return done, began, "hangs"
            time.sleep(0.5)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(path: Path) -> list[dict]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _worst(found: list[dict]) -> dict:
    """The result of several workers: an error of one of them, or the largest differences."""
    failed = [each for each in found if "refused" in each or "crashes" in each]
    return failed[0] if failed else {name: max(each[name] for each in found) for name in found[0]}


def asked(only: list[str]) -> list[Cell]:
    """The cells that a user names, in the order of the names; without a name all."""
    wanted = [[word.strip() for word in name.split(";")] for name in only] or [[]]
    found = [cell for words in wanted for cell in table() if all(any(p.startswith(w) for p in cell) for w in words)]
    return list(dict.fromkeys(found))


def pairs(cell: Cell) -> set[tuple[str, str]]:
    """Family and kind, family and layout, kind and layout."""
    return set(itertools.combinations(cell, 2))


def in_turn(cells: list[Cell], done: set[str]) -> list[Cell]:
    """Cells in an order in which pairs that have run least come first; `done` names cells that have run."""
    runs = Counter(pair for cell in table() if name_of(cell) in done for pair in pairs(cell))
    left, found = list(cells), []
    while left:
        counts = {cell: [runs[pair] for pair in pairs(cell)] for cell in left}
        found.append(min(left, key=lambda cell: (-counts[cell].count(0), sum(counts[cell]))))
        left.remove(found[-1])
        runs.update(pairs(found[-1]))
    return found


def main(
    only: Annotated[list[str], typer.Option(help="Beginnings of family, kind and layout, which `;` divides.")] = [],  # noqa: B006
    again: Annotated[bool, typer.Option(help="Also those that have a result.")] = False,
    lanes: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds for a cell.")] = 1800,
    folder: Annotated[Path, typer.Option(help="What one device learned, and logs.")] = ROOT / "build" / "finetune",
    kept: Annotated[Path, typer.Option(help="The file of the results.")] = RESULTS,
) -> None:
    """Runs cells and prints the table."""
    results = Results(kept)
    results.read()
    todo = [cell for cell in asked(only) if again or name_of(cell) not in results.cells]
    if not only:
        todo = in_turn(todo, set(results.cells))
    if lanes:
        folder.mkdir(parents=True, exist_ok=True)
        models = list(dict.fromkeys(cell[:2] for cell in todo))  # a lane trains on one device what it compares
        jobs = [[cell for cell in todo if models.index(cell[:2]) % lanes == lane] for lane in range(lanes)]
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(lambda cells: run(cells, results, folder, timeout), jobs))
    print(markdown(results.cells))


if __name__ == "__main__":
    typer.run(main)

"""Steps that wait for the slowest of N real workers, beside what `slowest_s` says of them.

python -m benchmarks.stragglers

Under `tfgpu launch -n N` each worker's step waits for a time of its own, drawn from a normal distribution; before that,
as a control, all wait the mean: what such a step takes more than one worker's is the network, and cores that are too
few. Written is docs/measured/scale/stragglers.json; `python -m benchmarks.scale` makes the page's table of it.
"""

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import launched
from benchmarks.children import ROOT
from benchmarks.scaling_model import slowest_s

RESULTS = ROOT / "docs" / "measured" / "scale" / "stragglers.json"


def train(folder: Path, seed: int, steps: int, mean_s: float, deviation_s: float) -> None:
    """Trains in one worker, and writes when each step's wait was to last how long, began and ended."""
    import tfgpu

    rank = tfgpu.Cluster.from_environment().rank
    draw, waits = random.Random(f"{seed} {rank}"), []

    def wait() -> None:
        drawn, began = max(0.0, draw.normalvariate(mean_s, deviation_s)), time.monotonic()
        time.sleep(drawn)
        waits.append((drawn, began, time.monotonic()))

    with tfgpu.strategy().scope():
        model = launched.waiting_model(wait)
    model.fit(launched.batches(steps), verbose=0)
    (folder / f"{rank}.json").write_text(json.dumps(waits))


def summary(waits: list[list[list[float]]], warmup: int) -> dict[str, float]:
    """Of one run: the mean step and the mean of the longest wait that was drawn.

    Args:
        waits: for each worker, for each step: what was drawn, when the wait began and when it ended.
        warmup: steps at the beginning that do not count; nor does the last one, whose end is not recorded.
    """
    steps = list(zip(*waits, strict=True))[warmup:]
    for before, after in zip(steps, steps[1:], strict=False):
        if min(began for _, began, _ in after) < max(ended for _, _, ended in before):
            raise SystemExit("A step began before the one before had ended on all workers: nothing was measured.")
    begun = [began for (_, began, _), *_ in steps]
    longest = [max(drawn for drawn, _, _ in step) for step in steps[:-1]]
    return {
        "step_s": (begun[-1] - begun[0]) / (len(begun) - 1),
        "longest_s": statistics.mean(longest),
        "steps": len(longest),
    }


def measure(workers: int, seed: int, steps: int, warmup: int, mean_s: float, deviation_s: float) -> dict:
    """Runs one training in real processes."""
    with tempfile.TemporaryDirectory() as name:
        folder, load = Path(name), launched.load()
        words = [__file__, "--folder", folder, "--seed", seed, "--steps", steps + warmup + 1]
        process = launched.launch(workers, *words, "--mean-s", mean_s, "--deviation-s", deviation_s, log=folder / "log")
        try:
            code = process.wait(120 + 10 * steps * mean_s)
        finally:
            launched.end(process)
        if code:
            raise SystemExit(f"{workers} workers ended with code {code}:\n{(folder / 'log').read_text()[-3000:]}")
        waits = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    return {"workers": workers, "seed": seed, **summary(waits, warmup), "load": [load, launched.load()]}


def table(results: dict) -> list[str]:
    """The rows for the page, and what they were measured on."""
    facts, runs = results["facts"], results["runs"]
    mean_s, deviation_s = facts["mean_s"], facts["deviation_s"]
    heads = ["workers", "step where all wait alike", "waiting for the slowest, modeled", "as it was drawn"]
    heads += ["step, modeled", "step, measured", "modeled / measured", "the same from one worker's step alone"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    numbers = sorted({run["workers"] for run in runs})
    alone = _mean(runs, numbers[0], "step_s", is_even=True)
    for workers in numbers:
        steps = [run["step_s"] for run in runs if run["workers"] == workers and not run["is_even"]]
        even, step = _mean(runs, workers, "step_s", is_even=True), statistics.mean(steps)
        drawn = _mean(runs, workers, "longest_s", is_even=False) - mean_s
        waits = slowest_s(mean_s, deviation_s, workers) - mean_s
        cells = [str(workers), _ms(even), _ms(waits), _ms(drawn), _ms(even + waits)]
        cells += [f"{_ms(step)} ({_ms(min(steps))} to {_ms(max(steps))})"]
        cells += [f"{(even + waits) / step:.3f}", f"{(alone + waits) / step:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    loads = [load for run in runs for load in run["load"]]
    uneven = [run for run in runs if run["workers"] == 1 and not run["is_even"]]
    text = f"{len(uneven)} repeats of {uneven[0]['steps']} steps; in brackets the fastest and the slowest repeat."
    return [*lines, "", f"{text} Load {min(loads)} to {max(loads)}. {launched.measured_on(facts)}"]


def _mean(runs: list[dict], workers: int, what: str, *, is_even: bool) -> float:
    return statistics.mean(run[what] for run in runs if run["workers"] == workers and run["is_even"] == is_even)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:z.1f} ms"


def main(
    most: Annotated[int, typer.Option(min=1, help="Workers: from 1 to so many.")] = 4,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=2, help="That count, in each repeat.")] = 200,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 20,
    mean_s: Annotated[float, typer.Option(help="Of a worker's wait in a step.")] = 0.1,
    deviation_s: Annotated[float, typer.Option(help="Of a worker's wait in a step.")] = 0.02,
    output: Annotated[Path, typer.Option(help="The figures, as JSON.")] = RESULTS,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    seed: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measures, writes the figures and prints the table."""
    if folder is not None:
        return train(folder, seed, steps, mean_s, deviation_s)
    runs = []
    for repeat in range(repeats):
        for workers in range(1, most + 1):
            for is_even in (True, False):
                seed, count = 1000 * repeat + workers, max(2, steps // 2) if is_even else steps
                run = measure(workers, seed, count, warmup, mean_s, 0.0 if is_even else deviation_s)
                runs.append({"repeat": repeat, "is_even": is_even, **run})
                print(json.dumps(runs[-1]), flush=True)
    launched.keep(output, launched.facts(mean_s=mean_s, deviation_s=deviation_s, warmup=warmup), runs, table)


if __name__ == "__main__":
    typer.run(main)

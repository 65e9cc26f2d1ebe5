"""A training that is killed repeatedly, compared with the prediction of `lost_fraction`.

python -m benchmarks.failures

`tfgpu launch -n 2` trains with `Checkpoint(every_steps=...)`; a worker is killed at exponentially distributed times.
Written are docs/measured/scale/failures.json; `python -m benchmarks.scale` makes the page's table of it.
"""

import json
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import launched
from benchmarks.children import ROOT
from benchmarks.scaling_model import lost_fraction

RESULTS = ROOT / "docs" / "measured" / "scale" / "failures.json"
ENDLESS = 1_000_000


def train(folder: Path, every: int, step_s: float) -> None:
    """Trains forever in one worker; the chief notes when each step has ended, and its number."""
    import keras

    import tfgpu

    class Notes(keras.callbacks.Callback):
        has_memory = False

        def on_train_batch_end(self, batch, logs=None):
            file.write(f"{json.dumps([time.monotonic(), os.getpid(), batch + 1])}\n".encode())

    is_chief = tfgpu.Cluster.from_environment().rank == 0
    with tfgpu.strategy().scope():
        model = launched.waiting_model(lambda: time.sleep(step_s))
    checkpoint = tfgpu.callbacks.Checkpoint(folder / "checkpoints", every_steps=every)
    with open(folder / "steps" if is_chief else os.devnull, "ab", buffering=0) as file:
        model.fit(launched.batches(ENDLESS), verbose=0, callbacks=[checkpoint, Notes()])


def summary(steps: list[list[float]], kills: list[float], every: int) -> dict[str, float]:
    """What the run did from its first kill to its last one.

    Args:
        steps: of each step that ended: when, in which process, and its number from 1.
        kills: when they were; a step of the last process follows the last of them.
        every: steps between checkpoints.
    """
    gaps, saves = [], []
    for (before, process, number), (after, same, _) in zip(steps, steps[1:], strict=False):
        if process == same:
            (saves if number % every == 0 else gaps).append(after - before)
    if not gaps:
        raise SystemExit("Too few steps between the kills: nothing was measured. Give a larger --mtbf-s.")
    step_s = statistics.mean(gaps)
    kept, restarts = [], []  # The steps that each kill leaves; how long until the next step begins, if it does.
    for at, following in zip(kills, [*kills[1:], math.inf], strict=True):
        old = {process for end, process, _ in steps if end <= at}  # The chief may still end its step.
        end, _, number = next(step for step in steps if step[0] > at and step[1] not in old)
        kept.append(number - 1)
        restarts.append(end - step_s - at if end < following else None)
    done = [restart for restart in restarts if restart is not None]
    wall_s = kills[-1] - kills[0]
    return {
        "kills": len(kills) - 1,
        "step_s": step_s,
        "interval_s": every * step_s,
        "save_s": max(0.0, statistics.mean(saves) - step_s) if saves else 0.0,
        "restart_s": statistics.mean(done),
        "restart_deviation_s": statistics.pstdev(done),
        "mtbf_s": wall_s / (len(kills) - 1),
        "wall_s": wall_s,
        "steps_once": kept[-1] - kept[0],
        "steps_run": sum(kills[0] < at < kills[-1] for at, *_ in steps),
        "useful": (kept[-1] - kept[0]) * step_s / wall_s,
        "at_s": [at - kills[0] for at in kills],
        "restarts_s": restarts,
        "kept": kept,
    }


def with_cut_restarts(run: dict) -> dict:
    """The run with a mean restart in which those that the next kill cut short count as longer than they lasted.

    Source: Kaplan and Meier, Nonparametric estimation from incomplete observations, 1958.
    """
    between = [after - before for before, after in zip(run["at_s"], run["at_s"][1:], strict=False)]
    lasted = [one if two is None else two for one, two in zip([*between, 0.0], run["restarts_s"], strict=True)]
    going_on, mean, before = 1.0, 0.0, 0.0  # The share of restarts that still go on; its area is their mean.
    for left, (end, restart) in enumerate(sorted(zip(lasted, run["restarts_s"], strict=True), key=lambda one: one[0])):
        mean, before = mean + going_on * (end - before), end
        if restart is not None:
            going_on *= 1 - 1 / (len(lasted) - left)
    return {**run, "restart_s": mean}


def modeled(run: dict, mtbf_s: float | None = None) -> float:
    """The useful share that Daly's formula says."""
    rest = {"save_s": run["save_s"], "restart_s": run["restart_s"], "mtbf_s": mtbf_s or run["mtbf_s"]}
    return 1 - lost_fraction(run["interval_s"], **rest)


def spread(run: dict, trials: int = 2000) -> float:
    """How far measured and modeled may be apart by chance: a deviation of their difference, as a share of the model's.

    So many kills are drawn for runs of which the model is true; each is held against its own time between failures.
    """
    draw, each, found = random.Random(0), run["interval_s"] + run["save_s"], []
    for _ in range(trials):
        between = [draw.expovariate(1 / run["mtbf_s"]) for _ in range(run["kills"])]
        kept = sum(max(0.0, (one - run["restart_s"]) // each) for one in between) * run["interval_s"]
        found.append(kept / sum(between) - modeled(run, statistics.mean(between)))
    return statistics.stdev(found) / modeled(run)


def measure(every: int, kills: int, mtbf_s: float, step_s: float, seed: int) -> dict:
    """Kills one training so often, after a first kill that does not count."""
    draw, found, load = random.Random(seed), [], [launched.load()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = launched.Endless(folder, __file__, "--folder", folder, "--every", every, "--step-s", step_s)
        try:
            run.wait_for_step(0.0)
            while len(found) <= kills:
                run.wait(time.monotonic() + draw.expovariate(1 / mtbf_s))
                at = run.kill(draw)
                if at is not None:  # With no process alive none can die; another time is drawn.
                    found.append(at)
                    load.append(launched.load())
            run.wait_for_step(found[-1] + 1.0)  # Half a second later both workers of the last kill are gone.
        finally:
            run.end()
        return {"every": every, **summary(run.steps(), found, every), "load": [min(load), max(load)]}


def table(results: dict) -> list[str]:
    """The rows for the page, and what they were measured on."""
    heads = ["checkpoint each", "kills", "a kill each", "restart", "a checkpoint stops training", "steps run again"]
    heads += ["useful, measured", "useful, modeled", "modeled / measured", "a deviation by chance alone"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for run in results["runs"]:
        says, again = modeled(run), run["steps_run"] - run["steps_once"]
        cells = [f"{run['every']} steps, {run['interval_s']:.1f} s", str(run["kills"]), f"{run['mtbf_s']:.1f} s"]
        cells += [f"{run['restart_s']:.1f} s ± {run['restart_deviation_s']:.1f}", f"{1000 * run['save_s']:.1f} ms"]
        cells += [f"{again} of {run['steps_run']}", f"{run['useful']:.1%}", f"{says:.1%}"]
        cells += [f"{says / run['useful']:.3f}" if run["useful"] else "-", f"{spread(run):.3f}" if says else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    loads = [load for run in results["runs"] for load in run["load"]]
    found = [(modeled(with_cut_restarts(run)), run) for run in results["runs"]]
    ratios = [f"{says / run['useful']:.3f}" for says, run in found if run["useful"]]
    text = f"With the restarts that the next kill cut short, modeled / measured: {', '.join(ratios) or '-'}."
    return [*lines, "", text, f"Load {min(loads)} to {max(loads)}. {launched.measured_on(results['facts'])}"]


def main(
    every: Annotated[list[int] | None, typer.Option(help="Steps between checkpoints; again for more runs.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="That count, of each run.")] = 25,
    mtbf_s: Annotated[float, typer.Option(help="Mean seconds between kills.")] = 60.0,
    step_s: Annotated[float, typer.Option(help="That a step waits.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the kills.")] = 0,
    output: Annotated[Path, typer.Option(help="The figures, as JSON.")] = RESULTS,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures, writes the figures and prints the table."""
    every = every or [10, 100]
    if folder is not None:
        return train(folder, every[0], step_s)
    runs = []
    for steps in every:
        runs.append(measure(steps, kills, mtbf_s, step_s, seed + steps))
        print(json.dumps(runs[-1]), flush=True)
    facts = launched.facts(planned_mtbf_s=mtbf_s, waits_s=step_s, seed=seed, restarts=launched.RESTARTS)
    launched.keep(output, facts, runs, table)


if __name__ == "__main__":
    typer.run(main)

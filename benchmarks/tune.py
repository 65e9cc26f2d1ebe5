"""A study beside the recipe that it starts from, on validation and on the held-out test: TPE and random search.

python -m benchmarks.tune --seeds 3 --trials 20

The recipe is what `model.compile("sgd")` and `model.fit` do by themselves: SGD at 0.01 without momentum, batches of
32, a constant rate; an MLP on the digits, 5 epochs. Each seed has a split, weights and draws of its own. Written is
docs/measured/tuning.json.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.children import ROOT
from benchmarks.machine import facts

RESULTS = ROOT / "docs" / "measured" / "tuning.json"
RECIPE = {
    "model": "mlp",
    "epochs": 5,
    "global_batch": 32,
    "optimizer": "sgd",
    "learning_rate": 0.01,
    "schedule": "constant",
}


def best_so_far(trials) -> list[tuple[int, float]]:
    """The lowest value up to each complete trial, by the trial's number."""
    found: list[tuple[int, float]] = []
    for trial in trials:
        if trial.value is not None:
            found.append((trial.number, min(trial.value, found[-1][1] if found else trial.value)))
    return found


def run(seed: int, sampler: str, trials: int, parallel: int) -> dict:
    """One study.

    Returns:
        Errors of the recipe's own settings and of the best, on validation and test; the best so far; its settings.
    """
    from tfgpu import tune
    from tfgpu.recipes import recipe

    what = recipe.make({**RECIPE, "seed": seed, "split_seed": seed})
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = tune.study(what, Path(folder) / "study", trials=trials, sampler=sampler, parallel=parallel, seed=seed)
    assert found.own is not None and found.own.value is not None and found.own_test_accuracy is not None
    assert found.test_accuracy is not None
    return {
        "seed": seed,
        "sampler": sampler,
        "own": {"validation": found.own.value, "test": 1 - found.own_test_accuracy},
        "best": {"validation": found.best.value, "test": 1 - found.test_accuracy},
        "settings": dict(found.best.settings),
        "best_so_far": best_so_far(found.trials),
        "ends": {status: sum(t.status == status for t in found.trials) for status in {t.status for t in found.trials}},
        "wall_s": round(time.monotonic() - begun, 1),
    }


def table(rows: list[dict]) -> str:
    """The means and spreads as Markdown."""
    lines = ["| settings | validation error | test error |", "|---|---|---|"]
    samplers = sorted({row["sampler"] for row in rows}, reverse=True)
    for which, chosen in [("own", [r for r in rows if r["sampler"] == samplers[0]])] + [
        ("best", [r for r in rows if r["sampler"] == sampler]) for sampler in samplers
    ]:
        name = "the recipe's own" if which == "own" else f"best of {chosen[0]['sampler']}"
        cells = [_spread([row[which][part] for row in chosen]) for part in ("validation", "test")]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def main(
    seeds: Annotated[int, typer.Option(help="How many: each with its own split, weights and draws.")] = 3,
    trials: Annotated[int, typer.Option(help="Of each study.")] = 20,
    parallel: Annotated[int, typer.Option(help="Trials at a time.")] = 2,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = RESULTS,
) -> None:
    """Measures, prints the table, and writes the figures."""
    rows = []
    for seed in range(seeds):
        for sampler in ("tpe", "random"):
            rows.append(run(seed, sampler, trials, parallel))
            own, best = rows[-1]["own"], rows[-1]["best"]
            print(f"seed {seed} {sampler}: {own} -> {best}, {rows[-1]['ends']}, {rows[-1]['wall_s']} s", flush=True)
            about = {"recipe": RECIPE, "trials": trials, "parallel": parallel, "machine": facts()}
            output.write_text(json.dumps({**about, "studies": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    typer.run(main)

"""Accuracy of the default recipe on the embedded digits, over seeds and splits; each run is its own process.

python benchmarks/digits.py --seeds 5
"""

import csv
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml


def measure(seed: int, folder: Path, extra: list[str]) -> tuple[float, float, float]:
    """Trains with one seed for the weights and the split; returns accuracy, seconds in all and ms a step."""
    output = folder / str(seed)
    command = [sys.executable, "-m", "tfgpu", "train", "--seed", str(seed), "--split-seed", str(seed), *extra]
    begun = time.perf_counter()
    subprocess.run([*command, "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - begun
    accuracy = yaml.safe_load((output / "config.yaml").read_text())["run"]["test_accuracy"]
    with (output / "metrics.csv").open() as file:
        steps = [float(row["step_time_s"]) for row in csv.DictReader(file)]
    return accuracy, seconds, statistics.median(steps) * 1e3


def main(
    seeds: Annotated[int, typer.Option(min=2, help="How many seeds, from 0.")] = 5,
    path: Annotated[str, typer.Option(help="fit or loop.")] = "fit",
) -> None:
    """Prints a line for each seed, then the mean and the spread."""
    print(f"{'seed':>4}  {'test accuracy':>13}  {'seconds':>7}  {'ms/step':>7}")
    accuracies = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            accuracy, seconds, step_ms = measure(seed, Path(folder), ["--path", path])
            accuracies.append(accuracy)
            print(f"{seed:>4}  {accuracy:>13.2%}  {seconds:>7.1f}  {step_ms:>7.1f}", flush=True)
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
    print(f"mean {mean:.2%}, standard deviation {spread:.2%}, lowest {min(accuracies):.2%}")


if __name__ == "__main__":
    typer.run(main)

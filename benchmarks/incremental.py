"""Ten digits in five tasks of two classes: what each method learns, and what it forgets.

python -m benchmarks.incremental --seeds 5

The model's head grows by two classes a task, and it is not told of which task an example is (class-incremental). From
the same models: the accuracy where it is told (task-incremental). It writes `digits.json` and `digits.svg` in
docs/measured/incremental.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.children import ROOT
from benchmarks.machine import facts

RESULTS = ROOT / "docs" / "measured" / "incremental" / "digits.json"
TASKS = tuple((2 * at, 2 * at + 1) for at in range(5))
METHODS = {
    "fine-tuning": {},
    "LwF": {"distill": 1.0},
    "EWC": {"elastic": 100.0},
    "replay, reservoir": {"balance": False},
    "replay, balanced": {"balance": True},
    "replay, balanced + LwF": {"balance": True, "distill": 1.0},
    "joint training": {"joint": True},
}


def tasks_of(seed: int) -> list[tuple]:
    """The digits, split by class: a fifth of each for the test; `(train_x, train_y, test_x, test_y)` of each task."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    parts = train_test_split(x, y.astype("int64"), test_size=0.2, stratify=y, random_state=seed)
    found = []
    for classes in TASKS:
        train, test = np.isin(parts[2], classes), np.isin(parts[3], classes)
        found.append((parts[0][train], parts[2][train], parts[1][test], parts[3][test]))
    return found


def first_model(classes: int):
    """An MLP with two hidden layers of 100 units, compiled with Adam."""
    import keras

    layers = [keras.layers.Dense(100, "relu"), keras.layers.Dense(100, "relu"), keras.layers.Dense(classes)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def run(method: dict, seed: int, *, epochs: int, memory: int, tasks: Sequence[tuple] | None = None) -> dict:
    """Learns the tasks one after the other.

    Returns:
        "class" and "task": the accuracies on each task after each task, by who knows the task.
    """
    import keras
    import tensorflow as tf

    from tfgpu.training import incremental

    tasks = tasks or tasks_of(seed)
    tests, known = [task[2:] for task in tasks], TASKS[: len(tasks)]
    keras.utils.set_random_seed(seed)
    replay = incremental.Replay(memory, balance=method["balance"], seed=seed) if "balance" in method else None
    elastic = incremental.ElasticWeights(method["elastic"]) if "elastic" in method else None
    model, rows = None, {"class": [], "task": []}
    for at, (x, y, _, _) in enumerate(tasks):
        old, classes = model, 2 * at + 2
        if method.get("joint"):
            x, y = (np.concatenate([task[part] for task in tasks[: at + 1]]) for part in (0, 1))
            old = None
        model = first_model(classes) if old is None else incremental.grow(old, classes)
        trained = model
        if elastic is not None and old is not None:
            elastic.attach(model)
        if "distill" in method and old is not None:
            trained = incremental.Distilled(model, old, weight=method["distill"])
            trained.compile(model.optimizer, model.loss)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed).batch(32)
        if replay is not None:
            data = replay.mix(data, share=0.5)
        trained.fit(data, epochs=epochs, verbose=0, shuffle=False)
        if replay is not None:
            replay.add(x, y)
        if elastic is not None:
            elastic.add(model, x, y)
        rows["class"].append(incremental.accuracies(model, tests))
        rows["task"].append(incremental.accuracies(model, tests, classes=known))
    return rows


def summary(runs: Sequence[dict], kind: str) -> dict:
    """Of one method's runs: means over the seeds, and their standard deviations."""
    from tfgpu.training.incremental import Accuracies

    found = [Accuracies(np.array(run[kind])) for run in runs]
    numbers = {
        "average": [each.average for each in found],
        "forgetting": [each.forgetting for each in found],
        "backward_transfer": [each.backward_transfer for each in found],
    }
    after = np.array([each.averages for each in found])
    spread = {name: (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for name, v in numbers.items()}
    return {"after": after.mean(0).tolist(), "least": min(numbers["average"]), **spread}


def table(results: dict) -> list[str]:
    """The page's table."""
    heads = ["method", *(f"after task {at + 1}" for at in range(len(TASKS)))]
    heads += ["average accuracy (sd)", "least of the seeds", "forgetting (sd)", "task known: average (sd)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in results["runs"].items():
        found, told = summary(runs, "class"), summary(runs, "task")
        cells = [name, *(f"{value:.1%}" for value in found["after"]), _spread(found["average"])]
        cells += [f"{found['least']:.1%}", _spread(found["forgetting"]), _spread(told["average"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(numbers: tuple[float, float]) -> str:
    return f"{numbers[0]:.1%} ({numbers[1]:.1%})"


def plot(results: dict, path: Path) -> None:
    """Draws the mean accuracy on the tasks seen so far, after each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "tfgpu"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, kind, title in zip(axes, ("class", "task"), ("task not known", "task known"), strict=True):
        for at, (name, runs) in enumerate(results["runs"].items()):
            values = summary(runs, kind)["after"]
            style = {"color": "black", "ls": "--"} if name == "joint training" else {"color": f"C{at}"}
            shape = {
                "marker": "os^Dv<>"[at],
                "ms": 4,
                "label": name,
            }
            places = [1 + step + 0.04 * (at - 3) for step in range(len(values))]  # else some would lie on each other
            axis.plot(places, [100 * v for v in values], **shape, **style)
        axis.set(xlabel="tasks learned, of two digits each", title=title, xticks=range(1, len(TASKS) + 1))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="accuracy on the tasks so far, %", ylim=(0, 103))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0: of splits, weights and order.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Over each task.")] = 20,
    memory: Annotated[int, typer.Option(min=1, help="Examples that replay keeps.")] = 200,
    only: Annotated[list[str] | None, typer.Option(help="Methods, by name.")] = None,
    output: Annotated[Path, typer.Option(help="The figures, as JSON; the plot lies beside it.")] = RESULTS,
) -> None:
    """Measures, writes the figures and the plot, and prints the table."""
    results = {"facts": facts() | {"epochs": epochs, "memory": memory, "seeds": seeds}, "runs": {}}
    for name in only or METHODS:
        begun = time.perf_counter()
        results["runs"][name] = [run(METHODS[name], seed, epochs=epochs, memory=memory) for seed in range(seeds)]
        found = summary(results["runs"][name], "class")
        print(f"{name}: {found['average'][0]:.1%}, {time.perf_counter() - begun:.0f} s", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, output.with_suffix(".svg"))
    print("\n".join(table(results)))


if __name__ == "__main__":
    typer.run(main)

"""Facts about a run for `config.yaml` and the report: versions, devices, sizes, times."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfgpu import environment, strategies
from tfgpu.callbacks.memory import is_peak
from tfgpu.callbacks.progress import line
from tfgpu.data import Info
from tfgpu.recipes.directory import git_commit
from tfgpu.recipes.monitored import Monitored
from tfgpu.recipes.recipe import Recipe
from tfgpu.recipes.report import Report, best_epoch


def collect(
    recipe: Recipe, *, strategy: tf.distribute.Strategy, model: keras.Model, info: Info, started: datetime
) -> dict[str, Any]:
    """Collects what is known before the first step, as plain values for YAML."""
    spread = strategies.describe(strategy)
    names = {device.name: device.description for device in environment.devices()}
    described = sorted({names[name] for name in spread["devices"] if names.get(name)})
    return {
        "started": started.isoformat(timespec="seconds"),
        "strategy": spread["kind"],
        "replicas": spread["replicas"],
        "workers": spread["workers"],
        "devices": list(spread["devices"]),
        "device_names": described or [_processor()],
        "precision": model.dtype_policy.name,
        "parameters": model.count_params(),
        "data": info.name,
        "input_shape": list(info.input_shape),
        "classes": info.classes,
        "train_examples": info.train_examples,
        "validation_examples": info.validation_examples,
        "test_examples": info.test_examples,
        "skipped_examples": info.skipped,
        "epoch_examples": info.epoch_examples,
        "cache": info.cache,
        "augment": [{name: dict(options)} for name, options in info.augment],
        "versions": versions(),
        "git_commit": git_commit(),
    }


def versions() -> dict[str, str]:
    """Returns the versions that affect a result."""
    found = {"python": platform.python_version()}
    for name in ("tfgpu", "tensorflow", "keras", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def headline(recipe: Recipe, facts: Mapping[str, Any]) -> list[str]:
    """Describes a run in two lines before it starts."""
    shape = "×".join(str(n) for n in facts["input_shape"])
    skipped = f", {facts['skipped_examples']} corrupt skipped" if facts["skipped_examples"] else ""
    counts = (
        f"{facts['train_examples']:,} training, {facts['validation_examples']:,} validation, "
        f"{facts['test_examples']:,} test"
    )
    return [
        f"{recipe.model} on {recipe.data}: {counts} examples of {shape}{skipped}",
        f"{where(facts)}, {facts['precision']}, {facts['parameters']:,} parameters, seed {recipe.seed}",
    ]


def report(
    recipe: Recipe,
    facts: Mapping[str, Any],
    *,
    rows: Sequence[Mapping[str, float]],
    accuracy: float,
    advice: Sequence[str],
    confusion: Sequence[Sequence[int]] | None,
    class_names: Sequence[str],
    monitor: Monitored | None = None,
) -> Report:
    """Arranges a finished run's facts for the report."""
    defaults = Recipe().model_dump()
    settings = {
        name: f"{_text(value)}{'' if value == defaults[name] else ' *'}" for name, value in recipe.model_dump().items()
    }
    return Report(
        title=f"{recipe.model} on {recipe.data}",
        subtitle=f"{facts['started'].replace('T', ' ')} · {where(facts)}",
        accuracy=accuracy,
        perplexity=facts.get("test_perplexity"),
        rows=rows,
        cards=_cards(recipe, facts, rows),
        facts={
            "Hardware": _hardware(facts),
            "Data": _data(facts),
            "Result": _result(facts, rows, accuracy),
            "Versions": {**facts["versions"], "git commit": facts["git_commit"] or "-"},
        },
        settings=settings,
        advice=advice,
        confusion=confusion,
        class_names=class_names,
        monitor=monitor,
    )


def _hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: facts[name] for name in ("strategy", "replicas", "workers")},
        "devices": ", ".join(facts["devices"]),
        "device names": ", ".join(facts["device_names"]),
        "precision": facts["precision"],
    }


def _data(facts: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("train_examples", "validation_examples", "test_examples", "skipped_examples", "classes")
    return {
        **{name.replace("_", " "): f"{facts[name]:,}" for name in counts},
        "input shape": " × ".join(str(n) for n in facts["input_shape"]),
        "augmentation": _text(facts["augment"]),
    }


def _result(facts: Mapping[str, Any], rows: Sequence[Mapping[str, float]], accuracy: float) -> dict[str, Any]:
    return {
        "test accuracy": f"{accuracy:.2%}",
        "test loss": f"{facts['test_loss']:.4f}",
        **({"test perplexity": f"{facts['test_perplexity']:.3f}"} if "test_perplexity" in facts else {}),
        "weights": facts["final_weights"],
        "training time": _seconds(facts["training_time_s"]),
        **_peaks(rows),
        "started": facts["started"].replace("T", " "),
        "finished": facts["finished"].replace("T", " "),
    }


def _cards(recipe: Recipe, facts: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> list[tuple[str, str, str]]:
    best = best_epoch(rows)
    step_s = statistics.median(row["step_time_s"] for row in rows)
    cards = [
        ("parameters", f"{facts['parameters']:,}", ""),
        ("training time", _seconds(sum(row["epoch_time_s"] for row in rows)), f"{len(rows)} epochs"),
        (
            "step time",
            f"{step_s * 1e3:.1f} ms",
            f"{recipe.global_batch / step_s:,.0f} examples/s" if step_s else "",
        ),
    ]
    if best and "val_perplexity" in rows[best - 1]:
        lowest = min(range(len(rows)), key=lambda at: rows[at]["val_perplexity"])
        cards.insert(0, ("best validation perplexity", f"{rows[lowest]['val_perplexity']:.2f}", f"epoch {lowest + 1}"))
    elif best and "val_accuracy" in rows[best - 1]:
        cards.insert(0, ("best validation accuracy", f"{rows[best - 1]['val_accuracy']:.1%}", f"epoch {best}"))
    return cards


def _peaks(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The peak memory over all epochs, of the host and each GPU."""
    names = dict.fromkeys(name for row in rows for name in row if is_peak(name))
    most = {name: max(row.get(name, 0) for row in rows) for name in names}
    return {"peak memory": line(most)} if most else {}


def now() -> datetime:
    """The current time, as `collect` expects it."""
    return datetime.now()


def _processor() -> str:
    """The CPU's model name, which TensorFlow does not report."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def where(facts: Mapping[str, Any]) -> str:
    """Describes a run's devices, from its facts."""
    several = f" × {facts['replicas']}" if facts["replicas"] > 1 else ""
    return f"{facts['strategy']}{several} on {', '.join(facts['devices'])} ({', '.join(facts['device_names'])})"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _text(value: Any) -> str:
    if value is None or value in ({}, (), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_text(item) for item in value)
    return str(value)

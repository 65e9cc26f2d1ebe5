"""Facts about a run for `config.yaml` and the report: versions, devices, sizes, times."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import keras

from tfgpu import environment, precision, strategies
from tfgpu.callbacks.memory import is_peak
from tfgpu.callbacks.progress import line
from tfgpu.recipes import pretrained, wording
from tfgpu.recipes.building import Job
from tfgpu.recipes.directory import git_commit
from tfgpu.recipes.heads import metric_names
from tfgpu.recipes.recipe import Recipe, shares
from tfgpu.recipes.report import Report, best_epoch


def collect(job: Job, started: datetime) -> dict[str, Any]:
    """Collects what is known before the first step, as plain values for YAML.

    Args:
        job: the run.
        started: when.
    """
    model, info, finetuned = job.model, job.data.info, job.finetuned
    spread = strategies.describe(job.strategy)
    devices = finetuned.devices if finetuned else spread["devices"]  # a pipeline's strategy has one of its devices
    names = {device.name: device.description for device in environment.devices()}
    described = sorted({names[name] for name in devices if names.get(name)})
    return {
        "started": started.isoformat(timespec="seconds"),
        "strategy": spread["kind"],
        "replicas": spread["replicas"],
        "workers": spread["workers"],
        "devices": list(devices),
        "device_names": described or [_processor()],
        "precision": model.dtype_policy.name,
        "parameters": model.count_params(),
        "data": info.name,
        "input_shape": _plain_shape(info.input_shape),
        "classes": info.classes,
        **({} if info.targets is None else {"targets": _learned(info.targets)}),
        "train_examples": info.train_examples,
        "validation_examples": info.validation_examples,
        "test_examples": info.test_examples,
        "skipped_examples": info.skipped,
        "epoch_examples": info.epoch_examples,
        "cache": info.cache,
        "augment": [{name: dict(options)} for name, options in info.augment],
        "versions": versions(),
        "git_commit": git_commit(),
        **({"pretrained": dict(finetuned.facts)} if finetuned else {}),
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
    if "pretrained" in facts:
        return _headline_of_text(recipe, facts)
    shape = shape_text(facts["input_shape"])
    skipped = f", {facts['skipped_examples']} corrupt skipped" if facts["skipped_examples"] else ""
    counts = (
        f"{facts['train_examples']:,} training, {facts['validation_examples']:,} validation, "
        f"{facts['test_examples']:,} test"
    )
    return [
        f"{recipe.model} on {recipe.data}: {counts} examples of {shape}{skipped}",
        f"{where(facts)}, {facts['precision']}, {facts['parameters']:,} parameters, seed {recipe.seed}",
    ]


def _headline_of_text(recipe: Recipe, facts: Mapping[str, Any]) -> list[str]:
    own = facts["pretrained"]
    counts = ", ".join(f"{facts[f'{part}_examples']:,} {part}" for part in ("train", "validation", "test"))
    rows = f"packed into {facts['epoch_examples']:,} rows" if own["packed"] else "one a row"
    trained = f"{own['trainable_parameters']:,} of {facts['parameters']:,} parameters"
    return [
        f"{title(recipe)}: {counts} sequences, {rows} of {own['length']:,} tokens ({own['filled']:.0%} filled), "
        f"template {own['template']}",
        f"{where(facts)}, {facts['precision']}, trains {trained}, seed {recipe.seed}",
    ]


def title(recipe: Recipe) -> str:
    """What is trained on what."""
    model = Path(recipe.preset).name if recipe.preset else recipe.model
    return f"{model} on {Path(recipe.data).name if recipe.preset else recipe.data}"


def report(
    job: Job, facts: Mapping[str, Any], rows: Sequence[Mapping[str, float]], tested: Mapping[str, float], **content: Any
) -> Report:
    """Arranges a finished run's facts for the report; `content` are further fields of `Report`."""
    recipe, metrics = job.recipe, metric_names(job.heads)
    defaults = Recipe().model_dump() | shares(recipe.data)
    settings = {
        name: f"{_text(value)}{'' if value == defaults[name] else ' *'}"
        for name, value in recipe.model_dump().items()
        if name not in pretrained.foreign(recipe)
    }
    return Report(
        title=title(recipe),
        subtitle=f"{facts['started'].replace('T', ' ')} · {where(facts)}",
        tested=tested,
        metrics=metrics,
        rows=rows,
        cards=_cards(recipe, facts, rows, metrics),
        facts={
            "Hardware": _hardware(facts),
            **({"Pretrained model": _pretrained(facts)} if "pretrained" in facts else {}),
            "Data": _data(facts),
            "Result": _result(facts, rows, tested),
            "Versions": {**facts["versions"], "git commit": facts["git_commit"] or "-"},
        },
        settings=settings,
        advice=_advice(job.model),
        class_names=job.data.info.class_names,
        **content,
    )


def _advice(model: keras.Model) -> list[str]:
    findings = precision.advice(model)
    return [f"{found.layer}: {found.dimension} = {found.size}. {found.suggestion}" for found in findings]


def _hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: facts[name] for name in ("strategy", "replicas", "workers")},
        "devices": ", ".join(facts["devices"]),
        "device names": ", ".join(facts["device_names"]),
        "precision": facts["precision"],
    }


def _data(facts: Mapping[str, Any]) -> dict[str, Any]:
    learns = facts.get("targets")
    counts = ("train_examples", "validation_examples", "test_examples", "skipped_examples")
    counts = counts if learns else (*counts, "classes")
    return {
        **{name.replace("_", " "): f"{facts[name]:,}" for name in counts},
        **({"learns": _text(learns)} if learns else {}),
        "input shape": shape_text(facts["input_shape"], " × "),
        "augmentation": _text(facts["augment"]),
    }


def _pretrained(facts: Mapping[str, Any]) -> dict[str, Any]:
    own = facts["pretrained"]
    return {
        **{name: own[name] for name in ("preset", "layout", "template")},
        "trained parameters": f"{own['trainable_parameters']:,} of {facts['parameters']:,}",
        "rows": f"{facts['epoch_examples']:,} of {own['length']:,} tokens, {own['filled']:.1%} filled",
        "sequences": "packed" if own["packed"] else "one a row",
        "logits": own["logits"],
        "learned tokens an epoch": f"{own['learned_tokens']:,}",
    }


def _result(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, float]], tested: Mapping[str, float]
) -> dict[str, Any]:
    return {
        **{wording.title(f"test_{name}"): _digits(name, number) for name, number in tested.items()},
        "weights": facts["final_weights"],
        "training time": wording.seconds(facts["training_time_s"]),
        **_peaks(rows),
        "started": facts["started"].replace("T", " "),
        "finished": facts["finished"].replace("T", " "),
    }


def _digits(name: str, number: float) -> str:
    return (
        f"{number:.2%}" if name.endswith("accuracy") else f"{number:.3f}" if name == "perplexity" else f"{number:.4f}"
    )


def _cards(
    recipe: Recipe, facts: Mapping[str, Any], rows: Sequence[Mapping[str, float]], metrics: Sequence[str]
) -> list[tuple[str, str, str]]:
    best = best_epoch(rows)
    step_s = statistics.median(row["step_time_s"] for row in rows)
    epochs = f"{len(rows)} epoch{'' if len(rows) == 1 else 's'}"
    cards = [
        ("parameters", f"{facts['parameters']:,}", ""),
        ("training time", wording.seconds(sum(row["epoch_time_s"] for row in rows)), epochs),
        ("step time", f"{step_s * 1e3:.1f} ms", f"{recipe.global_batch / step_s:,.0f} examples/s" if step_s else ""),
    ]
    if best and "val_perplexity" in rows[best - 1]:
        cards.insert(0, ("best validation perplexity", f"{rows[best - 1]['val_perplexity']:.2f}", f"epoch {best}"))
    elif best and "val_accuracy" in rows[best - 1]:
        cards.insert(0, ("best validation accuracy", f"{rows[best - 1]['val_accuracy']:.1%}", f"epoch {best}"))
    elif best:
        own = [name for name in metrics if f"val_{name}" in rows[best - 1]]
        for at, name in enumerate(own[:6]):
            number = wording.value(name, rows[best - 1][f"val_{name}"])
            cards.insert(at, (wording.title(f"val_{name}"), number, f"epoch {best}, of the lowest loss"))
    return cards


def _peaks(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The peak memory over all epochs, of the host and each GPU."""
    names = dict.fromkeys(name for row in rows for name in row if is_peak(name))
    most = {name: max(row.get(name, 0) for row in rows) for name in names}
    return {"peak memory": line(most)} if most else {}


def shape_text(shape: Any, times: str = "×") -> str:
    """A shape, or the shapes of named inputs, in a line.

    Example:
        >>> shape_text((8, 8, 1)), shape_text({"left": [4], "ids": [2]})
        ('8×8×1', 'left 4, ids 2')
    """
    if isinstance(shape, Mapping):
        return ", ".join(f"{name} {shape_text(each, times)}" for name, each in shape.items())
    return times.join(str(n) for n in shape)


def _plain_shape(shape: Any) -> Any:
    return {name: _plain_shape(each) for name, each in shape.items()} if isinstance(shape, Mapping) else list(shape)


def learned_text(targets: Any) -> str:
    """What the model learns, in a line."""
    return _text(_learned(targets))


def _learned(targets: Any) -> Any:
    """What the model learns, in words."""
    if isinstance(targets, Mapping):
        return {name: _learned(each) for name, each in targets.items()}
    if targets.kind == "class":
        return f"{targets.classes} classes"
    if targets.kind == "places":
        return f"{targets.classes or ''} classes at {shape_text(targets.shape)} places".strip()
    if targets.kind == "other":
        return "what the model's own loss takes"
    return "a number" if targets.shape in ((), (1,)) else f"{shape_text(targets.shape)} numbers"


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
    how = f"{facts['strategy']}{several}"
    layout = facts.get("pretrained", {}).get("layout", "one")
    if layout.startswith("zero"):
        how = f"{layout}, {how}"
    elif layout not in ("one", "mirrored"):
        how = layout
    return f"{how} on {', '.join(facts['devices'])} ({', '.join(facts['device_names'])})"


def _text(value: Any) -> str:
    return wording.plain(value, "; ")

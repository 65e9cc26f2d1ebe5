"""`report.html`: a run's results on one self-contained page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.ticker import FuncFormatter

from tfgpu.recipes import drawing, monitored, wording
from tfgpu.recipes.monitored import Monitored

MOST_CLASSES = 20  # larger confusion matrices are hard to read


@dataclass(frozen=True)
class Report:
    """The content of a report.

    Args:
        title: such as `"cnn on digits"`.
        subtitle: one line below it: date and devices.
        tested: the metrics on the test split by name; empty without one.
        rows: one mapping per epoch, with the columns of `metrics.csv`.
        cards: the key numbers, as (label, value, remark).
        facts: sections of the table of facts: name -> (label -> value).
        settings: the recipe.
        advice: sentences about layer sizes and Tensor Cores.
        confusion: counts [true class][predicted class], or None.
        class_names: one per row of `confusion`.
        metrics: the names of the metrics in `rows` except the loss, the main one first.
        monitor: the machines' resource use during training; None if it was not monitored.
        samples: what a language model wrote: objects with `prompt`, `expected` and `written`.
    """

    title: str
    subtitle: str
    tested: Mapping[str, float]
    rows: Sequence[Mapping[str, float]]
    cards: Sequence[tuple[str, str, str]] = ()
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    advice: Sequence[str] = ()
    confusion: Sequence[Sequence[int]] | None = None
    class_names: Sequence[str] = ()
    metrics: Sequence[str] = ("accuracy",)
    monitor: Monitored | None = None
    samples: Sequence[Any] = ()

    @property
    def score(self) -> tuple[str, str]:
        """The main score and its name: of the test, else of the last epoch's validation, else of its training."""
        order = ("perplexity", "accuracy", *self.metrics, "loss")
        if len(self.metrics) > 1 and not {"perplexity", "accuracy", "mae"} & set(self.metrics):
            order = ("loss",)  # several targets: no metric stands for all
        last = self.rows[-1] if self.rows else {}
        tested = {f"test_{name}": number for name, number in self.tested.items()}
        for numbers, prefix in ((tested, "test_"), (last, "val_"), (last, "")):
            for name in order:
                if f"{prefix}{name}" in numbers:
                    words = wording.title(f"{prefix}{name}")
                    value = wording.value(name, numbers[f"{prefix}{name}"])
                    return value, words if prefix else f"training {words}"
        return "-", "no test part"


def render(report: Report) -> str:
    """Renders the page.

    Args:
        report: its content; all text is escaped.

    Returns:
        HTML with embedded style and charts.

    Example:
        >>> "<html" in render(Report("cnn on digits", "", {"accuracy": 0.99}, rows=[{"loss": 0.1}]))
        True
    """
    template = drawing.environment().get_template("report.html.j2")
    return template.render(
        report=report,
        charts=_charts(report.rows, report.metrics),
        confusion=_confusion(report.confusion, report.class_names),
        confused=_most_confused(report.confusion, report.class_names),
        machine=monitored.shown(report.monitor) if report.monitor else None,
    )


def best_epoch(rows: Sequence[Mapping[str, float]]) -> int | None:
    """Returns the epoch (from 1) of the best validation: the lowest perplexity, highest accuracy, or lowest loss."""
    for name, sign in (("val_perplexity", 1), ("val_accuracy", -1), ("val_loss", 1)):
        values = [(sign * row[name], number) for number, row in enumerate(rows, start=1) if name in row]
        if values:
            return min(values)[1]
    return None


def _charts(rows: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> list[dict[str, Any]]:
    percent = FuncFormatter(lambda value, _: f"{value:.4g}%")
    best = best_epoch(rows)

    def both(name: str) -> dict[str, Any] | None:
        words = wording.title(name)
        labels = {name: "training", f"val_{name}": "validation"}
        style = {"scale": 100, "ticks": percent} if name.endswith("accuracy") else {}
        return drawing.chart(words[0].upper() + words[1:], rows, tuple(labels), labels=labels, best=best, **style)

    drawn = [
        *(both(name) for name in (*metrics, "loss") if name != "perplexity"),
        drawing.chart("Learning rate", rows, ("learning_rate",)),
        drawing.chart("Step time, ms", rows, ("step_time_s",), scale=1000, from_zero=True),
    ]
    return [chart for chart in drawn if chart]


def _confusion(counts: Sequence[Sequence[int]] | None, names: Sequence[str]) -> list[dict[str, Any]] | None:
    if counts is None or len(counts) > MOST_CLASSES:
        return None
    return [
        {
            "name": names[true],
            "cells": [
                {"count": count, "share": round(count / max(sum(row), 1), 3), "right": true == guess}
                for guess, count in enumerate(row)
            ],
            "recall": f"{row[true] / max(sum(row), 1):.1%}",
        }
        for true, row in enumerate(counts)
    ]


def _most_confused(counts: Sequence[Sequence[int]] | None, names: Sequence[str]) -> list[str]:
    if counts is None:
        return []
    cells = [(count, true, guess) for true, row in enumerate(counts) for guess, count in enumerate(row)]
    wrong = sorted((cell for cell in cells if cell[0] and cell[1] != cell[2]), reverse=True)
    return [f"{names[true]} taken for {names[guess]}: {count}" for count, true, guess in wrong[:5]]

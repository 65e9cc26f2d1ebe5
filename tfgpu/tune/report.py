"""`report.html` of a study, a self-contained page with all trials, the importance of settings and the best trial."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tfgpu.recipes import drawing
from tfgpu.tune.results import StudyResult, TrialResult
from tfgpu.tune.space import Choice, Domain, Range
from tfgpu.tune.spec import StudySpec

NAMES = {"val_error": "validation error", "val_loss": "validation loss"}


def render(result: StudyResult, spec: StudySpec) -> str:
    """Renders the page.

    Args:
        result: the result of the study.
        spec: its definition.

    Returns:
        Self-contained HTML; all texts are escaped.
    """
    template = drawing.environment("tfgpu.tune").get_template("study.html.j2")
    return template.render(
        title=f"{spec.recipe.model} on {spec.recipe.data}: {len(result.trials)} trials",
        monitor=NAMES.get(result.monitor, result.monitor),
        score=text_of(result.best.value, result.monitor),
        result=result,
        spec=spec,
        cards=_cards(result),
        history=_history(result),
        curves=_curves(result),
        importances=_importances(result),
        slices=[{"name": name, "svg": _slice(result, name, domain)} for name, domain in spec.space.items()],
        rows=[_row(trial, result, spec) for trial in by_value(result.trials)],
        settings=spec.space,
    )


def by_value(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Sorts trials, the best first and incomplete ones last.

    Example:
        >>> trials = [TrialResult(0, "failed", {}), TrialResult(1, "complete", {}, 0.2)]
        >>> [trial.number for trial in by_value(trials)]
        [1, 0]
    """
    largest = float("inf")
    return sorted(
        trials,
        key=lambda t: (
            largest if t.value is None else t.value,
            largest if t.val_loss is None else t.val_loss,
            t.number,
        ),
    )


def text_of(value: float | None, monitor: str) -> str:
    """Formats a value; errors in percent.

    Example:
        >>> text_of(0.0278, "val_error"), text_of(0.0278, "val_loss")
        ('2.78%', '0.0278')
    """
    if value is None:
        return ""
    return f"{value:.2%}" if monitor == "val_error" else f"{value:.4g}"


def setting_text(value: Any) -> str:
    """Formats a setting's value with few digits.

    Example:
        >>> setting_text(0.00123456), setting_text("adam")
        ('0.00123', 'adam')
    """
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def best_so_far(trials: Sequence[TrialResult]) -> list[tuple[int, float]]:
    """The lowest value up to each complete trial, by the trial's number.

    Example:
        >>> best_so_far([TrialResult(0, "complete", {}, 0.3), TrialResult(1, "complete", {}, 0.4)])
        [(0, 0.3), (1, 0.3)]
    """
    found: list[tuple[int, float]] = []
    for trial in trials:
        if trial.value is not None:
            found.append((trial.number, min(trial.value, found[-1][1] if found else trial.value)))
    return found


def _cards(result: StudyResult) -> list[tuple[str, str, str]]:
    counts = {status: sum(t.status == status for t in result.trials) for status in {t.status for t in result.trials}}
    others = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if status != "complete")
    cards = [
        ("best validation", text_of(result.best.value, result.monitor), f"trial {result.best.number}; selected by it"),
        ("its test error", _error(result.test_accuracy), "measured once, at the end"),
    ]
    if result.own and result.own_test_accuracy is not None:
        cards.append(("recipe's own settings", text_of(result.own.value, result.monitor), "validation"))
        cards.append(("their test error", f"{1 - result.own_test_accuracy:.2%}", ""))
    cards.append(("complete", f"{counts.get('complete', 0)} of {len(result.trials)}", others))
    return [*cards, ("time in trials", _time(sum(trial.time_s for trial in result.trials)), "")]


def _error(accuracy: float | None) -> str:
    return "unknown" if accuracy is None else f"{1 - accuracy:.2%}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _scaled(result: StudyResult) -> tuple[float, Any]:
    if result.monitor == "val_error":
        return 100.0, FuncFormatter(lambda value, _: f"{value:g}%")
    return 1.0, None


def _values(axes: Any, values: Sequence[float], ticks: Any) -> None:
    """Uses a logarithmic axis if values differ by more than a factor of 8."""
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        plain = ticks or FuncFormatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(plain)


def _history(result: StudyResult) -> Markup:
    scale, ticks = _scaled(result)
    figure, axes = drawing.figure()
    drawing.style(axes, ticks, label="trial")
    points = [(trial.number, trial.value * scale) for trial in result.trials if trial.value is not None]
    axes.plot(*zip(*points, strict=True), "o", color=drawing.FIRST, markersize=4)
    best = [(number, value * scale) for number, value in best_so_far(result.trials)]
    axes.plot(*zip(*best, strict=True), drawstyle="steps-post", color=drawing.SECOND, linewidth=1.8)
    _values(axes, [value for _, value in points], ticks)
    return drawing.svg(figure, salt="history")


def _curves(result: StudyResult) -> Markup:
    scale, ticks = _scaled(result)
    figure, axes = drawing.figure()
    drawing.style(axes, ticks)
    shown = [trial for trial in result.trials if trial.epochs]
    for trial in shown:
        is_best = trial.number == result.best.number
        axes.plot(
            list(trial.epochs),
            [value * scale for value in trial.epochs.values()],
            color=drawing.SECOND if is_best else drawing.FIRST,
            linewidth=2 if is_best else 1,
            alpha=1 if is_best else 0.35,
            zorder=3 if is_best else 2,
            marker="o" if len(trial.epochs) == 1 else "",
            markersize=3,
        )
    if shown:
        _values(axes, [value * scale for trial in shown for value in trial.epochs.values()], ticks)
    return drawing.svg(figure, salt="curves")


def _importances(result: StudyResult) -> Markup | None:
    if not result.importances:
        return None
    names = sorted(result.importances, key=result.importances.__getitem__)
    figure, axes = drawing.figure(4.2, 0.6 + 0.3 * len(names))
    drawing.style(axes, label="share of the spread")
    axes.barh(names, [100 * result.importances[name] for name in names], color=drawing.FIRST, height=0.6)
    axes.grid(visible=False, axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=len(names) + 1))
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    return drawing.svg(figure, salt="importances")


def _slice(result: StudyResult, name: str, domain: Domain) -> Markup:
    """Draws the complete trials over one setting; later trials are darker."""
    scale, ticks = _scaled(result)
    figure, axes = drawing.figure(3.4, 2.3)
    drawing.style(axes, ticks, label="")
    complete = [trial for trial in result.trials if trial.value is not None and name in trial.settings]
    values = [trial.value * scale for trial in complete if trial.value is not None]
    if isinstance(domain, Choice):
        labels = [setting_text(value).replace("$", r"\$") for value in domain.values]  # no formula
        places = [domain.values.index(trial.settings[name]) for trial in complete]
        slanted = sum(map(len, labels)) > 36
        axes.set_xticks(range(len(labels)), labels, rotation=35 if slanted else 0, ha="right" if slanted else "center")
        axes.set_xlim(-0.5, len(labels) - 0.5)
    else:
        places = [trial.settings[name] for trial in complete]
        _range_axis(axes, domain)
    for place, value, trial in zip(places, values, complete, strict=True):
        is_best = trial.number == result.best.number
        age = 0.3 + 0.7 * (trial.number + 1) / len(result.trials)
        color, size = (drawing.SECOND, 7) if is_best else (drawing.FIRST, 4.5)
        axes.plot([place], [value], "o", color=color, markersize=size, alpha=1 if is_best else age, zorder=2 + is_best)
    _values(axes, values, ticks)
    return drawing.svg(figure, salt=f"slice {name}")


def _range_axis(axes: Any, domain: Range) -> None:
    """Shows the whole searched range, with margins for points at its ends."""
    if domain.scale == "linear":
        room = 0.04 * (domain.high - domain.low)
        axes.set_xlim(domain.low - room, domain.high + room)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=domain.whole))
        return
    axes.set_xscale("log", base=2 if domain.scale == "powers" else 10)
    room = (domain.high / domain.low) ** 0.04
    axes.set_xlim(domain.low / room, domain.high * room)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _row(trial: TrialResult, result: StudyResult, spec: StudySpec) -> dict[str, Any]:
    return {
        "number": trial.number,
        "link": f"{trial.folder}/report.html" if trial.status in ("complete", "pruned") else "",
        "is_best": trial.number == result.best.number,
        "is_own": result.own is not None and trial.number == result.own.number,
        "value": text_of(trial.value, result.monitor),
        "status": trial.status,
        "reason": trial.reason,
        "settings": [setting_text(trial.settings.get(name, "")) for name in spec.space],
        "epochs": len(trial.epochs),
        "time": _time(trial.time_s),
    }

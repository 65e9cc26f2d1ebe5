"""Compares runs: differing settings, results, and learning curves. Imports no TensorFlow."""

import csv
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.recipes import directory, wording
from tfgpu.recipes.reading import read, read_facts
from tfgpu.recipes.wording import is_rising
from tfgpu.redact import printable

_MARK = '<meta name="generator" content="tfgpu compare">'
_TIMES = ("epoch", "epoch_time_s")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True)
class Run:
    """The content of a run directory.

    Attributes:
        name: the shortest end of its path that distinguishes it from the others.
        path: the directory.
        state: `"finished"`, `"unfinished"`, or a description of the damage.
        settings: of its recipe.
        facts: its record of devices, versions and results.
        rows: one mapping per epoch, with the columns of `metrics.csv`.
    """

    name: str
    path: Path
    state: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, float]] = ()

    @property
    def results(self) -> dict[str, float]:
        """Accuracy, loss and perplexity (test, and best validation), and speed."""
        return {**self._validated(), **self._tested(), "epochs": len(self.rows), **self._speed()}

    def _validated(self) -> dict[str, float]:
        found = {}
        names = dict.fromkeys(name for row in self.rows for name in row if name.startswith("val_"))
        for name in _main_first(names, "val_accuracy", "val_loss"):
            values = [value for row in self.rows if math.isfinite(value := row.get(name, math.nan))]
            if values:
                found[f"best {name}"] = (max if is_rising(name) else min)(values)
        return found

    def _tested(self) -> dict[str, float]:
        names = [name for name, value in self.facts.items() if name.startswith("test_") and _is_number(value)]
        names = _main_first(names, "test_accuracy", "test_loss")
        return {name: float(self.facts[name]) for name in names if name != "test_examples"}

    def _speed(self) -> dict[str, float]:
        found = {}
        if steps := [row["step_time_s"] for row in self.rows if row.get("step_time_s", 0) > 0]:
            found["step_ms"] = 1e3 * statistics.median(steps)
            if _is_number(batch := self.settings.get("global_batch")):
                found["examples/s"] = batch / statistics.median(steps)
        if times := [row["epoch_time_s"] for row in self.rows if "epoch_time_s" in row]:
            found["training_s"] = sum(times)
        return found


@dataclass(frozen=True)
class Comparison:
    """Compared runs.

    Attributes:
        runs: in the given order.
        differing: settings that differ; a value per run, None if it has no such setting.
        same: the other settings.
        about: devices, versions and commit, if they differ; a value per run.
    """

    runs: tuple[Run, ...]
    differing: Mapping[str, Sequence[Any]]
    same: Mapping[str, Any]
    about: Mapping[str, Sequence[Any]]

    def as_json(self) -> list[dict[str, Any]]:
        """Returns a mapping of plain values per run."""
        return [
            {**asdict(run), "path": str(run.path), "rows": [_finite(row) for row in run.rows], "results": run.results}
            for run in self.runs
        ]


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Reads run directories.

    Args:
        paths: the directories; a damaged run is included with a description of the damage.

    Returns:
        The common and the differing settings and results.

    Raises:
        InputError: a path does not exist or is not a run, or all runs are damaged.

    Example:
        >>> compare(["runs/a", "runs/b"])  # doctest: +SKIP
    """
    _check_runs(paths)
    places = list(dict.fromkeys(Path(os.path.abspath(path)) for path in paths))
    runs = tuple(_read(place, name) for place, name in zip(places, _names(places), strict=True))
    if not any(run.settings for run in runs):
        raise InputError(f"None of these runs can be read: {', '.join(map(str, paths))}. {runs[0].state}")
    differing, same = _split([run.settings for run in runs])
    about, _ = _split([_about(run.facts) if run.facts else {} for run in runs])
    return Comparison(runs, differing, same, about)


def _check_runs(paths: Sequence[str | Path]) -> None:
    if not paths:
        raise InputError("Pass the run directories to compare, such as runs/a runs/b.")
    missing = [str(path) for path in paths if not Path(path).is_dir()]
    if missing:
        raise InputError(f"There is no directory {', '.join(missing)}. Pass directories that `tfgpu train` created.")
    strange = [str(path) for path in paths if not (Path(path) / directory.CONFIG).is_file()]
    if strange:
        raise InputError(
            f"Not a tfgpu run: {', '.join(strange)} (no {directory.CONFIG}). Pass only directories that `tfgpu train` "
            "created."
        )


def _split(of_runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The names whose values differ among the runs that have them, with a value per run; and the other names."""
    names = dict.fromkeys(name for each in of_runs for name in each)
    values = {name: [each[name] for each in of_runs if name in each] for name in names}
    same = {name: known[0] for name, known in values.items() if all(each == known[0] for each in known)}
    return {name: [each.get(name) for each in of_runs] for name in names if name not in same}, same


def _main_first(names: Iterable[str], *main: str) -> list[str]:
    return sorted(names, key=lambda name: name not in main)


def write(comparison: Comparison, path: str | Path) -> Path:
    """Writes a self-contained page with curves, results and settings.

    Args:
        comparison: the result of `compare`.
        path: the file; an earlier comparison page is replaced.

    Raises:
        InputError: another file exists there, or it cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and _MARK not in target.read_text(encoding="utf-8", errors="replace")[:2000]:
            raise InputError(f"{target} exists and was not written by `tfgpu compare`. Choose another file.")
        atomic.write_text(target, render(comparison))
    except OSError as error:
        raise InputError(f"Cannot write {target}: {error.strerror}. Choose a file in a writable directory.") from error
    return target


def render(comparison: Comparison) -> str:
    """Renders the page as HTML; all text from the runs is escaped."""
    from tfgpu.recipes import drawing  # matplotlib, which a table on a terminal does not need

    results = dict.fromkeys(name for run in comparison.runs for name in run.results)
    best = {name: _best(name, comparison.runs) for name in results}
    template = drawing.environment().get_template("compare.html.j2")
    return template.render(
        mark=Markup(_MARK),
        runs=[
            {
                "name": run.name,
                "state": run.state,
                "color": _color(at),
                "dash": at // _COLORS % len(_DASHES),
                "results": [
                    {"text": text(name, run.results.get(name)), "best": run.results.get(name) == best[name]}
                    for name in results
                ],
                "settings": [wording.plain(values[at]) for values in comparison.differing.values()],
                "about": [wording.plain(values[at]) for values in comparison.about.values()],
            }
            for at, run in enumerate(comparison.runs)
        ],
        results=[_title(name) for name in results],
        differing=list(comparison.differing),
        about=list(comparison.about),
        same={name: wording.plain(value) for name, value in comparison.same.items()},
        charts=[chart for name in _metrics(comparison.runs) if (chart := _chart(name, comparison.runs))],
    )


def text(name: str, value: float | None) -> str:
    """Formats a result."""
    if value is None:
        return "-"
    if "accuracy" in name:
        return f"{value:.2%}"
    if name == "training_s":
        return wording.seconds(value)
    return f"{value:,.0f}" if name in ("epochs", "examples/s") else f"{value:.4g}"


def _title(name: str) -> str:
    titles = {"step_ms": "ms per step", "training_s": "training", "epochs": "epochs done"}
    return titles.get(name) or wording.title(name)


_COLORS = 10


def _color(at: int) -> str:
    """Ten colors of evenly spaced hues, readable on a light and on a dark page."""
    return f"hsl({(212 + 137.5 * (at % _COLORS)) % 360:.0f}, 62%, 52%)"


def _metrics(runs: Sequence[Run]) -> list[str]:
    """The metrics to draw: validation before training, then the rest."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row if name not in _TIMES)
    return sorted(names, key=lambda name: (not name.startswith("val_"), name in ("learning_rate", "step_time_s")))


def _chart(name: str, runs: Sequence[Run]) -> dict[str, Any] | None:
    from tfgpu.recipes import drawing

    figure, axes = drawing.figure()
    stand_ins = {}
    for at, run in enumerate(runs):
        points = [(n, row[name]) for n, row in enumerate(run.rows, start=1) if math.isfinite(row.get(name, math.nan))]
        if not points:
            continue
        stand_in = f"#fe{at:04x}"  # replaced by the legend's color below: matplotlib does not support hsl()
        stand_ins[stand_in] = _color(at)
        marker = "o" if len(points) < 3 else ""
        dash = _DASHES[at // _COLORS % len(_DASHES)]
        axes.plot(
            *zip(*points, strict=True), color=stand_in, linewidth=1.6, linestyle=dash, marker=marker, markersize=3
        )
    if not stand_ins:
        return None
    drawing.style(axes)
    drawn = drawing.svg(figure, salt=name)
    for stand_in, color in stand_ins.items():
        drawn = Markup(drawn.replace(stand_in, color))
    return {"title": _title(name), "svg": drawn}


def _best(name: str, runs: Sequence[Run]) -> float | None:
    values = [run.results[name] for run in runs if name in run.results]
    if len(values) < 2 or name in ("epochs", "training_s"):
        return None
    return max(values) if is_rising(name) or name == "examples/s" else min(values)


def _read(path: Path, name: str) -> Run:
    config = path / directory.CONFIG
    try:
        settings, facts = read(config), read_facts(config)
    except InputError as error:
        return Run(name, path, f"damaged: {error}")
    rows, damage = _rows(path / directory.METRICS)
    state = damage or ("finished" if facts.get("finished") else "unfinished")
    return Run(name, path, state, settings, facts, rows)


def _rows(path: Path) -> tuple[list[dict[str, float]], str]:
    """Returns a run's table up to the first invalid line, and a description of the damage."""
    rows: list[dict[str, float]] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    rows.append({str(k): float(v) for k, v in row.items() if v not in ("", None)})
                except (TypeError, ValueError):
                    return rows, f"damaged: {path.name} from line {number}"
    except FileNotFoundError:
        return rows, ""
    except (OSError, UnicodeDecodeError, csv.Error):
        return rows, f"damaged: {path.name} cannot be read"
    return rows, ""


def _names(places: Sequence[Path]) -> list[str]:
    """Returns the shortest path ends of equal length that differ when printed."""
    names = []
    for count in range(1, max(len(place.parts) for place in places) + 1):
        names = [str(Path(*place.parts[-count:])) for place in places]
        if len(set(map(printable, names))) == len(names):
            return names
    return [f"{name} ({at})" for at, name in enumerate(names, start=1)]


def _about(facts: Mapping[str, Any]) -> dict[str, Any]:
    versions = facts.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    return {
        "strategy": facts.get("strategy"),
        "replicas": facts.get("replicas"),
        "device names": facts.get("device_names"),
        **{name: versions.get(name) for name in ("tfgpu", "tensorflow", "keras", "python")},
        "git commit": facts.get("git_commit"),
    }


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

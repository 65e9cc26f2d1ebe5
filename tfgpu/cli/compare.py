"""`tfgpu compare`: runs side by side."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_json, option, put_json
from tfgpu.redact import printable

app = typer.Typer()
_TELLING = ("best val_accuracy", "best val_perplexity", "test_accuracy", "test_mae", "test_rmse")
_TELLING += ("epochs", "training_s", "test_perplexity")
"""The results that a terminal shows, in this order, as far as there is room; the page shows all."""
_NAME = 24
"""Most characters of a run's name."""


@app.command(
    "compare",
    cls=screen.Command,
    short_help="Compare runs side by side, or their weights one by one.",
    help="Print a table of runs, and write a page with their curves; with --json, print JSON only.",
    epilog=screen.examples(
        "tfgpu compare runs/a runs/b", "tfgpu compare runs/* --output all.html", "tfgpu compare runs/a runs/b --json"
    ),
)
def compare(
    runs: argument(list[Path], "RUN", "Run directories."),
    output: option(Path, "The page; an existing file is replaced.", "--output", "-o", metavar="FILE") = Path(
        "compare.html"
    ),
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    check_json(json_to)
    from tfgpu.recipes import compare as comparing

    found = comparing.compare(runs)
    if put_json(found.as_json(), as_json=as_json, json_to=json_to):
        return
    console = Console(highlight=False, markup=False)
    names = [printable(run.name) for run in found.runs]
    table, left = _table(found, _told_apart(names), console.width)
    console.print(table)
    for name, run in zip(names, found.runs, strict=True):
        if run.state != "finished":
            console.print(f"{name}: {printable(run.state)}")
    if left:
        console.print(f"Other settings that differ: {', '.join(left)}.")
    console.print(f"{comparing.write(found, output)}")


def _table(found: Any, names: list[str], width: int) -> tuple[Table, list[str]]:
    """The results and the differing settings that fit a width, and the names of the settings that do not."""
    from tfgpu.recipes import compare as comparing

    width -= max(map(len, names)) + 2
    results = [name for name in _TELLING if any(name in run.results for run in found.runs)]
    told = {_title(name): [comparing.text(name, run.results.get(name)) for run in found.runs] for name in results}
    columns, _, width = _fitting(told, width)
    differing = {
        name: ["-" if value is None else printable(str(value)) for value in values]
        for name, values in found.differing.items()
    }
    fitting, left, _ = _fitting(differing, width)
    table = screen.table("run", *columns, *fitting, right=list(columns))
    for row in zip(names, *columns.values(), *fitting.values(), strict=True):
        table.add_row(*row)
    return table, left


def _told_apart(names: list[str]) -> list[str]:
    """Truncates names to 24 distinct characters: at the end, else at the beginning, else with a number in front."""
    for cut in (_cut_at_end, _cut_at_beginning):
        shown = [cut(name, _NAME) for name in names]
        if len(set(shown)) == len(shown):
            return shown
    numbers = [f"{at} " for at in range(1, len(names) + 1)]
    return [number + _cut_at_beginning(name, _NAME - len(number)) for number, name in zip(numbers, names, strict=True)]


def _cut_at_end(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _cut_at_beginning(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"


def _fitting(columns: dict[str, list[str]], width: int) -> tuple[dict[str, list[str]], list[str], int]:
    """The columns that fit, the names of the others, and the remaining width."""
    fitting, left = {}, []
    for name, column in columns.items():
        needed = max(map(len, [name, *column])) + 2
        if needed <= width:
            fitting[name] = column
            width -= needed
        else:
            left.append(name)
    return fitting, left, width


def _title(name: str) -> str:
    return {"epochs": "epochs done", "training_s": "training"}.get(name, name.replace("_", " ").removeprefix("best "))

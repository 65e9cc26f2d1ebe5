"""`tfgpu compare`: runs side by side; `tfgpu compare weights`: their first difference."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_exists, check_json, option, put_json
from tfgpu.cli.start import started
from tfgpu.redact import printable

app = typer.Typer()
_TELLING = ("best val_accuracy", "best val_perplexity", "test_accuracy", "test_mae", "test_rmse")
_TELLING += ("epochs", "training_s", "test_perplexity")
"""The results that a terminal shows, in this order, as far as there is room; the page shows all."""
_NAME = 24  # most characters of a run's name


@screen.command(app, "compare")
def compare(
    runs: argument(list[Path], "RUN", "Run directories."),
    output: option(Path, "The page; an existing file is replaced.", "--output -o FILE") = Path("compare.html"),
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    """Compare runs side by side, or their weights one by one.

    Print a table of runs, and write a page with their curves; with --json, print JSON only.

    tfgpu compare runs/a runs/b
    tfgpu compare runs/* --output all.html
    tfgpu compare runs/a runs/b --json
    """
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


@screen.command(app, "compare weights")
def compare_weights(
    one: argument(Path, "A", "A run, a checkpoint, or a .keras or .weights.h5 file."),
    other: argument(Path, "B", "The same, to compare with."),
    rtol: option(float, "Allowed difference, relative to B.", "NUMBER") = 0.0,
    atol: option(float, "Allowed difference.", "NUMBER") = 0.0,
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    """Find the first difference between two runs, checkpoints or weights files.

    Compare two runs, checkpoints or weights files, and print the first difference.

    Exits with 0 if they are equal, 1 if they differ, 2 if they cannot be compared.

    tfgpu compare weights runs/a runs/b
    tfgpu compare weights run/epoch-0003 other/epoch-0003 --rtol 1e-5
    tfgpu compare weights a/model.keras b/model.keras --json
    """
    check_json(json_to)
    for path in (one, other):
        check_exists(path, "a run directory, a checkpoint, or a .keras or .weights.h5 file")
    found = started("tfgpu.checkpoint.verification").verify(one, other, rtol=rtol, atol=atol)
    if not put_json(asdict(found), as_json=as_json, json_to=json_to):
        how = "within the bound" if rtol or atol else "bit by bit"
        number = len(found.compared)
        places = f" in {number} checkpoint{'s' * (number > 1)}" if number else ""
        if found.parting is None:
            print(f"Equal {how}: {found.arrays} arrays{places}.")
        else:
            where = f"{found.parting.where}, " if found.parting.where else ""
            print(printable(f"The first difference is in {where}{found.parting.variable}: {found.parting.reason}."))
        if found.only_one:
            print(printable(f"Only one of them has {', '.join(found.only_one)}."))
    if found.parting is not None:
        raise typer.Exit(1)


def _table(found: Any, names: list[str], width: int) -> tuple[Table, list[str]]:
    """The results and the differing settings that fit a width, and the names of the settings that do not."""
    from tfgpu.recipes import compare as comparing

    results = [name for name in _TELLING if any(name in run.results for run in found.runs)]
    told = {_title(name): [comparing.text(name, run.results.get(name)) for run in found.runs] for name in results}
    columns, _, width = _fitting(told, width - max(map(len, names)) - 2)
    differing = {
        name: ["-" if value is None else printable(str(value)) for value in values]
        for name, values in found.differing.items()
    }
    fitting, left, _ = _fitting(differing, width)
    rows = zip(names, *columns.values(), *fitting.values(), strict=True)
    return screen.table(["run", *columns, *fitting], rows, right=list(columns)), left


def _told_apart(names: list[str]) -> list[str]:
    """Truncates names to 24 distinct characters: at the end, else at the beginning, else with a number in front."""
    for at_end in (True, False):
        shown = [_cut(name, _NAME, at_end=at_end) for name in names]
        if len(set(shown)) == len(shown):
            return shown
    return [f"{at} {_cut(name, _NAME - len(f'{at} '), at_end=False)}" for at, name in enumerate(names, start=1)]


def _cut(text: str, length: int, *, at_end: bool) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length - 1]}…" if at_end else f"…{text[1 - length :]}"


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

"""`tfgpu doctor`: what this machine has and lacks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfgpu.cli.start import start_tensorflow

app = typer.Typer()


@app.command(help="Look for what stops or slows training on this machine, and say how to mend it.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Also advise on the layer sizes of this model."),
    ] = None,
) -> None:
    start_tensorflow()
    from tfgpu.doctor import examine, stops_training, to_json

    with Console(stderr=True).status("looking at this machine; trying the faults of Keras takes some 20 s"):
        checks = examine(model=model)
    if as_json:
        print(to_json(checks))
    else:
        _show_checks(checks)
    if stops_training(checks):
        raise typer.Exit(1)


def _show_checks(checks: Sequence[Any]) -> None:
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("check", "status", "found"):
        table.add_column(heading, overflow="fold")
    for check in _summed_up(checks):
        fix = f"\n[bold]fix:[/] {escape(check.fix)}" if check.fix else ""
        table.add_row(escape(check.name), marks[check.status], escape(check.found) + fix)
    console = Console()
    console.print(table)
    counts = Counter(check.status for check in checks)
    if counts["problem"] or counts["warning"]:
        console.print(f"\n{counts['problem']} problem(s), {counts['warning']} warning(s).")
    else:
        console.print("\nNothing stands in the way of training.")


def _summed_up(checks: Sequence[Any]) -> list[Any]:
    """Puts the Keras repairs that need no attention into one line; `--json` has them all."""
    repairs = [check for check in checks if check.name.startswith("Keras repair") and check.status == "ok"]
    if len(repairs) < 2:
        return list(checks)
    needed = sum("needed here;" in check.found for check in repairs)
    text = f"{needed} of {len(repairs)} faults are in this Keras; tfgpu.strategy() mends them (--json lists them)"
    at = checks.index(repairs[0])
    kept = [check for check in checks if check not in repairs]
    return [*kept[:at], replace(repairs[0], name="Keras repairs", found=text), *kept[at:]]

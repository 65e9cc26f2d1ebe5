"""`tfgpu verify`: where two runs part."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tfgpu.redact import printable

app = typer.Typer()


@app.command(
    help="Compare two runs, checkpoints or files of weights, and print where they part.",
    epilog=(
        "Exits with 0 if they are equal, 1 if they differ, 2 if they cannot be compared.\n\n"
        "[bold]Examples[/]\n\n"
        "tfgpu verify runs/a runs/b\n\n"
        "tfgpu verify run/epoch-0003 other/epoch-0003 --rtol 1e-5\n\n"
        "tfgpu verify a/model.keras b/model.keras --json"
    ),
)
def verify(
    one: Annotated[Path, typer.Argument(metavar="A", help="A run, a checkpoint, or a .keras or .weights.h5 file.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="The same, to compare with.")],
    rtol: Annotated[float, typer.Option(metavar="NUMBER", help="Allowed difference, relative to B.")] = 0.0,
    atol: Annotated[float, typer.Option(metavar="NUMBER", help="Allowed difference.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from tfgpu.checkpoint import verification

    found = verification.verify(one, other, rtol=rtol, atol=atol)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        how = "within the bound" if rtol or atol else "bit by bit"
        number = len(found.compared)
        places = f" in {number} checkpoint{'s' * (number > 1)}" if number else ""
        if found.parting is None:
            print(f"Equal {how}: {found.arrays} arrays{places}.")
        else:
            where = f"{found.parting.where}, " if found.parting.where else ""
            print(printable(f"They part at {where}{found.parting.variable}: {found.parting.reason}."))
        if found.only_one:
            print(printable(f"Only one of them has {', '.join(found.only_one)}."))
    if found.parting is not None:
        raise typer.Exit(1)

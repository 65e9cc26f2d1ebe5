"""`tfgpu compare weights`: the first difference between two runs."""

from dataclasses import asdict
from pathlib import Path

import typer

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_exists, check_json, option, put_json
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.redact import printable

app = typer.Typer()


@app.command(
    "compare weights",
    cls=screen.Command,
    short_help="Find the first difference between two runs, checkpoints or weights files.",
    help="Compare two runs, checkpoints or weights files, and print the first difference.",
    epilog=screen.examples(
        "tfgpu compare weights runs/a runs/b",
        "tfgpu compare weights run/epoch-0003 other/epoch-0003 --rtol 1e-5",
        "tfgpu compare weights a/model.keras b/model.keras --json",
        before="Exits with 0 if they are equal, 1 if they differ, 2 if they cannot be compared.",
    ),
)
def compare_weights(
    one: argument(Path, "A", "A run, a checkpoint, or a .keras or .weights.h5 file."),
    other: argument(Path, "B", "The same, to compare with."),
    rtol: option(float, "Allowed difference, relative to B.", metavar="NUMBER") = 0.0,
    atol: option(float, "Allowed difference.", metavar="NUMBER") = 0.0,
    as_json: AsJson = False,
    json_to: JsonTo = None,
) -> None:
    check_json(json_to)
    for path in (one, other):
        check_exists(path, "a run directory, a checkpoint, or a .keras or .weights.h5 file")
    start_tensorflow()
    verification = imported("tfgpu.checkpoint.verification")
    found = verification.verify(one, other, rtol=rtol, atol=atol)
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

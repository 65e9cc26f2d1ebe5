"""The batch-size search on the built-in digits recipe: the table of tries.

python -m benchmarks.batch_size --searches 3

Each search tries every batch in a process of its own, with `rounds` measurements; the searches say what a whole one is
worth, since a machine that others use is another one a minute later. Written is docs/measured/batch-size.json.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.children import ROOT
from benchmarks.machine import facts

RESULTS = ROOT / "docs" / "measured" / "batch-size.json"


def table(searches: list[dict]) -> str:
    """A row a batch: the median over searches of their medians, the slowest and fastest round, as Markdown."""
    lines = [
        "| batch | examples/s | lowest to highest | step, ms | peak memory, GB | fastest in |",
        "|---|---|---|---|---|---|",
    ]
    for at, first in enumerate(searches[0]["tries"]):
        tries = [search["tries"][at] for search in searches]
        assert all(one["fits"] and one["batch"] == first["batch"] for one in tries)
        rate = statistics.median(one["examples_per_s"] for one in tries)
        low, high = min(one["spread"][0] for one in tries), max(one["spread"][1] for one in tries)
        memory = max(one["memory_bytes"] for one in tries) / 1e9
        chosen = sum(search["fastest"] == first["batch"] for search in searches)
        cells = [
            f"{first['batch']:,}",
            f"{rate:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            f"{first['batch'] / rate * 1e3:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} | {memory:.2f} | {chosen} of {len(searches)} |")
    return "\n".join(lines)


def main(
    searches: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each batch.")] = 5,
    recipe: Annotated[str, typer.Option(help="A built-in recipe or a file.")] = "digits",
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = RESULTS,
) -> None:
    """Measures, prints the table, and writes the figures."""
    from tfgpu import tune

    found = []
    for number in range(searches):
        result = tune.batch_size(recipe, rounds=rounds)
        found.append(result.as_json())
        settings = dict(result.settings)
        took = sum(one.time_s for one in result.tries)
        print(
            f"search {number}: largest {result.largest}, fastest {result.fastest}, {settings}, {took:.0f} s", flush=True
        )
        about = {"recipe": recipe, "rounds": rounds, "machine": facts()}
        output.write_text(json.dumps({**about, "searches": found}, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    typer.run(main)

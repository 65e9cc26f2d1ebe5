"""Runs the commands that a page of docs/measured names, and puts the tables that they print into it.

A page has each table between marks, the first of which is the command:

    <!-- python -m benchmarks.range_test --seeds 3 -->
    ...
    <!-- end -->

python -m benchmarks.measured docs/measured/tuning.md                      # every table of the page
python -m benchmarks.measured docs/measured/tuning.md --only range_test    # of the commands with this word
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- (python -m benchmarks\.\S[^\n]*?) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, printed: Callable[[str], str], only: str = "") -> str:
    """Returns a page with new tables.

    Args:
        page: its text.
        printed: what a command prints.
        only: a word of the commands to run; the other tables stay.

    Raises:
        ValueError: no command of the page has that word, or a command prints no table.

    Example:
        >>> filled("<!-- python -m benchmarks.x -->\\nold\\n<!-- end -->", lambda command: "seed 1\\n| new |\\n")
        '<!-- python -m benchmarks.x -->\\n| new |\\n<!-- end -->'
    """
    if not any(only in command for command in MARKED.findall(page)):
        raise ValueError(f"The page must name a command with `{only}`. It names: {MARKED.findall(page)}.")

    def again(found: re.Match) -> str:
        command = found[1]
        return f"<!-- {command} -->\n{tables(printed(command), command)}\n<!-- end -->" if only in command else found[0]

    return MARKED.sub(again, page)


def tables(text: str, command: str) -> str:
    """The tables of an output, with their titles in bold: the other lines are for who waits."""
    lines = [line for line in text.splitlines() if line.startswith(("|", "**")) or not line.strip()]
    if not any(line.startswith("|") for line in lines):
        raise ValueError(f"`{command}` must print a table in Markdown. It printed: {text[-500:]}")
    return "\n".join(lines).strip()


def _run(command: str) -> str:
    words = [sys.executable, *shlex.split(command)[1:]]
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def main(
    page: Annotated[Path, typer.Argument(help="A page of docs/measured.")],
    only: Annotated[str, typer.Option(help="Run only the commands that contain this.")] = "",
) -> None:
    """Runs a page's commands and writes their tables into it."""
    page.write_text(filled(page.read_text(), _run, only))


if __name__ == "__main__":
    typer.run(main)

"""Pages of docs/measured get their tables from the commands that they name."""

import importlib.util
import shlex
from pathlib import Path

import pytest

from benchmarks import finetune_plans, measured

PAGES = sorted((measured.ROOT / "docs" / "measured").glob("*.md"))
PAGE = """# A page

<!-- python -m benchmarks.one --repeats 2 -->
| old |
<!-- end -->

Between.

<!-- python -m benchmarks.two -->
| old |
<!-- end -->
"""


def test_each_table_is_what_its_command_prints():
    printed = {
        "python -m benchmarks.one --repeats 2": "warming up\n\n**one**\n\n| 1 |\n",
        "python -m benchmarks.two": "| 2 |",
    }
    new = measured.filled(PAGE, printed.__getitem__)
    assert new.count("| old |") == 0 and "\nBetween.\n" in new
    assert "<!-- python -m benchmarks.one --repeats 2 -->\n**one**\n\n| 1 |\n<!-- end -->" in new
    assert measured.filled(new, printed.__getitem__) == new


def test_other_tables_stay():
    new = measured.filled(PAGE, lambda command: "| new |", only="two")
    assert new.count("| old |") == 1 and new.index("| old |") < new.index("| new |")


def test_what_prints_no_table_is_an_error():
    with pytest.raises(ValueError, match="benchmarks.two` must print a table"):
        measured.filled(PAGE, lambda command: "seed 0: 0.5", only="two")
    with pytest.raises(ValueError, match="must name a command with `three`"):
        measured.filled(PAGE, lambda command: "| new |", only="three")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_are_there(page: Path):
    for command in measured.MARKED.findall(page.read_text()):
        assert importlib.util.find_spec(shlex.split(command)[2]), command


@pytest.mark.slow
def test_the_plans_are_those_of_the_planner(capsys):
    page = (measured.ROOT / "docs" / "measured" / "fine-tuning.md").read_text()

    def printed(command):
        assert command == "python -m benchmarks.finetune_plans"
        finetune_plans.main()
        return capsys.readouterr().out

    filled = measured.filled(page, printed, only="finetune_plans")
    assert filled == page, "python -m benchmarks.measured docs/measured/fine-tuning.md"

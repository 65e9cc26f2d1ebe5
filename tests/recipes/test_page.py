"""The page's table of settings matches the schema. `python tests/recipes/test_page.py` rewrites it."""

import re
import sys
from pathlib import Path

from tfgpu.recipes.recipe import Recipe, choices

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "recipes.md"
HEADING = "## Every line\n"


def default(name, field):
    if field.default is None or field.default in ({}, ()):
        return ""
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{', '.join(field.default)}`" if isinstance(field.default, tuple) else f"`{field.default}`"


def table() -> str:
    """One section per panel of `tfgpu train --help`, one row per setting."""
    panels: dict[str, list[str]] = {}
    for name, field in Recipe.model_fields.items():
        names = ", ".join(f"`{choice}`" for choice in choices(name))
        text = field.description + (f" One of {names}." if names else "")
        row = f"| `{name}` | {default(name, field)} | {text.replace('|', chr(92) + '|')} |"
        panels.setdefault(field.json_schema_extra["panel"], []).append(row)
    head = "| line | default | what it says |\n|---|---|---|\n"
    return "\n".join(f"### {panel}\n\n{head}" + "\n".join(rows) + "\n" for panel, rows in panels.items())


def test_the_page_has_every_setting_as_the_schema_says_it():
    assert PAGE.read_text().partition(HEADING)[2].strip() == table().strip(), "python tests/recipes/test_page.py"


def test_every_schedule_and_recipe_is_on_the_page():
    from tfgpu.recipes import ready

    rows = set(re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text().partition(HEADING)[0], re.MULTILINE))
    assert rows - {"schedule"} == {*choices("schedule"), *ready.names()}  # but for the head of the table


if __name__ == "__main__":
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(f"{before}{HEADING}\n{table()}")
    sys.exit()

"""The reference has every setting of a recipe, and the guide every recipe and schedule."""

import re
import sys
from pathlib import Path

from tfgpu.recipes.recipe import Recipe, choices

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `([\w-]+)` \|", re.MULTILINE)


def test_the_reference_has_a_row_for_every_setting(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS / "site"), *sys.path])
    import recipe_settings

    page = recipe_settings.page()
    assert ROW.findall(page) == sorted(Recipe.model_fields, key=ROW.findall(page).index)
    assert "| `global_batch` | `32` | Examples per step, over all replicas together. |" in page
    assert "| `recompute` | `false` |" in page and "One of `auto`, `all`, `kernels`. |" in page


def test_every_schedule_and_recipe_is_on_the_page():
    from tfgpu.recipes import ready

    rows = set(ROW.findall((DOCS / "guides" / "recipes.md").read_text()))
    assert rows - {"schedule"} == {*choices("schedule"), *ready.names()}  # but for the head of the table

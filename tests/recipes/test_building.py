"""What a run sets before it builds anything. `tests/test_cli.py` has whole runs."""

import dataclasses
import re
from pathlib import Path

import pytest
import tensorflow as tf

from tfgpu.recipes import building
from tfgpu.recipes.recipe import Recipe


@pytest.mark.parametrize("settings, expected", [({}, []), ({"deterministic": True}, ["asked"])], ids=["off", "on"])
def test_only_the_flag_asks_for_deterministic_operations(monkeypatch, settings, expected):
    asked = []  # the real function cannot be undone in this process
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: asked.append("asked"))
    building.prepare(Recipe(seed=1, **settings))
    assert asked == expected


def test_who_builds_a_job_uses_only_what_it_has():
    """`make test` runs none of the commands that train with it in another process."""
    fields = {field.name for field in dataclasses.fields(building.Job)}
    texts = [path.read_text() for path in Path(building.__file__).parents[1].rglob("*.py")]
    used = {name for text in texts if "building.build(" in text for name in re.findall(r"\bjob\.(\w+)", text)}
    assert {"model", "data"} <= used <= fields

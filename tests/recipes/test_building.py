"""What a run sets before it builds anything. `tests/test_cli.py` has whole runs."""

import dataclasses
import re
from pathlib import Path

import pytest
import tensorflow as tf

import tfgpu
from tfgpu.attention import asked
from tfgpu.recipes import building
from tfgpu.recipes.recipe import Recipe


@pytest.mark.parametrize("settings, expected", [({}, []), ({"deterministic": True}, ["asked"])], ids=["off", "on"])
def test_only_the_flag_asks_for_deterministic_operations(monkeypatch, settings, expected):
    calls = []  # the real function cannot be undone in this process
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: calls.append("asked"))
    with building.prepare(Recipe(seed=1, **settings)):
        assert calls == expected


def test_flash_attention_is_enabled_for_the_run_alone():
    tfgpu.repair_keras()
    with building.prepare(Recipe(seed=1, flash_attention=True)):
        assert asked.is_enabled()
    assert not asked.is_enabled()


def test_who_builds_a_job_uses_only_what_it_has():
    """`make test` runs none of the commands that train with it in another process."""
    fields = {field.name for field in dataclasses.fields(building.Job)}
    texts = [path.read_text() for path in Path(building.__file__).parents[1].rglob("*.py")]
    used = {name for text in texts if "building.build(" in text for name in re.findall(r"\bjob\.(\w+)", text)}
    assert {"model", "data"} <= used <= fields

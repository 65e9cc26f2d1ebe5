"""What a run sets before it builds anything. `tests/test_cli.py` has whole runs."""

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

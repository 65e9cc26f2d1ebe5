"""What a run sets before it builds anything. `tests/test_cli.py` has whole runs."""

import pytest
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.recipes import building
from tfgpu.recipes.recipe import Recipe


@pytest.mark.parametrize("settings, expected", [({}, []), ({"deterministic": True}, ["asked"])], ids=["off", "on"])
def test_only_the_flag_asks_for_deterministic_operations(monkeypatch, settings, expected):
    asked = []  # the real function cannot be undone in this process
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: asked.append("asked"))
    building.prepare(Recipe(seed=1, **settings))
    assert asked == expected


def test_numbers_to_predict_are_named_before_a_model_is_built(tmp_path):
    pytest.importorskip("pyarrow")
    rows = "".join(f"{n},{n / 7}\n" for n in range(60))
    (tmp_path / "prices.csv").write_text("a,price\n" + rows)
    what = Recipe(seed=1, data=f"{tmp_path}/prices.csv#price", model="mlp", strategy="one_device", global_batch=8)
    with pytest.raises(InputError, match="numbers to predict. Train on it in Python"):
        building.build(what, Cluster())

"""Activity regularizers: the seam that a repair of older Keras uses. `tests/versions` trains with that Keras."""

import subprocess
import sys

import pytest

from tfgpu import repairs
from tfgpu.compat import versions

SCRIPT = """
import keras, numpy as np
from tfgpu.compat import layers, patch

before = keras.layers.Dense(1, activity_regularizer="l2")
in_a_step = [True]


def change(regularizer):
    return (lambda value: 10 * regularizer(value)) if in_a_step else regularizer


value = layers.changed_activity_regularizer(change)
patch.replace("Layer.activity_regularizer", value, by="a test", is_new=True)
after = keras.layers.Dense(1, activity_regularizer="l2")
handed_on = keras.layers.Dense(1, activity_regularizer=after.activity_regularizer)
without = keras.layers.Dense(1)
for layer in (before, after, handed_on, without):
    layer.build((None, 1))
    layer.set_weights([np.ones((1, 1)), np.zeros(1)])
    layer(np.ones((1, 1), "float32"))
assert [[round(float(loss), 5) for loss in layer.losses] for layer in (before, after, handed_on)] == 3 * [[0.1]]
assert without.losses == [] and without.activity_regularizer is None
in_a_step.clear()
assert keras.layers.Dense.from_config(after.get_config()).get_config() == after.get_config()
assert [(found.target, found.by) for found in patch.installed()] == [("Layer.activity_regularizer", "a test")]
"""


@pytest.mark.slow
def test_what_a_layer_calls_is_changed_and_what_it_keeps_is_not():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_repair_of_older_versions_is_not_applied_in_others():
    listed = {repair.name for repair in repairs.all_repairs()}
    assert ("activity-sums" in listed) == versions.is_at_most("keras", "3.13")

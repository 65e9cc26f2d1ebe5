"""Frozen layers keep their weights and optimizer state, and steps that are already traced see the change."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.training import incremental

X, Y = np.ones((8, 5), "float32"), np.ones((8, 3), "float32")


def model_of(optimizer="adam", eager=True):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name=name) for name in "ab"]
    inner = keras.Sequential([keras.Input((5,)), *layers], name="inner")
    model = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(3, name="head")])
    model.compile(optimizer, "mse", run_eagerly=eager)
    return model


def moved(model, before):
    return [not np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True)]


def test_a_traced_step_hears_of_it_and_the_slots_stay():
    model = model_of(eager=False)
    model.fit(X, Y, verbose=0)
    before, slots = model.get_weights(), {v.path: v.numpy() for v in model.optimizer.variables}
    assert incremental.freeze(model, "inner/a") == ["inner/a"]
    model.fit(X, Y, verbose=0)
    assert moved(model, before) == [False, False, True, True, True, True]
    incremental.unfreeze(model)
    after = {v.path: v.numpy() for v in model.optimizer.variables}
    frozen = [path for path in slots if "_a_" in path]
    assert len(frozen) == 4 and all(np.array_equal(slots[path], after[path]) for path in frozen)
    assert all(v.trainable for v in model.weights)


@pytest.mark.parametrize("averages", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_optimizer_that_never_saw_a_layer_learns_of_it(averages):
    make = keras.optimizers.Adam(0.01, use_ema=averages)
    model = model_of(make)
    incremental.freeze(model, "inner")
    model.fit(X, Y, verbose=0)
    known = {v.path.split("/")[-1]: v.numpy() for v in model.optimizer.variables}
    assert len(known) == (8 if averages else 6)
    incremental.unfreeze(model, "b")  # of a model that was frozen as a whole
    assert [v.trainable for v in model.weights] == [False, False, True, True, True, True]
    for variable in model.optimizer.variables:
        if "head" in variable.path or "iteration" in variable.path:
            assert np.array_equal(variable.numpy(), known[variable.path.split("/")[-1]])
    before = model.get_weights()
    model.fit(X, Y, verbose=0)
    assert moved(model, before) == [False, False, True, True, True, True]


def test_what_is_not_there_is_named():
    with pytest.raises(tfgpu.InputError, match="No layer matches 'conv\\*'.*inner/a"):
        incremental.freeze(model_of(), "conv*")
    with pytest.raises(tfgpu.InputError, match="needs the names"):
        incremental.freeze(model_of())

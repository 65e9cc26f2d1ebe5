"""Learning rates per layer equal one optimizer per layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.training import incremental

OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
    "adam": lambda rate: keras.optimizers.Adam(rate),
    "adamw": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.3),
    "rmsprop": lambda rate: keras.optimizers.RMSprop(rate, momentum=0.5, weight_decay=0.1),
    "lion": lambda rate: keras.optimizers.Lion(rate),
    "adagrad": lambda rate: keras.optimizers.Adagrad(rate),
    "nadam": lambda rate: keras.optimizers.Nadam(rate),
    "lamb": lambda rate: keras.optimizers.Lamb(rate),
    "muon": lambda rate: keras.optimizers.Muon(rate, exclude_layers=["head"], weight_decay=0.2),
    "averages": lambda rate: keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}


def two_layers():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(3, name="head")]
    return keras.Sequential([keras.Input((5,)), *layers])


def steps(optimizer, variables, at, gradients):
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient[i]) for i in at], variables)


QUICK = ("adamw", "muon", "averages")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_equals_an_optimizer_for_each_group(name):
    random = np.random.default_rng(1)
    model, expected = two_layers(), two_layers()
    gradients = [[random.normal(size=v.shape).astype("float32") for v in model.weights] for _ in range(5)]
    optimizer = incremental.discriminative(OPTIMIZERS[name](0.01), model, {"bo*": 0.2})
    steps(optimizer, model.weights, range(4), gradients)
    for at, rate in (((0, 1), 0.002), ((2, 3), 0.01)):
        steps(OPTIMIZERS[name](rate), [expected.weights[i] for i in at], at, gradients)
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        assert np.allclose(a, b, rtol=0, atol=1e-6)
    plain = two_layers()
    steps(OPTIMIZERS[name](0.01), plain.weights, range(4), gradients)
    assert not np.allclose(plain.get_weights()[0], model.get_weights()[0], atol=1e-4)


def test_schedules_files_and_the_rate_that_is_set(tmp_path):
    model = two_layers()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.AdamW(schedule)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(incremental.discriminative(optimizer, model, {"body": 0.5}), "mse")
    x, y = np.ones((4, 5)), np.ones((4, 3))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [loaded.optimizer.factor_of(v) for v in loaded.weights] == [0.5, 0.5, 1, 1]  # whose paths are others now
    grown = incremental.grow(loaded, 4)
    assert [grown.optimizer.factor_of(v) for v in grown.weights] == [0.5, 0.5, 1, 1]
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.05)
    again = incremental.discriminative(loaded.optimizer, loaded, {"head": 3.0})
    assert [again.factor_of(v) for v in loaded.weights] == [1, 1, 3, 3]
    assert int(again.iterations) == 1
    assert all(
        np.array_equal(a.numpy(), b.numpy()) for a, b in zip(again.variables, loaded.optimizer.variables, strict=True)
    )
    plain = incremental.discriminative("sgd", model, {"body": 0.5})
    plain.learning_rate = 0.25
    assert float(plain.learning_rate) == 0.25


def test_by_depth_is_ulmfit_s():
    model = two_layers()
    assert incremental.by_depth(model) == pytest.approx({"body": 1 / 2.6, "head": 1})


def test_invalid_input_is_named():
    model = two_layers()
    with pytest.raises(tfgpu.InputError, match="No layer matches 'tail'.*body, head"):
        incremental.discriminative("adam", model, {"tail": 0.1})
    for factors in ({"body": -1}, {"body": "fast"}, {}):
        with pytest.raises(tfgpu.InputError):
            incremental.discriminative("adam", model, factors)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras up to 3.14 has no MultiOptimizer")
def test_several_optimizers_are_refused():
    model = two_layers()
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))
    with pytest.raises(tfgpu.InputError, match="MultiOptimizer"):
        incremental.discriminative(several, model, {"body": 0.1})

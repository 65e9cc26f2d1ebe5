"""Optimizers that look at whole variables, under ZeRO: variables are dealt to owners; the result is one device's."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_sharded_optimizer import (
    Halving,
    Normed,
    NormedTogether,
    build,
    cnn,
    fit,
    made,
    mlp,
    on,
    slots,
    words,
)

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.core.state import sharded_variable
from tfgpu.parallel import memory_by_device, shard
from tfgpu.parallel.zero import dealing, optimizer_kinds
from tfgpu.parallel.zero.optimizer_kinds import Sees
from tfgpu.training.optimizers import LARS


def several(rate, **options):
    """Muon for matrices and AdamW for the rest, as two optimizers."""
    matrices, rest = keras.optimizers.Muon(rate, **options), keras.optimizers.AdamW(rate, **options)
    return keras.optimizers.MultiOptimizer(lambda variable: matrices if len(variable.shape) == 2 else rest)


class Counting(Normed):
    """By each variable's norm, and slower with every variable that it has updated."""

    def build(self, variables):
        super().build(variables)
        self.count = self.add_variable((), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(self.count, 1.0)
        super().update_step(gradient, variable, learning_rate / (1.0 + self.count))


KINDS = {
    "muon": keras.optimizers.Muon,
    "lamb": keras.optimizers.Lamb,
    "adafactor": keras.optimizers.Adafactor,
    "lars": lambda rate, **options: LARS(100 * rate, **options),
    "several": several,
    "normed": Normed,
    "together": NormedTogether,
    "counting": Counting,
}
CASES = {
    "muon": {"kind": "muon"},
    "muon, clipped": {"kind": "muon", "make": words, "global_clipnorm": 0.1, "use_ema": True},
    "muon, overwritten": {"kind": "muon", "clipnorm": 0.1, "use_ema": True, "ema_overwrite_frequency": 3},
    "muon, accumulation": {"kind": "muon", "gradient_accumulation_steps": 3, "global_clipnorm": 0.1},
    "lamb": {"kind": "lamb", "make": cnn, "weight_decay": 0.1},
    "lamb, words": {"kind": "lamb", "make": words},
    "lamb, accumulation": {"kind": "lamb", "make": words, "gradient_accumulation_steps": 2, "use_ema": True},
    "adafactor": {"kind": "adafactor", "make": cnn, "clipnorm": 0.1},
    "adafactor, accumulation": {"kind": "adafactor", "gradient_accumulation_steps": 2, "weight_decay": 0.1},
    "lars": {"kind": "lars", "weight_decay": 0.01, "global_clipnorm": 0.1},
    "several": {"kind": "several", "clipnorm": 0.1, "use_ema": True},
    "several, accumulation": {"kind": "several", "gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    "normed": {"kind": "normed"},
    "together": {"kind": "together"},
    "counting": {"kind": "counting"},
    "muon, float16": {"kind": "muon", "policy": "mixed_float16", "global_clipnorm": 0.5},
    "several, float16": {"kind": "several", "policy": "mixed_float16", "global_clipnorm": 0.5},
}
HOWS = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}, "3, offload": {"stage": 3, "offload": True}}


def prepared(case, replicas, how=None):
    options = dict(CASES[case])
    kind, make = KINDS[options.pop("kind")], options.pop("make", mlp)
    policy = options.pop("policy", "float32")
    model = made(make=make, replicas=replicas, policy=policy, how=how)
    with model.distribute_strategy.scope():
        optimizer = kind(0.01, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=6)
        model.compile(optimizer, "mse", metrics=["mae"])
    return model, make


@functools.cache
def trained(case, replicas):
    model, make = prepared(case, replicas)
    return model, fit(model, make)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", HOWS)
def test_the_training_is_one_devices(case, how):
    replicas = 2 + (list(CASES).index(case) + list(HOWS).index(how)) % 3
    # 16-bit rounding differs with the replicas' sums: those are held against plain replicas.
    is_narrow = "policy" in CASES[case]
    one, expected = trained(case, replicas if is_narrow else 1)
    model, make = prepared(case, replicas, HOWS[how])
    history, tolerance = fit(model, make), 1e-4 if is_narrow else 1e-6
    for mine, others in zip(one.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=tolerance)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=10 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", ["muon, overwritten", "lamb, accumulation", "adafactor", "several"])
def test_all_replicas_together_hold_one_devices_state(case, stage):
    (one, _), (model, _) = prepared(case, 1), prepared(case, 2, {"stage": stage})
    for each in (one, model):
        build(each)
    alone = memory_by_device(one)["CPU:0"]["optimizer"]
    held = [sizes["optimizer"] for sizes in memory_by_device(model).values()]
    counters = 64  # iterations and rates, which every replica has, and numbers that fill up the last piece
    largest = max(int(np.prod(v.shape)) for v in one.trainable_variables)
    per_number = alone / sum(int(np.prod(v.shape)) for v in one.trainable_variables)
    assert alone - counters <= sum(held) <= alone + 2 * counters + 8 * len(one.trainable_variables)
    assert max(held) <= alone / 2 + 1.5 * per_number * largest


def test_owners_hold_about_as_much():
    sizes = [64 * 64] * 24 + [64] * 48 + [256 * 64]
    held = [0] * 4
    for size, (owner,) in zip(sizes, dealing.deal(sizes, 4), strict=True):
        held[owner] += size
    assert sum(held) == sum(sizes) and max(held) <= 1.01 * sum(sizes) / 4
    assert dealing.deal([7], 3) == [(0, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["muon, overwritten", "adafactor, accumulation", "several"])
@pytest.mark.parametrize(("first", "second", "stages"), [(4, 1, 22), (2, 3, 31)])
def test_a_checkpoint_of_one_layout_resumes_in_another(case, first, second, stages, tmp_path):
    one, make = prepared(case, 1)
    fit(one, make)
    for replicas, epochs, stage in ((first, 2, stages // 10), (second, 5, stages % 10)):
        model, _ = prepared(case, replicas, {"stage": stage} if replicas > 1 else None)
        fit(model, make, Checkpoint(tmp_path / "run"), epochs=epochs)
    for mine, others in zip(one.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_saved_is_one_devices(stage, tmp_path):
    (one, make), (model, _) = prepared("adafactor", 1), prepared("adafactor", 3, {"stage": stage})
    for each in (one, model):
        fit(each, make, epochs=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for mine, others in zip(loaded.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), others.numpy(), atol=1e-6, err_msg=others.path)
    again, _ = prepared("adafactor", 2, {"stage": 2})
    build(again)
    tf.train.Checkpoint(model=again).restore(tf.train.Checkpoint(model=model).save(str(tmp_path / "tf")))
    found = sharded_variable.merged(again.optimizer.variables)
    for mine, others in zip(found, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), others.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_another_optimizer_may_follow(stage):
    """Pieces after owners, and owners after pieces."""
    models = made(), made(replicas=2, how={"stage": stage})
    for model in models:
        for make in (keras.optimizers.Muon, keras.optimizers.AdamW, keras.optimizers.Lamb):
            with model.distribute_strategy.scope():
                model.compile(make(0.01), "mse")
            fit(model, epochs=1)
    for mine, others in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_may_be_built_within_its_first_step(stage):
    models = made(kind="Muon"), made(kind="Muon", replicas=2, how={"stage": stage})
    x, y = np.ones((4, 8), "float32"), np.ones((4, 1), "float32")
    for model in models:

        @tf.function
        def run(model=model, strategy=model.distribute_strategy):
            def step():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x, training=False) - y) ** 2) / strategy.num_replicas_in_sync
                found = tape.gradient(loss, model.trainable_variables)
                model.optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

            strategy.run(step)

        for _ in range(3):
            run()
    for mine, others in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=1e-6)


def test_what_an_optimizer_sees_is_tried():
    kernel, bias = keras.Variable(np.zeros((3, 4)), name="kernel"), keras.Variable(np.zeros(3), name="bias")
    assert optimizer_kinds.what_it_sees(Halving(0.1), kernel) is Sees.NUMBER
    assert optimizer_kinds.what_it_sees(Normed(0.1), kernel) is Sees.VARIABLE
    assert optimizer_kinds.what_it_sees(NormedTogether(0.1), kernel) is Sees.ALL
    assert optimizer_kinds.what_it_sees(Counting(0.1), kernel) is Sees.ALL
    muon = keras.optimizers.Muon(0.1)
    assert [optimizer_kinds.what_it_sees(muon, each) for each in (kernel, bias)] == [Sees.VARIABLE, Sees.NUMBER]


def test_the_log_says_what_travels(caplog):
    caplog.set_level("INFO", logger="tfgpu")
    with on(2).scope():
        model = shard(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)]), stage=2)
        model.compile(keras.optimizers.Muon(0.01), "mse")
        build(model)
    assert "Muon uses whole variables: 2 of 4 get an owner each" in caplog.text
    assert [sum(np.prod(copy.shape) > 0 for copy in v.value.values) for v in slots(model, "momentum")] == [1, 2, 1, 2]
    with model.distribute_strategy.scope():
        model.compile(NormedTogether(0.01), "mse")
        build(model)
    assert "NormedTogether uses all variables at once" in caplog.text
    assert tfgpu.parallel.memory_by_device(model)["CPU:2"]["pieces"] == 4 * (2 * 16 + 2 * 4)

"""Steps that produce NaN or Inf are skipped: the result equals a training without those batches, bit for bit."""

import logging

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.callbacks import Checkpoint, SkipNaN

ROWS, BATCH = 48, 8
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(ROWS, 4)).astype("float32"), RNG.normal(size=(ROWS, 1)).astype("float32")
BAD = 2, 5  # batches


def data(*, poisoned: bool):
    """All batches, two of them with NaN or infinity; or only the finite batches."""
    x, y = X.copy(), Y.copy()
    x[BAD[0] * BATCH + 1], y[BAD[1] * BATCH + 7] = float("nan"), float("inf")
    kept = [at for at in range(ROWS) if poisoned or at // BATCH not in BAD]
    return x[kept], y[kept]


def make(devices: int, policy: str = "float32", **options):
    keras.utils.set_random_seed(5)
    with tfgpu.strategy("mirrored", devices=devices).scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(6, "relu", dtype=policy),
                keras.layers.BatchNormalization(dtype=policy),
                keras.layers.Dropout(0.4, dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.01, 20), use_ema=True, global_clipnorm=1.0, **options
        )
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=3)
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model


def fit(model, *callbacks, poisoned: bool, epochs: int = 3):
    x, y = data(poisoned=poisoned)
    arguments = dict(epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.fit(x, y, BATCH, **arguments).history


def assert_equal(a, b) -> None:
    first, second = ([v.numpy() for v in (*m.variables, *m.optimizer.variables)] for m in (a, b))
    assert all(np.isfinite(value).all() for value in first if value.dtype.kind == "f")
    assert all(one.tobytes() == two.tobytes() for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("devices", "policy", "options"),
    [
        pytest.param(1, "float32", {}, marks=pytest.mark.slow),
        pytest.param(2, "float32", {}, marks=pytest.mark.slow),
        pytest.param(3, "float32", {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param(2, "mixed_float16", {}, marks=pytest.mark.slow),
    ],
)
def test_the_result_is_as_without_the_bad_batches(devices, policy, options, caplog):
    with_bad, without = make(devices, policy, **options), make(devices, policy, **options)
    skip = SkipNaN(limit=6)
    with caplog.at_level(logging.WARNING):
        history = fit(with_bad, skip, poisoned=True)
    assert history == fit(without, poisoned=False)
    assert_equal(with_bad, without)
    assert skip.skipped == 6 and "6 of at most 6 so far" in caplog.text


@pytest.mark.slow
def test_one_more_than_the_limit_ends_it_and_keeps_what_was_learned(tmp_path):
    model, skip = make(2), SkipNaN(limit=2)
    with pytest.raises(tfgpu.InputError, match=r"3 steps produced NaN or Inf, the last of them in step.* limit=2"):
        fit(model, Checkpoint(tmp_path), skip, poisoned=True)
    assert all(np.isfinite(v.numpy()).all() for v in model.weights)
    again = make(2)
    with pytest.raises(tfgpu.InputError, match="3 steps produced"):  # the count continues where it was saved
        fit(again, Checkpoint(tmp_path), skip := SkipNaN(limit=2), poisoned=True)
    assert skip.skipped == 3


@pytest.mark.slow
def test_an_epoch_of_only_bad_steps_has_no_loss():
    model = make(2)
    x, y = np.full((8, 4), np.nan, np.float32), np.zeros((8, 1), np.float32)
    with pytest.raises(tfgpu.InputError, match="All 2 steps of epoch 1 produced NaN"):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[SkipNaN(limit=10)])


@pytest.mark.slow
def test_a_fit_without_it_is_not_guarded():
    model = make(1)
    fit(model, SkipNaN(), poisoned=True, epochs=1)
    fit(model, poisoned=True, epochs=1)
    assert np.isnan(model.layers[0].kernel.numpy()).any()


def test_refuses_steps_it_cannot_undo_and_invalid_limits():
    with tfgpu.strategy("averaging", devices=2, every=4).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(tfgpu.InputError, match="synchronous training"):
        model.fit(X, Y, BATCH, verbose=0, callbacks=[SkipNaN()])
    model = make(1)
    model.other = keras.optimizers.SGD()
    with pytest.raises(tfgpu.InputError, match=r"Call `model.other.build\(variables\)`"):
        fit(model, SkipNaN(), poisoned=True)
    for limit in (-1, 1.5, True, None):
        with pytest.raises(tfgpu.InputError, match="`limit` must be a whole number"):
            SkipNaN(limit)


WORKER = """
import json
import keras, numpy as np, tfgpu
from tfgpu.callbacks import SkipNaN

def trained(poisoned):
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(48, 4)).astype("float32"), rng.normal(size=(48, 1)).astype("float32")
    x[17], y[47] = float("nan"), float("inf")
    kept = [at for at in range(48) if poisoned or at // 8 not in (2, 5)]
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                                  keras.layers.Dropout(0.4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    skip = SkipNaN()
    history = model.fit(x[kept], y[kept], 8, epochs=2, shuffle=False, verbose=0, callbacks=[skip] * poisoned).history
    return [v.numpy().tobytes().hex() for v in (*model.variables, *model.optimizer.variables)], history, skip.skipped

strategy = tfgpu.strategy("multi_worker")
found, without = trained(True), trained(False)
print(json.dumps({"equal": found[:2] == without[:2], "skipped": found[2]}))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_two_workers_skip_the_same_steps(together):
    answers = together(WORKER, {"worker": 2})
    assert answers == {f"worker{at}": {"equal": True, "skipped": 4} for at in range(2)}


DIFFERENT = """
import json
import keras, numpy as np, tfgpu
from tfgpu.callbacks import Checkpoint, SkipNaN

strategy = tfgpu.strategy("multi_worker")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    model.compile("sgd", "mse")
mine = Checkpoint(FOLDER) if strategy.cluster_resolver.task_id else SkipNaN()
try:
    model.fit(np.zeros((8, 4)), np.zeros((8, 6)), 8, verbose=0, callbacks=[mine])
except tfgpu.InputError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_with_different_callbacks_are_reported(together, tmp_path):
    answers = together(DIFFERENT.replace("FOLDER", repr(str(tmp_path))), {"worker": 2})
    for answer in answers.values():
        assert "worker 0 has SkipNaN, worker 1 has Checkpoint. Give `fit` the same callbacks" in answer

"""From a file or a checkpoint to new data: the optimizer's state, and learning-rate rewarming."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.training import incremental

X, Y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


def compiled(rate=0.1, eager=True, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    model.compile(keras.optimizers.Adam(rate, **options), "mse", run_eagerly=eager)
    return model


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A trained model, its file and its checkpoints."""
    tfgpu.repair_keras()
    folder = tmp_path_factory.mktemp("first")
    model = compiled()
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[tfgpu.callbacks.Checkpoint(folder / "checkpoints")])
    model.save(folder / "model.keras")
    return model, folder


@pytest.mark.parametrize("choice", ["keep", "reset"])
@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_the_optimizer_is_kept_or_reset(first, kind, choice):
    model, folder = first
    if kind == "file":
        taken = incremental.warm_start(folder / "model.keras", optimizer=choice)
    else:
        source = tfgpu.callbacks.Checkpoint(folder / "checkpoints")
        taken = incremental.warm_start(source, compiled(), optimizer=choice)
    assert all(np.array_equal(a, b) for a, b in zip(taken.get_weights(), model.get_weights(), strict=True))
    found = [np.array_equal(a, b) for a, b in zip(taken.optimizer.variables, model.optimizer.variables, strict=True)]
    assert all(found) if choice == "keep" else found == [False, True] + [False] * 4
    assert int(taken.optimizer.iterations) == (4 if choice == "keep" else 0)
    fit = taken.fit(X, Y, epochs=1, verbose=0)
    assert fit.epoch == [0]


def test_the_rate_rises_again_from_where_the_iterations_are(tmp_path):
    model = compiled(0.3, eager=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    incremental.rewarm(model, steps=2)
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append(float(model.optimizer.learning_rate)))
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[look])
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.3])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.3)
    incremental.rewarm(loaded, steps=1, then=0.8)
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.4)


def test_a_rise_counts_updates_where_gradients_accumulate():
    model = compiled(0.3, gradient_accumulation_steps=2)
    model.fit(X, Y, batch_size=2, verbose=0)  # four batches, two updates
    incremental.rewarm(model, steps=2)
    seen = []
    for _ in range(5):
        seen.append(float(model.optimizer.learning_rate))
        model.train_on_batch(X, Y)
    assert seen == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_what_is_not_there_is_named(tmp_path):
    for wrong, message in (
        (lambda: incremental.warm_start(tmp_path / "no.keras", optimizer="keep"), "no.keras"),
        (lambda: incremental.warm_start("x.keras", optimizer="kept"), "Did you mean 'keep'"),
        (
            lambda: incremental.warm_start(tfgpu.callbacks.Checkpoint(tmp_path), optimizer="keep"),
            "Pass the compiled model",
        ),
        (
            lambda: incremental.warm_start(tfgpu.callbacks.Checkpoint(tmp_path), compiled(), optimizer="keep"),
            "no checkpoint",
        ),
        (lambda: incremental.rewarm(compiled(), steps=0), "`steps`"),
    ):
        with pytest.raises(tfgpu.InputError, match=message):
            wrong()


def test_under_replicas_a_rate_rises_again_too():
    with tfgpu.strategy("mirrored", devices=2).scope():
        model = compiled(0.3)
    incremental.rewarm(model, steps=1)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.15)

"""Checkpoints are complete and verified, and a resumed run ends like an uninterrupted one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.checkpoint.storage import FACTS, STATE, found

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(24, 4)).astype("float32"), RNG.normal(size=(24, 1)).astype("float32")


def build(replicas=1, policy="float32", units=6):
    tfgpu.repair_keras()
    keras.utils.set_random_seed(2)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(units, "relu", dtype=policy),
                keras.layers.BatchNormalization(dtype=policy),
                keras.layers.Dropout(0.4, dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.AdamW(0.01, use_ema=True, gradient_accumulation_steps=2)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=3)
        model.compile(optimizer, "mse")
    return model


def train(model, first, epochs, *callbacks):
    model.fit(X, Y, 8, shuffle=False, initial_epoch=first, epochs=epochs, callbacks=list(callbacks), verbose=0)


def state(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "bfloat16"])
def test_a_resumed_run_ends_where_one_that_never_stopped_does(tmp_path, policy):
    straight = build(policy=policy)
    train(straight, 0, 5)
    train(build(policy=policy), 0, 3, Checkpoint(tmp_path))
    resumed = build(policy=policy)
    checkpoint = Checkpoint(tmp_path)
    position = checkpoint.restore(resumed)
    assert position.epoch == 3 and [set(row) for row in position.history] == [{"loss"}] * 3
    train(resumed, position.epoch, 5, checkpoint)
    for a, b in zip(state(straight), state(resumed), strict=True):
        assert a.dtype == b.dtype and (a == b).all()
    assert len(Checkpoint(tmp_path).restore(build(policy=policy)).history) == 5


@pytest.mark.slow  # test_resume.py has it in the middle of an epoch
def test_another_number_of_replicas_resumes_with_the_same_result(tmp_path):
    straight = build(4)
    train(straight, 0, 4)
    train(build(4), 0, 2, Checkpoint(tmp_path))
    resumed = build(2)
    train(resumed, Checkpoint(tmp_path).restore(resumed).epoch, 4)
    for a, b in zip(state(straight), state(resumed), strict=True):
        assert np.abs(np.float64(a) - np.float64(b)).max() <= 1e-5


def test_only_the_newest_are_kept_and_nothing_half_written_counts(tmp_path):
    train(build(), 0, 4, Checkpoint(tmp_path, keep=2))
    (tmp_path / ".epoch-0009.123").mkdir()
    assert [path.name for path in found(tmp_path)] == ["epoch-0004", "epoch-0003"]


@pytest.mark.sample("flip")
@pytest.mark.parametrize("harm", ["flip", "cut", "missing", "no facts"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, harm, caplog):
    train(build(), 0, 2, Checkpoint(tmp_path))
    arrays = tmp_path / "epoch-0002" / STATE
    content = bytearray(arrays.read_bytes())
    if harm == "flip":
        content[-5] ^= 1
        arrays.write_bytes(content)
    elif harm == "cut":
        arrays.write_bytes(content[:100])
    else:
        (arrays if harm == "missing" else arrays.with_name(FACTS)).unlink()
    model = build()
    assert Checkpoint(tmp_path).restore(model).epoch == 1
    assert "epoch-0002 is damaged" in caplog.text


def test_no_checkpoint_and_no_usable_checkpoint(tmp_path):
    assert Checkpoint(tmp_path / "none").restore(build()) is None
    (tmp_path / "epoch-0001").mkdir()
    with pytest.raises(tfgpu.InputError, match="All checkpoints .* damaged"):
        Checkpoint(tmp_path).restore(build())


def test_another_model_is_refused(tmp_path):
    train(build(), 0, 1, Checkpoint(tmp_path))
    with pytest.raises(
        tfgpu.InputError, match=r"does not fit this model: .*kernel has shape \(4, 6\) there and \(4, 7\) here"
    ):
        Checkpoint(tmp_path).restore(build(units=7))
    with pytest.raises(tfgpu.InputError, match="`keep` must be a whole number of at least 1"):
        Checkpoint(tmp_path, keep=0)


@pytest.mark.slow
def test_a_worker_that_is_not_the_chief_writes_nothing(tmp_path):
    train(build(), 0, 1, Checkpoint(tmp_path / "run", is_chief=False))
    assert not (tmp_path / "run").exists()


def test_a_failing_save_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    model = build()
    train(model, 0, 1, Checkpoint(tmp_path))
    (tmp_path / "epoch-0002").mkdir()  # rubbish in the way is replaced, not merged
    (tmp_path / "epoch-0002" / "rubbish").write_text("x")
    train(model, 1, 2, Checkpoint(tmp_path))
    assert sorted(path.name for path in (tmp_path / "epoch-0002").iterdir()) == [FACTS, STATE]


class TwoOptimizers(keras.Model):
    """Two halves, each with an optimizer of its own, as a GAN has; neither is built before the first step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)
        self.meter = keras.metrics.Mean("error")

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 3))

    def compile(self, one, two):
        super().compile(loss="mse")
        self.one, self.more = one, {"second": [two]}

    @property
    def two(self):
        return self.more["second"][0]

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = self.compute_loss(x, y, self(x, training=True))
        halves = self.first.trainable_variables, self.second.trainable_variables
        for optimizer, half, grads in zip((self.one, self.two), halves, tape.gradient(error, halves), strict=True):
            optimizer.apply(grads, half)
        self.meter.update_state(error)
        return {"error": self.meter.result()}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_optimizers_in_attributes_are_saved_too(tmp_path, replicas):
    def make():
        keras.utils.set_random_seed(2)
        with tfgpu.strategy("mirrored", devices=replicas).scope():
            model = TwoOptimizers()
            model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9))
        return model

    def states(model):
        return [v.numpy().tobytes() for v in (*model.variables, *model.one.variables, *model.two.variables)]

    straight = make()
    train(straight, 0, 4)
    train(make(), 0, 2, Checkpoint(tmp_path))
    resumed = make()
    train(resumed, 0, 4, Checkpoint(tmp_path))
    assert states(straight) == states(resumed)
    assert resumed.one.iterations.numpy() == resumed.two.iterations.numpy() == 12


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_top_k_has_not_sent_yet_is_saved(tmp_path, replicas):
    def make():
        keras.utils.set_random_seed(2)
        with tfgpu.strategy("mirrored", devices=replicas, top_k=0.1).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return model

    straight, resumed = make(), make()
    train(straight, 0, 4)
    train(make(), 0, 2, Checkpoint(tmp_path))
    train(resumed, 0, 4, Checkpoint(tmp_path))
    assert all((a == b).all() for a, b in zip(state(straight), state(resumed), strict=True))
    # In the same process once more, from the end back to the second epoch.
    checkpoint = Checkpoint(tmp_path / "again")
    train(again := make(), 0, 2, checkpoint)
    train(again, 2, 3)
    checkpoint.restore(again)
    train(again, 2, 4)
    assert all((a == b).all() for a, b in zip(state(straight), state(again), strict=True))


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.params["epochs"] == 4 and (self.model.optimizer.iterations.numpy(), batch) == (2, 1):
            raise RuntimeError("in the middle")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_restore_by_hand_in_the_middle_of_an_epoch(tmp_path, replicas):
    """As `tfgpu train --resume` does: the metrics' variables come with the first step only."""

    def make():
        keras.utils.set_random_seed(2)
        with tfgpu.strategy("mirrored", devices=replicas).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    whole = make()
    logs = whole.fit(X, Y, 8, shuffle=False, epochs=4, verbose=0).history
    with pytest.raises(RuntimeError, match="in the middle"):
        train(make(), 0, 4, Checkpoint(tmp_path, every_steps=1), Stop())
    again, checkpoint = make(), Checkpoint(tmp_path)
    assert checkpoint.restore(again).done > 0
    found = again.fit(X, Y, 8, shuffle=False, epochs=4, verbose=0, callbacks=[checkpoint]).history
    assert found == logs and all((a == b).all() for a, b in zip(state(whole), state(again), strict=True))

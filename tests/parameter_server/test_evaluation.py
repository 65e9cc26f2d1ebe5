"""The side-car evaluator: each new checkpoint once, by itself, with the numbers of the training's own evaluation."""

import json
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.asynchronous import evaluate_checkpoints

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)).astype("float32"), RNG.integers(0, 3, 40)


def build(units=3):
    keras.utils.set_random_seed(0)
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def train(folder, epochs):
    model = build()
    checkpoint = tfgpu.callbacks.Checkpoint(folder, keep=10)
    fit = model.fit(X, Y, batch_size=8, epochs=epochs, validation_data=(X, Y), callbacks=[checkpoint], verbose=0)
    return fit.history


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)


@pytest.mark.slow
def test_the_newest_checkpoint_is_evaluated_as_the_training_evaluated_it(tmp_path):
    history = train(tmp_path, epochs=3)
    seen = []
    (row,) = evaluate_checkpoints(
        build(), batches(), tmp_path, last_epoch=3, on_result=lambda epoch, found: seen.append(epoch)
    )
    assert row == {
        "epoch": 3,
        "accuracy": pytest.approx(history["val_accuracy"][-1], abs=1e-6),
        "loss": pytest.approx(history["val_loss"][-1], abs=1e-6),
    }
    assert seen == [3]
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [3]


def test_a_restarted_evaluator_evaluates_nothing_twice(tmp_path):
    train(tmp_path, epochs=1)
    assert len(evaluate_checkpoints(build(), batches(), tmp_path, last_epoch=1)) == 1
    assert evaluate_checkpoints(build(), batches(), tmp_path, last_epoch=1) == []


def test_it_follows_a_running_training(tmp_path):
    rows = []
    follower = threading.Thread(
        target=lambda: rows.extend(
            evaluate_checkpoints(build(), batches(), tmp_path, last_epoch=2, poll_s=0.05, patience_s=60)
        )
    )
    train(tmp_path, epochs=1)
    follower.start()
    train_on(tmp_path)
    follower.join(timeout=550)
    assert not follower.is_alive()
    assert [row["epoch"] for row in rows] in ([1, 2], [2])


def train_on(folder):
    model = build()
    checkpoint = tfgpu.callbacks.Checkpoint(folder, keep=10)
    checkpoint.restore(model)
    model.fit(X, Y, batch_size=8, initial_epoch=1, epochs=2, callbacks=[checkpoint], verbose=0)


def damage(checkpoint):
    path = checkpoint / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def test_a_damaged_newest_checkpoint_is_skipped_once(tmp_path, caplog):
    train(tmp_path, epochs=2)
    damage(tmp_path / "epoch-0002")
    rows = evaluate_checkpoints(build(), batches(), tmp_path, poll_s=0.01, patience_s=0.5)
    assert [row["epoch"] for row in rows] == [1]
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 1
    assert caplog.text.count("epoch-0002 is damaged") == 1


@pytest.mark.slow
def test_a_checkpoint_that_replaces_a_damaged_one_is_evaluated(tmp_path):
    train(tmp_path / "whole", epochs=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    damage(tmp_path / "run/epoch-0002")

    def replace(epoch, found):
        if epoch == 1:
            shutil.rmtree(tmp_path / "run/epoch-0002")
            shutil.copytree(tmp_path / "whole/epoch-0002", tmp_path / "run/epoch-0002")

    rows = evaluate_checkpoints(build(), batches(), tmp_path / "run", last_epoch=2, poll_s=0.01, on_result=replace)
    assert [row["epoch"] for row in rows] == [1, 2]


def test_a_damaged_first_checkpoint_does_not_end_the_evaluator(tmp_path):
    train(tmp_path, epochs=1)
    damage(tmp_path / "epoch-0001")
    assert evaluate_checkpoints(build(), batches(), tmp_path, poll_s=0.01, patience_s=0.2) == []


def test_a_line_of_results_that_was_cut_short_does_no_harm(tmp_path):
    train(tmp_path, epochs=1)
    (tmp_path / "evaluations.jsonl").write_text('{"checkpoint": "epoch-0001", "epo')
    for found in ([1], []):
        rows = evaluate_checkpoints(build(), batches(), tmp_path, last_epoch=1, poll_s=0.01, patience_s=20)
        assert [row["epoch"] for row in rows] == found


def test_without_new_checkpoints_it_ends_after_its_patience(tmp_path):
    assert evaluate_checkpoints(build(), batches(), tmp_path, poll_s=0.01, patience_s=0.05) == []


@pytest.mark.parametrize("argument", ["poll_s", "patience_s"])
@pytest.mark.parametrize("value", [0, "5"])
def test_a_time_that_is_none_is_refused(argument, value, tmp_path):
    with pytest.raises(tfgpu.InputError, match=f"`{argument}` must be above 0. Received: {value!r}"):
        evaluate_checkpoints(build(), batches(), tmp_path, **{argument: value})


def test_checkpoints_of_another_model_are_named(tmp_path):
    train(tmp_path, epochs=1)
    with pytest.raises(tfgpu.InputError, match="does not fit this model"):
        evaluate_checkpoints(build(units=4), batches(), tmp_path, last_epoch=1)

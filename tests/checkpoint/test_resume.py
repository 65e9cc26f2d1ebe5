"""A `fit` that is interrupted anywhere resumes, and ends with the bytes and history of an uninterrupted one."""

import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.checkpoint import Writer
from tfgpu.checkpoint.storage import STATE, found
from tfgpu.errors import Preempted

RNG = np.random.default_rng(0)
X = RNG.normal(size=(26, 3)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
HELD = RNG.normal(size=(10, 3)).astype("float32")
VALIDATION = HELD, (HELD[:, :1] > 0).astype("float32")
EPOCHS = 3  # of 7 steps, the last of 2 rows


class Reads(keras.utils.PyDataset):
    """Rows that are reshuffled at each epoch's end, by NumPy's global generator."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(26)

    def __len__(self):
        return 7

    def __getitem__(self, at):
        rows = self.order[at * 4 : at * 4 + 4]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y))


FEEDS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 4},
    "dataset": lambda: {"x": rows().shuffle(26, seed=5).batch(4)},
    "unknown length": lambda: {"x": rows().filter(lambda x, y: True).batch(4)},
    "one stream": lambda: {"x": rows().shuffle(26, seed=5).batch(4).repeat(), "steps_per_epoch": 5},
    "pydataset": lambda: {"x": Reads()},
    "pipeline": lambda: {
        "x": tfgpu.data.load((X, Y[:, 0].astype("int64")), global_batch=4, validation=0, test=0).train
    },
}


class Dies(InterruptedError):
    pass


class At(keras.callbacks.Callback):
    """Does something at the end of a block, once; counted over steps, or over blocks of the validation."""

    every_batch = has_memory = False

    def __init__(self, *, step=None, test=None, epoch=None, do=None):
        super().__init__()
        self.step, self.test, self.epoch = step, test, epoch
        self.steps = self.tests = 0
        self.begin = 0
        self.do = do or self.die
        self.ends = []

    def die(self):
        raise Dies

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = batch

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(batch)
        before, self.steps = self.steps, self.steps + batch - self.begin + 1
        if self.step is not None and before < self.step <= self.steps:
            self.do()

    def on_test_batch_end(self, batch, logs=None):
        self.tests += 1
        if self.tests == self.test:
            self.do()

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.do()


def make(devices=1, *, accumulate=None, policy="float32", **compiled):
    tfgpu.repair_keras()
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    strategy = tf.distribute.get_strategy()
    if devices > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(devices)])
    with strategy.scope():
        layers = [L.Dense(6, "relu", dtype=policy), L.BatchNormalization(dtype=policy), L.Dropout(0.3, dtype=policy)]
        model = keras.Sequential([keras.Input((3,)), *layers, L.Dense(1, "sigmoid", dtype="float32")])
        optimizer = keras.optimizers.AdamW(0.02, use_ema=True, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], **compiled)
    return model


def train(model, feed, *callbacks, epochs=EPOCHS, steps_per_call=2, validation=None):
    fit = tfgpu.Trainer(model, steps_per_call=steps_per_call).fit
    return fit(**FEEDS[feed](), epochs=epochs, validation_data=validation, callbacks=list(callbacks), verbose=0).history


def dies(folder, model, feed, *callbacks, every_steps=3, **options):
    """Trains until a callback raises, and returns when what was handed over is written."""
    with pytest.raises(Dies), Writer() as writer:
        train(model, feed, Checkpoint(folder, every_steps=every_steps, writer=writer), *callbacks, **options)


def state(model):
    return [np.array(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]


def same(model, history, whole, whole_history):
    for a, b in zip(state(model), state(whole), strict=True):
        assert a.tobytes() == b.tobytes()
    assert history == whole_history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feed", "devices", "step"),
    [("arrays", 1, 10)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [*((feed, 1, 10) for feed in FEEDS if feed != "arrays"), ("arrays", 2, 5), ("arrays", 1, 7)]
    ],
)
def test_resumes_at_its_step(tmp_path, feed, devices, step):
    whole = make(devices, accumulate=2)
    expected = train(whole, feed)
    dies(tmp_path, make(devices, accumulate=2), feed, At(step=step))
    newest = found(tmp_path)[0].name
    assert newest == {5: "epoch-0000-step-0000003", 7: "epoch-0000-step-0000006"}.get(step, "epoch-0001-step-0000009")
    resumed, rest = make(devices, accumulate=2), At()
    same(resumed, train(resumed, feed, Checkpoint(tmp_path, every_steps=3), rest), whole, expected)
    assert rest.steps == (15 if feed == "one stream" else 21) - int(newest[-7:])


def test_a_failing_fit_has_written_when_it_ends(tmp_path, monkeypatch):
    """Another `fit` in the same process would read while the first one still writes."""
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.3), flush(file)))
    with pytest.raises(Dies):
        train(make(), "arrays", Checkpoint(tmp_path, every_steps=3), At(step=10))
    assert "epoch-0001-step-0000009" in {path.name for path in found(tmp_path)}


@pytest.mark.slow
def test_blocks_end_where_a_checkpoint_is_made(tmp_path):
    at = At()
    train(make(), "dataset", Checkpoint(tmp_path, every_steps=3, keep=9), at, epochs=2, steps_per_call=5)
    assert at.ends == [2, 5, 6, 1, 4, 6]
    assert [path.name for path in found(tmp_path)] == [
        "epoch-0002",
        "epoch-0001-step-0000012",
        "epoch-0001-step-0000009",
        "epoch-0001",
        "epoch-0000-step-0000006",
        "epoch-0000-step-0000003",
    ]


def remembering():
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.2, restore_best_weights=True)
    return [stop, keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.5)]


@pytest.mark.slow
def test_callback_state_and_a_completed_run(tmp_path, caplog):
    whole = make()
    expected = train(whole, "arrays", *remembering(), epochs=9, validation=VALIDATION)
    assert 3 <= len(expected["loss"]) < 9 and expected["learning_rate"][-1] < 0.01
    dies(tmp_path, make(), "arrays", *remembering(), At(step=18), every_steps=None, epochs=9, validation=VALIDATION)
    resumed = make()
    same(
        resumed,
        train(resumed, "arrays", *remembering(), Checkpoint(tmp_path), epochs=9, validation=VALIDATION),
        whole,
        expected,
    )
    again, at = make(), At()
    history = train(again, "arrays", Checkpoint(tmp_path), *remembering(), at, epochs=9, validation=VALIDATION)
    same(again, history, whole, expected)
    assert at.ends == [] and "this run is complete" in caplog.text
    longer = train(make(), "arrays", Checkpoint(tmp_path), *remembering(), epochs=10, validation=VALIDATION)
    assert len(longer["loss"]) > len(expected["loss"])
    assert longer["loss"][: len(expected["loss"])] == expected["loss"]


@pytest.fixture
def sigterm():
    """A process that was asked to stop ignores further signals; this one continues."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize(
    "moment",
    [{"step": 9}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"test": 2}, {"epoch": 1}, {"step": 14}))],
)
def test_a_signal_saves_and_leaves(tmp_path, moment):
    whole = make(accumulate=2)
    expected = train(whole, "arrays", validation=VALIDATION)
    asks = At(**moment, do=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="Asked to leave by SIGTERM. The training is saved in .*epoch-000") as caught:
        train(make(accumulate=2), "arrays", Checkpoint(tmp_path), asks, validation=VALIDATION)
    assert caught.value.code == 75
    os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat theirs
    assert max(asks.ends[-1:]) == {9: 1, 14: 6}.get(moment.get("step"), 6)  # not a step more
    resumed, rest = make(accumulate=2), At()
    same(resumed, train(resumed, "arrays", Checkpoint(tmp_path), rest, validation=VALIDATION), whole, expected)
    assert rest.steps == 21 - {9: 9, 14: 14}.get(moment.get("step"), 7 if "test" in moment else 14)


@pytest.mark.slow
@pytest.mark.usefixtures("sigterm")
def test_a_signal_in_the_last_epoch_leaves_when_all_is_done(tmp_path):
    asks = At(epoch=EPOCHS - 1, do=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="The training was complete"):
        train(make(), "arrays", Checkpoint(tmp_path), asks)
    assert found(tmp_path)[0].name == "epoch-0003"


@pytest.mark.slow
def test_another_number_of_replicas_in_the_middle_of_an_epoch(tmp_path):
    whole = make(2, accumulate=2)
    expected = train(whole, "arrays")
    dies(tmp_path, make(2, accumulate=2), "arrays", At(step=10))
    for devices in (1, 3):
        model = make(devices, accumulate=2)
        history = train(model, "arrays", Checkpoint(tmp_path, every_steps=99))
        for a, b in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        assert history["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        for path in found(tmp_path):
            if path.name in ("epoch-0002", "epoch-0003"):
                (path / STATE).unlink()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_moved_aside(tmp_path, caplog):
    whole = make()
    expected = train(whole, "arrays")
    dies(tmp_path, make(), "arrays", At(step=10))
    state_of_newest = tmp_path / "epoch-0001-step-0000009" / STATE
    content = bytearray(state_of_newest.read_bytes())
    content[len(content) // 2] ^= 4
    state_of_newest.write_bytes(content)
    resumed = make()
    same(resumed, train(resumed, "arrays", Checkpoint(tmp_path, keep=9, every_steps=2)), whole, expected)
    assert "epoch-0001-step-0000009 is damaged" in caplog.text
    assert (tmp_path / "epoch-0001-step-0000009.aside").is_dir()


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_can_be_restored(tmp_path):
    model = make()
    checkpoint = Checkpoint(tmp_path, keep=1, best="accuracy")
    history = train(model, "arrays", checkpoint, epochs=5)
    best = int(np.argmax(history["accuracy"])) + 1
    assert {path.name for path in found(tmp_path)} == {"epoch-0005", f"epoch-{best:04d}"}
    assert Checkpoint(tmp_path, best="accuracy").restore(make(), best=True).epoch == best


@pytest.mark.slow
def test_the_script_s_settings_stay_and_two_checkpoints_are_refused(tmp_path):
    train(make(), "arrays", Checkpoint(tmp_path), keras.callbacks.EarlyStopping("loss", patience=3), epochs=1)
    stop = keras.callbacks.EarlyStopping("loss", patience=7)
    train(make(), "arrays", Checkpoint(tmp_path), stop, epochs=2)
    assert stop.patience == 7 and stop.best is not None
    with pytest.raises(tfgpu.InputError, match="one Checkpoint"):
        train(make(), "arrays", Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b"))
    for wrong in ({"every_steps": 0}, {"mode": "most"}):
        with pytest.raises(tfgpu.InputError, match="Received"):
            Checkpoint(tmp_path, **wrong)

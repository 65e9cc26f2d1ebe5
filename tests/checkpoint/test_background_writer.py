"""Writes in the background: in order, complete, and no error is lost. Real files, real failures, a real kill."""

import os
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.callbacks import Checkpoint, EventsFile, MetricsFile
from tfgpu.checkpoint import Writer
from tfgpu.checkpoint.storage import found
from tfgpu.errors import InputError, MachineError


def threads():
    """The writer's threads: one while there is something to write."""
    return [thread for thread in threading.enumerate() if thread.name == "tfgpu-writer"]


def test_in_order_and_a_full_queue_waits(tmp_path):
    go, written, handed = threading.Event(), [], []
    writer = Writer(most=2)
    writer.put("first", lambda: (go.wait(500), written.append(0)))

    def hand_over():
        for number in range(1, 6):
            writer.put(f"file {number}", lambda number=number: written.append(number))
            handed.append(number)

    other = threading.Thread(target=hand_over)
    other.start()
    while len(handed) < 2:
        other.join(0.01)
    other.join(0.2)
    assert handed == [1, 2] and written == []  # one is being written, two wait, the next is held back
    go.set()
    other.join()
    writer.wait()
    assert written == [0, 1, 2, 3, 4, 5]
    assert not threads()
    with pytest.raises(InputError, match="`most` must be a whole number of at least 1. Received: 0"):
        Writer(most=0)


def test_an_error_is_raised_once_and_the_rest_is_written(tmp_path, caplog):
    writer = Writer()
    with pytest.raises(MachineError, match=r"Writing .*gone/a failed: FileNotFoundError.* directory") as caught:
        writer.put(tmp_path / "gone" / "a", lambda: (tmp_path / "gone" / "a").write_text("a"))
        [thread.join() for thread in threads()]
        writer.put(tmp_path / "b", lambda: (tmp_path / "b").write_text("b"))  # raises, and is made
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    writer.wait()
    assert (tmp_path / "b").read_text() == "b"
    assert "gone/a failed" in caplog.text
    writer.put(tmp_path / "gone" / "c", lambda: (tmp_path / "gone" / "c").write_text("c"))
    [thread.join() for thread in threads()]
    assert writer.has_failed
    writer.put(tmp_path / "d", lambda: (tmp_path / "d").write_text("d"), raises=False)
    with pytest.raises(MachineError, match="gone/c failed"):
        writer.wait()
    assert not writer.has_failed and (tmp_path / "d").read_text() == "d"


def test_a_write_that_fails_with_the_block_is_a_note():
    with pytest.raises(ZeroDivisionError) as caught, Writer() as writer:
        writer.put("nowhere", lambda: open("/nowhere/at/all"))
        raise ZeroDivisionError
    assert "Writing nowhere failed" in caught.value.__notes__[0]


def model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def fit(built, *callbacks, epochs=3, **settings):
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    return built.fit(x, y, batch_size=4, verbose=0, callbacks=list(callbacks), epochs=epochs, **settings)


def blocked(tmp_path, name):
    """A file where a folder is to be: it stops root too, whom permissions do not."""
    (tmp_path / name).write_text("in the way")
    return tmp_path / name


def test_checkpoints_that_cannot_be_written_are_an_error_before_the_first_step(tmp_path):
    built = model()
    with pytest.raises(MachineError, match="Checkpoints cannot be written to .*in_the_way"):
        fit(built, Checkpoint(blocked(tmp_path, "in_the_way")), epochs=1)
    assert int(built.optimizer.iterations) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [EventsFile, lambda path: MetricsFile(path / "metrics.csv")],
    ids=["events", "csv"],
)
def test_a_failing_write_ends_the_training(tmp_path, make):
    built = model()
    written = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: [thread.join() for thread in threads()])
    with pytest.raises(MachineError, match=r"Writing .*in_the_way\S* failed: \w+: "):
        fit(built, written, make(blocked(tmp_path, "in_the_way")), epochs=9)
    assert int(built.optimizer.iterations) == 2 * 2  # at the end of the epoch after the one that could not be written
    with pytest.raises(MachineError, match="failed"):
        fit(built, make(tmp_path / "in_the_way"), epochs=1)  # at the latest when training ends


def test_fit_ends_when_all_is_written(tmp_path):
    with Writer() as writer:
        shared = {"writer": writer}
        metrics = MetricsFile(tmp_path / "metrics.csv", **shared)
        fit(model(), metrics, EventsFile(tmp_path / "logs", **shared), Checkpoint(tmp_path, **shared))
        assert not threads()
        assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + 3
        assert [path.name for path in found(tmp_path)] == ["epoch-0003", "epoch-0002", "epoch-0001"]


def test_a_checkpoint_is_of_its_own_epoch_however_late_it_is_written(tmp_path):
    go, writer = threading.Event(), Writer(most=8)
    writer.put("slow disk", lambda: go.wait(500))
    ends = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(built.get_weights()), on_train_end=lambda logs: go.set()
    )
    built = model()
    fit(built, keep, Checkpoint(tmp_path, keep=9, writer=writer))
    for number, path in enumerate(reversed(found(tmp_path))):
        again = model()
        (tmp_path / "one").mkdir()
        path.rename(tmp_path / "one" / path.name)
        Checkpoint(tmp_path / "one").restore(again)
        assert all(np.array_equal(a, b) for a, b in zip(again.get_weights(), ends[number], strict=True))
        (tmp_path / "one").rename(tmp_path / f"seen{number}")


def test_a_failed_training_keeps_everything_saved(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise ZeroDivisionError

    built, checkpoint = model(), Checkpoint(tmp_path)
    with pytest.raises(ZeroDivisionError):
        fit(built, checkpoint, Fails())
    assert checkpoint.restore(built).epoch == 2  # it waits for what is being written


def test_the_curves_have_keras_s_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    history = fit(model(), EventsFile(tmp_path), validation_split=0.5).history
    for part, name in (("train", "loss"), ("validation", "val_loss")):
        events = EventAccumulator(str(tmp_path / part), size_guidance={TENSORS: 0})
        events.Reload()
        assert events.Tags()["tensors"] == ["epoch_loss"]
        values = [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors("epoch_loss")]
        assert values == pytest.approx(history[name])
        assert [event.step for event in events.Tensors("epoch_loss")] == [0, 1, 2]


KILLED = """
import os, pathlib, sys, time
import keras, numpy as np, tfgpu
from tfgpu.callbacks import Checkpoint
tfgpu.repair_keras()
plain = os.fsync

def slow(file):
    if list(pathlib.Path(sys.argv[1]).glob(".epoch-0003*")):  # the third is being written
        print("writing", flush=True)
        time.sleep(100)
    plain(file)

os.fsync = slow
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.1), "mse")
x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
model.fit(x, y, batch_size=4, verbose=0, callbacks=[Checkpoint(sys.argv[1])], epochs=5)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_kill_while_writing_keeps_older_checkpoints_intact(tmp_path):
    running = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert running.stdout.readline() == "writing\n"
    finally:
        running.send_signal(signal.SIGKILL)
        running.communicate()
    assert [path.name for path in found(tmp_path)] == ["epoch-0002", "epoch-0001"]
    assert any(path.name.startswith(".epoch-0003") for path in tmp_path.iterdir())  # what it had begun
    built = model()
    position = Checkpoint(tmp_path).restore(built)
    straight = model()
    fit(straight, epochs=2, shuffle=False)
    assert position.epoch == 2
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(built.get_weights(), straight.get_weights(), strict=True))

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfgpu
from tfgpu.callbacks import Monitor
from tfgpu.core import input_stats, step_blocks
from tfgpu.errors import InputError, MachineError
from tfgpu.sensors import table


@pytest.fixture(autouse=True)
def repaired():
    tfgpu.repair_keras()


def small(width=8, **settings):
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **settings)
    return model


def fit(monitor, model=None, *, rows=60, epochs=2, callbacks=(), **settings):
    model = model or small()
    x, y = np.ones((rows, 8), "float32"), np.ones((rows, 1), "float32")
    return model.fit(x, y, batch_size=7, epochs=epochs, verbose=0, callbacks=[monitor, *callbacks], **settings)


def alive():
    return [thread for thread in threading.enumerate() if thread.name in ("tfgpu-monitor", "tfgpu-prometheus")]


def test_a_table_of_samples_and_one_of_epochs(tmp_path):
    monitor = Monitor(tmp_path, every_s=0.05)
    fit(monitor, validation_split=0.1)
    epochs = table.read(tmp_path / "monitor-epochs-worker0.csv")
    assert [(row["epoch"], row["steps"], row["examples"]) for row in epochs] == [(1, 8, 54), (2, 8, 54)]
    assert [row["limit"] for row in epochs] == [row["limit"] for row in monitor.epochs]
    samples = table.read(tmp_path / "monitor-worker0.csv")
    assert samples[-1]["step"] == 16 and samples[-1]["memory_bytes"] > 2**26
    seconds = [row["seconds"] for row in samples]
    assert seconds == sorted(seconds)
    assert not any(name.startswith("gpu0") for name in samples[-1])
    assert not alive() and sorted(os.listdir(tmp_path)) == ["monitor-epochs-worker0.csv", "monitor-worker0.csv"]


def test_blocks_are_as_long_as_without_it_and_the_result_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(step_blocks, "BLOCK_S", 3600.0)  # blocks grow however slow the machine is
    lengths, weights = {}, {}
    for name in ("with", "without"):
        keras.utils.set_random_seed(1)
        model, found = small(), []

        class Lengths(keras.callbacks.Callback):
            every_batch = False

            def on_train_batch_begin(self, batch, logs=None, found=found):
                found.append(batch)

        x = np.random.default_rng(0).random((700, 8)).astype("float32")
        callbacks = [Monitor(tmp_path), Lengths()] if name == "with" else [Lengths()]
        model.fit(x, x[:, :1], batch_size=7, verbose=0, callbacks=callbacks)
        lengths[name], weights[name] = found, model.get_weights()
    assert lengths["with"] == lengths["without"] and len(lengths["with"]) <= 8, lengths  # a hundred steps
    for one, other in zip(weights["with"], weights["without"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert not step_blocks.needs_every_batch(Monitor())


@pytest.mark.parametrize(("computing_s", "wait"), [(0.0, 1.0), (3600.0, 0.0)])
def test_a_step_that_waits_for_its_data_is_limited_by_the_input(monkeypatch, computing_s, wait):
    """By recorded statistics: `tests/core/test_input_stats.py` has tf.data's own."""
    monkeypatch.setattr(input_stats, "computing_s", lambda run: computing_s)
    monitor = Monitor(every_s=0.01)
    fit(monitor, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: until_sampled(monitor))])
    row = monitor.epochs[-1]
    assert row["step_time_s"] > 0 and row["input_wait"] == wait and row["examples"] == 60
    assert (row["limit"] == "input") == (wait == 1.0)


def until_sampled(monitor):
    """Waits for a sample of all steps so far."""
    watcher, until = monitor._watcher, time.monotonic() + 500
    while watcher._timed_steps and time.monotonic() < until:
        time.sleep(0.01)


def test_examples_are_counted_over_replicas_and_under_a_loop():
    with tfgpu.strategy("mirrored").scope():
        model = small()
    monitor = Monitor()
    tfgpu.Trainer(model).fit(np.ones((50, 8)), np.ones((50, 1)), batch_size=7, epochs=2, callbacks=[monitor], verbose=0)
    assert [(row["steps"], row["examples"]) for row in monitor.epochs] == [(8, 50), (8, 50)]


def test_a_second_fit_and_a_resumed_run_append(tmp_path):
    monitor = Monitor(tmp_path, every_s=0.05)
    model = small()
    fit(monitor, model)
    fit(monitor, model, epochs=4, initial_epoch=2)
    assert [row["epoch"] for row in monitor.epochs] == [3, 4]
    again = Monitor(tmp_path, every_s=0.05)
    fit(again, model, epochs=5, initial_epoch=4)
    epochs = table.read(tmp_path / "monitor-epochs-worker0.csv")
    assert [row["epoch"] for row in epochs] == [1, 2, 3, 4, 5]
    samples = table.read(tmp_path / "monitor-worker0.csv")
    assert samples[-1]["step"] == 5 * 9 and len(samples) >= 3
    assert [row["time"] for row in samples] == sorted(row["time"] for row in samples)


class Fails(keras.callbacks.Callback):
    every_batch = False

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_epoch_end(self, epoch, logs=None):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_the_thread_ends_with_a_fit_that_fails(tmp_path, error):
    monitor = Monitor(tmp_path, prometheus="127.0.0.1:0")
    with pytest.raises(type(error)):
        fit(monitor, callbacks=[Fails(error)])
    assert not alive()
    assert len(table.read(tmp_path / "monitor-worker0.csv")) >= 1  # the last sample is still there


def test_nothing_is_written_before_the_first_step(tmp_path):
    class Early(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            time.sleep(0.2)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(Monitor(tmp_path / "run", every_s=0.05), callbacks=[Early()])
    assert not (tmp_path / "run").exists() and not alive()


def test_an_unwritable_folder_is_one_warning_and_training_continues(tmp_path, caplog):
    (tmp_path / "file").write_text("mine")
    with caplog.at_level(logging.WARNING):
        monitor = Monitor(tmp_path / "file", tensorboard=tmp_path / "file", prometheus=True, every_s=0.02)
        history = fit(monitor, epochs=5)
    assert len(history.history["loss"]) == 5
    said = [record.getMessage() for record in caplog.records if "Monitor" in record.getMessage()]
    assert len(said) == len(set(said)) and 3 <= len(said) <= 4  # one for each file
    assert all(text.endswith("Training continues.") for text in said) and "monitor-worker0.csv" in "".join(said)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_error_in_the_monitor_does_not_stop_training(caplog, monkeypatch):
    from tfgpu.callbacks import watcher

    monkeypatch.setattr(watcher.Sampler, "read", lambda self: 1 / 0)
    with caplog.at_level(logging.WARNING):
        history = fit(Monitor(every_s=0.02), epochs=3)
    assert len(history.history["loss"]) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "Monitor: a sample could not be taken. Training continues."
    ]


def test_tensorboard_has_samples_by_step_and_epochs_by_epoch(tmp_path):
    monitor = Monitor(tensorboard=tmp_path, every_s=0.05)
    fit(monitor, epochs=3)
    assert os.listdir(tmp_path) == ["monitor-worker0"]
    events = EventAccumulator(str(tmp_path / "monitor-worker0")).Reload()
    tags = events.Tags()["scalars"]
    assert {"monitor/memory_bytes", "monitor/cores", "monitor_epoch/examples"} <= set(tags)
    assert [(each.step, each.value) for each in events.Scalars("monitor_epoch/examples")] == [(1, 60), (2, 60), (3, 60)]
    assert events.Scalars("monitor/memory_bytes")[-1].step == 27


def test_prometheus_reads_a_file_and_a_port(tmp_path):
    seen = []

    class Ask(keras.callbacks.Callback):
        every_batch = False

        def on_epoch_end(self, epoch, logs=None):
            limit_s, text = time.monotonic() + 500, ""
            while f'tfgpu_epoch{{worker="0"}} {epoch + 1}' not in text and time.monotonic() < limit_s:
                time.sleep(0.05)
                with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=550) as answer:
                    text = answer.read().decode()
            seen.append(text)

    served = Monitor(prometheus="127.0.0.1:0", every_s=0.05)
    fit(served, callbacks=[Ask()])
    assert 'tfgpu_epoch{worker="0"} 2' in seen[1] and served.port is None
    fit(Monitor(tmp_path, csv=False, prometheus=True))
    assert os.listdir(tmp_path) == ["monitor-worker0.prom"]
    assert 'tfgpu_steps_total{worker="0"} 18' in (tmp_path / "monitor-worker0.prom").read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {"every_s": 0},
        {"every_s": "1"},
        {"every_s": float("nan")},
        {"csv": True},
        {"prometheus": True},
        {"prometheus": "somewhere"},
        {"prometheus": 65535, "worker": 1},
        {"worker": -1},
        {"worker": "1"},
    ],
)
def test_invalid_settings(settings):
    with pytest.raises(InputError, match="Received"):
        Monitor(**settings)


def test_a_port_that_is_taken_is_an_error_before_the_first_step(addresses):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MachineError, match="cannot be served"):
            fit(Monitor(prometheus=taken.getsockname()[1]))
    assert not alive()


@pytest.mark.parametrize("has_tracker", [False, True])  # which its step then leaves alone
def test_a_model_without_a_loss_that_counts_rows_has_no_examples(has_tracker):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x):
            return self.layer(x)

        @property
        def metrics(self):
            return super().metrics if has_tracker else []

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Own()
    model.compile("sgd")
    monitor = Monitor()
    fit(monitor, model)
    assert [(row["steps"], row["examples"], row["examples_per_s"]) for row in monitor.epochs] == [(9, None, None)] * 2


GPUS = """
import os, sys, time
import keras, numpy as np
import tfgpu
tfgpu.repair_keras()
from tfgpu.callbacks import Monitor
def samples(count=3):
    path, end = os.path.join(sys.argv[1], "monitor-worker0.csv"), time.monotonic() + 500
    def rows():
        return len(open(path).readlines()) if os.path.exists(path) else 0
    least = rows() + count
    while rows() < least and time.monotonic() < end:
        time.sleep(0.01)
class Change(keras.callbacks.Callback):
    every_batch = False
    def on_epoch_end(self, epoch, logs=None):
        samples()
        os.environ["ENERGY_MJ"] = str(1_000_000 * (epoch + 1))
        os.environ.update([{}, {"LOST_UNDER_WAY": "1"}, {"GONE": "1"}, {}][epoch])
        samples()
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
callbacks = [Change(), Monitor(sys.argv[1], every_s=0.05)]
model.fit(np.ones((60, 8)), np.ones((60, 1)), epochs=4, verbose=0, callbacks=callbacks)
"""


@pytest.mark.parametrize("weighed", [False, True])
def test_a_custom_step_that_counts_steps_has_no_examples(weighed):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, x):
            return self.layer(x)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.tracker.update_state(loss, sample_weight=tf.shape(x)[0] if weighed else None)
            return {"loss": self.tracker.result()}

    model = Own()
    model.compile("sgd")
    monitor = Monitor()
    fit(monitor, model)
    assert [(row["steps"], row["examples"]) for row in monitor.epochs] == [(9, 60 if weighed else None)] * 2


def test_a_batch_of_one_row_is_counted():
    model, monitor = small(), Monitor()
    model.fit(np.ones((5, 8)), np.ones((5, 1)), batch_size=1, callbacks=[monitor], verbose=0)
    assert [row["examples"] for row in monitor.epochs] == [5]


@pytest.mark.sample("on_epoch_end-one_device")
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_begin", "on_epoch_end"])
def test_an_evaluate_that_a_callback_calls_is_not_counted(strategy, hook):
    class Evaluating(keras.callbacks.Callback):
        pass

    def evaluate(self, number, logs=None):
        self.model.evaluate(np.ones((5, 8), "float32"), np.ones((5, 1), "float32"), verbose=0)

    setattr(Evaluating, hook, evaluate)
    with tfgpu.strategy(strategy).scope():
        model = small()
    monitor = Monitor()
    x, y = np.ones((60, 8), "float32"), np.ones((60, 1), "float32")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Evaluating(), monitor, Evaluating()])
    assert [(row["steps"], row["examples"]) for row in monitor.epochs] == [(8, 60)] * 2


def test_blocks_of_keras_have_as_many_steps_as_there_were():
    monitor = Monitor()
    fit(monitor, small(steps_per_execution=3), rows=54)
    assert [(row["steps"], row["examples"]) for row in monitor.epochs] == [(8, 54)] * 2


def test_the_same_monitor_twice_in_a_fit_is_refused():
    monitor = Monitor()
    with pytest.raises(InputError, match="Pass it once"):
        fit(monitor, callbacks=[monitor])
    assert not alive()
    fit(monitor)
    fit(monitor)
    assert len(monitor.epochs) == 2


def test_a_finished_fit_is_released():
    held = []

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            held.append(weakref.ref(monitor._watcher))

    monitor = Monitor()
    fit(monitor, callbacks=[Note()])
    gc.collect()
    assert held[0]() is None


def test_two_fits_at_once_are_refused_and_a_copy_is_not():
    caught = []

    class Beside(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            thread = threading.Thread(target=self.beside)
            thread.start()
            thread.join()

        def beside(self):
            try:
                fit(monitor, epochs=1)
            except InputError as error:
                caught.append(str(error))
            fit(copy.copy(monitor), epochs=1)

    monitor = Monitor()
    fit(monitor, epochs=1, callbacks=[Beside()])
    assert len(caught) == 1 and "one `fit` at a time" in caught[0]
    assert [row["examples"] for row in monitor.epochs] == [60] and not alive()


@pytest.mark.slow
def test_gpus_lost_during_training(tmp_path, nvml):
    environ = {**os.environ, "LD_LIBRARY_PATH": str(nvml), "CUDA_VISIBLE_DEVICES": "0,1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", GPUS, tmp_path], env=environ, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = table.read(tmp_path / "monitor-epochs-worker0.csv")
    assert len(rows) == 4
    assert rows[0]["gpu0_utilization_mean"] == pytest.approx(0.93) and rows[0]["gpu1_power_w_mean"] == 412.0
    assert rows[0]["energy_j"] == rows[0]["gpu_energy_j"] > 0
    assert rows[0]["energy_per_example_j"] == pytest.approx(rows[0]["energy_j"] / 60, rel=1e-4)
    assert rows[3]["gpu0_power_w_mean"] is None and rows[3]["cpu_share_mean"] is not None
    assert done.stderr.count("GPU 1: GPU is lost") == 1 and "Uninitialized" in done.stderr


ALONE = """
import keras, numpy as np, threading, sys
from tfgpu.callbacks import Monitor
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
monitor = Monitor(sys.argv[1], every_s=0.05)
model.fit(np.ones((60, 8)), np.ones((60, 1)), epochs=2, verbose=0, callbacks=[monitor])
print([(row["steps"], row["input_wait"]) for row in monitor.epochs])
def fail(*_): raise ValueError("no")
try:
    fails = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    model.fit(np.ones((60, 8)), np.ones((60, 1)), verbose=0, callbacks=[monitor, fails])
except ValueError:
    pass
left = [thread for thread in threading.enumerate() if thread.name == "tfgpu-monitor"]
del monitor, model, fails
import gc; gc.collect()
for thread in left: thread.join(300)
print([thread.is_alive() for thread in left])
"""


@pytest.mark.slow
def test_stock_keras_without_the_repairs(tmp_path):
    environ = {**os.environ, "TFGPU_REPAIR": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path], env=environ, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["[(2, None), (2, None)]", "[False]"]


WORKER = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
kind, folder = sys.argv[1:3]
strategy = tfgpu.strategy(kind, **({"every": 4} if kind == "averaging" else {}))
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
monitor = tfgpu.callbacks.Monitor(folder, tensorboard=folder + "/logs", every_s=0.1)
x, y = np.ones((60, 8), "float32"), np.ones((60, 1), "float32")
model.fit(x, y, batch_size=7, epochs=3, verbose=0, callbacks=[monitor])
print(json.dumps([[row["epoch"], row["steps"], row["examples"]] for row in monitor.epochs]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["multi_worker", "averaging"])
def test_each_worker_watches_its_own_machine(tmp_path, together, kind):
    found = together(WORKER, {"worker": 2}, kind, tmp_path)
    # Eight batches of seven and one of four: the first worker has the odd row.
    for first, second in zip(found["worker0"], found["worker1"], strict=True):
        assert first[2] + second[2] == 60 and min(first[2], second[2]) > 20, found
    for worker in (0, 1):
        assert [row["epoch"] for row in table.read(tmp_path / f"monitor-epochs-worker{worker}.csv")] == [1, 2, 3]
        assert table.read(tmp_path / f"monitor-worker{worker}.csv")[-1]["step"] == 27
        assert list((tmp_path / f"logs/monitor-worker{worker}").glob("events.*"))


@pytest.mark.slow
@pytest.mark.processes
def test_a_coordinator_watches_its_machine(tmp_path, together):
    found = together(WORKER, {"chief": 1, "worker": 2, "ps": 1}, "parameter_server", tmp_path, wait_for="chief")
    assert [row[:2] for row in found["chief0"]] == [[1, 9], [2, 9], [3, 9]]
    assert [row["epoch"] for row in table.read(tmp_path / "monitor-epochs-worker0.csv")] == [1, 2, 3]


def test_the_cost_is_counted():
    monitor = Monitor(every_s=0.05)
    before = time.process_time()
    fit(monitor, epochs=20)
    assert 0 < monitor.cost_s <= time.process_time() - before


def test_expensive_samples_are_taken_less_often(monkeypatch, tmp_path):
    from tfgpu.callbacks import watcher

    read = watcher.Sampler.read

    def dear(self):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return read(self)

    monkeypatch.setattr(watcher.Sampler, "read", dear)
    pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: time.sleep(0.4))
    begun = time.monotonic()
    fit(Monitor(tmp_path, every_s=0.01), callbacks=[pause])
    seconds = time.monotonic() - begun
    assert len(table.read(tmp_path / "monitor-worker0.csv")) <= 2 + seconds / 2  # 20 ms of two seconds

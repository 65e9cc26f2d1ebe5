"""Tracking with MLflow, Weights & Biases, and a test tracker that fails on demand."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from tfgpu import callbacks, strategies
from tfgpu.callbacks import tracking
from tfgpu.errors import InputError, MachineError

X = np.linspace(0, 1, 8, dtype="float32")[:, None]


class Server:
    """Records what a tracker receives; it rejects the next `fails` messages."""

    def __init__(self):
        self.rows, self.files, self.closed, self.begun, self.fails = [], [], [], [], 0

    def begin(self, project, name, settings, found):
        self.begun.append((project, name, settings, found))
        return Run(self, found or f"run{len(self.begun)}")


class Run:
    def __init__(self, server, name):
        self.server, self.name = server, name

    def _take(self, into, value):
        if self.server.fails:
            self.server.fails -= 1
            raise ConnectionError("gone")
        into.append(value)

    def log(self, numbers, step, at_s):
        self._take(self.server.rows, (step, numbers))

    def add(self, file):
        self._take(self.server.files, file.name)

    def close(self, status):
        self._take(self.server.closed, status)


@pytest.fixture
def server(monkeypatch):
    made = Server()
    monkeypatch.setitem(tracking._TRACKERS, "json", made.begin)  # `json` is a package that is there
    return made


def fit(epochs, *given, replicas=2):
    with strategies.mirrored(devices=replicas).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", "mse")
    return model.fit(X, X, epochs=epochs, verbose=0, callbacks=list(given)).history


def test_each_epoch_is_sent_once_however_many_replicas(server):
    settings = {"epochs": 3, "data": "x", "options": {"api_key": "abc", "rate": 0.5}}
    history = fit(3, callbacks.Track("json", project="p", name="n", settings=settings))
    sent = {"epochs": "3", "data": "x", "options": '{"api_key": "<removed>", "rate": 0.5}'}
    assert server.begun == [("p", "n", sent, None)]
    assert [(step, numbers["loss"]) for step, numbers in server.rows] == list(enumerate(history["loss"], start=1))
    assert server.closed == ["finished"]


def test_a_lost_tracker_does_not_end_training(server, caplog):
    server.fails = 2
    fit(3, callbacks.Track("json"))
    assert [step for step, _ in server.rows] == [3] and server.closed == ["finished"]
    assert caplog.text.count("json did not accept a message: gone.") == 2


def test_a_tracker_missing_at_the_start_is_an_error(monkeypatch):
    def refuse(*_):
        raise ConnectionError("port 5000 refused")

    monkeypatch.setitem(tracking._TRACKERS, "json", refuse)
    with pytest.raises(MachineError, match="json is unavailable: port 5000 refused"):
        fit(1, callbacks.Track("json"))


class Fails(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise self.error


@pytest.mark.parametrize(("error", "status"), [(ValueError("bad"), "failed"), (KeyboardInterrupt(), "killed")])
def test_a_run_that_ends_by_an_error_is_marked_so(server, error, status):
    with pytest.raises(type(error)):
        fit(3, callbacks.Track("json"), Fails(error))
    assert server.closed == [status] and [step for step, _ in server.rows] == [1, 2]


@pytest.mark.slow
def test_a_resumed_training_continues_the_same_run(server, tmp_path):
    kept = tmp_path / "tracker.json"
    fit(1, callbacks.Track("json", remember=kept))
    fit(1, callbacks.Track("json", remember=kept))
    assert [found for *_, found in server.begun] == [None, "run1"]
    kept.write_text(json.dumps({"tracker": "wandb", "run": "a"}))
    with pytest.raises(InputError, match="was tracked with wandb"):
        fit(1, callbacks.Track("json", remember=kept))
    kept.write_text("[")
    with pytest.raises(InputError, match="is damaged. Remove it"):
        fit(1, callbacks.Track("json", remember=kept))


def test_kept_open_it_accepts_logs_after_fit(server, tmp_path):
    (tmp_path / "report.html").write_text("")
    with callbacks.Track("json") as track:
        fit(1, track)
        assert not server.closed
        track.log({"test_accuracy": np.float32(0.5), "nothing": float("nan"), "text": "a"}, step=1)
        track.add([tmp_path / "report.html"])
    assert server.rows[-1] == (1, {"test_accuracy": 0.5}) and server.files == ["report.html"]
    assert server.closed == ["finished"]


def test_another_worker_sends_nothing(server):
    fit(1, callbacks.Track("json", is_chief=False))
    assert not server.begun


@pytest.mark.slow
def test_a_wrong_name_and_a_missing_package():
    with pytest.raises(InputError, match="mlflow"):
        callbacks.Track("mlfow")
    code = "import sys; sys.modules['mlflow'] = None\nfrom tfgpu import callbacks; callbacks.Track('mlflow')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550)
    assert "pip install 'tfgpu[track]'" in ran.stderr


@pytest.mark.slow
def test_mlflow_has_the_run(tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'tfgpu[track]'")
    from mlflow.tracking import MlflowClient

    place = f"sqlite:///{tmp_path}/runs.db"
    command = [sys.executable, "-m", "tfgpu", "train", "--epochs", "2", "--model", "mlp", "--output", "run"]
    command += ["--track", "mlflow", "--project", "digits"]
    environ = {**os.environ, "MLFLOW_TRACKING_URI": place}
    for more in ([], ["--resume", "--epochs", "3"]):
        ran = subprocess.run([*command, *more], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550)
        assert ran.returncode == 0, ran.stderr
    client = MlflowClient(tracking_uri=place)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["model"] == "mlp" and run.info.run_name == "run"
    losses = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "val_loss")}
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val_loss")
    assert (
        losses == {at: float(row.split(",")[column]) for at, row in enumerate(rows[1:], start=1)} and len(losses) == 3
    )
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {
        "config.yaml",
        "metrics.csv",
        "report.html",
    }


@pytest.mark.slow
def test_wandb_has_the_run(tmp_path):
    pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'tfgpu[track]'")
    command = [sys.executable, "-m", "tfgpu", "train", "--epochs", "1", "--model", "mlp", "--output", "run"]
    environ = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command += ["--track", "wandb"]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0, ran.stderr
    name = json.loads((tmp_path / "run" / "tracker.json").read_text())["run"]
    (record,) = tmp_path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")
    assert b"val_loss" in record.read_bytes()

"""Sends settings, metrics and files to MLflow or Weights & Biases in the background."""

import importlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfgpu import atomic
from tfgpu.core import step_blocks
from tfgpu.errors import InputError, MachineError, required, unknown
from tfgpu.redact import Cleaner
from tfgpu.repairs import saving

_log = logging.getLogger(__name__)

LAST_S = 30.0
"""Seconds that the end of a training waits for unsent messages."""


class Track(keras.callbacks.Callback):
    """Sends each epoch's logs to a tracker. Only the chief sends, from a thread, so that no step waits for the network.

    If the tracker is unavailable when the training begins, `fit` fails. If it fails later, a warning is logged.

    As a context manager, it keeps the tracker's run open after `fit`, for `log` and `add`. Otherwise the run ends with
    `fit`. A run that ends with an error is marked as failed.

    Args:
        tracker: `"mlflow"` or `"wandb"`. Configure its destination as usual (`MLFLOW_TRACKING_URI`, `WANDB_MODE`); by
            default, MLflow writes to `mlflow.db` in the working directory.
        project: MLflow's experiment, or Weights & Biases' project.
        name: the displayed name of the run; None lets the tracker choose one.
        settings: recorded with the run, such as a recipe's settings; secrets are removed.
        remember: a file for the tracker's run id, so that a resumed training (`Checkpoint`) continues the same run.
            None begins a new run each time.
        is_chief: whether this worker sends; None asks the strategy.

    Raises:
        InputError: the tracker is unknown, its package is not installed, or `remember` is another tracker's.
        MachineError: when `fit` begins, the tracker is unavailable.

    Example:
        model.fit(x, y, epochs=3, callbacks=[tfgpu.callbacks.Track("mlflow", project="digits")])
    """

    every_batch = False
    has_memory = False

    def __init__(
        self,
        tracker: str,
        *,
        project: str = "tfgpu",
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        remember: str | Path | None = None,
        is_chief: bool | None = None,
    ):
        super().__init__()
        check(tracker)
        self._tracker, self._project, self._name = tracker, project, name
        cleaned = Cleaner(os.environ).facts(dict(settings or {}))
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in cleaned.items()
        }
        self._settings = texts
        self._remember = None if remember is None else Path(remember)
        self._is_chief = is_chief
        self._run: _Mlflow | _Wandb | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._sent: list[Future[None]] = []
        self._stays_open = False

    def __enter__(self) -> "Track":
        self._stays_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        self._stays_open = False
        self._close("finished" if kind is None else "failed" if issubclass(kind, Exception) else "killed")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not (saving.writes(self.model) if self._is_chief is None else self._is_chief):
            return
        if self._run is None:
            self._open()
        run = step_blocks.current()
        if run is not None and not self._stays_open:  # Without the repairs, only a `fit` that succeeds ends the run.
            run.exits.push(self.__exit__)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.log(logs or {}, step=epoch + 1)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._stays_open and step_blocks.current() is None:
            self._close("finished")

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Sends values; skips those that are not finite numbers.

        Args:
            values: by name.
            step: the epoch, from 1.
        """
        arrays = {name: np.asarray(value) for name, value in values.items()}
        scalars = {name: array for name, array in arrays.items() if array.ndim == 0 and array.dtype.kind in "biuf"}
        numbers = {name: float(value) for name, value in scalars.items() if math.isfinite(value)}
        run, now = self._run, time.time()
        if run is not None and numbers:
            self._send(lambda: run.log(numbers, step, now))

    def add(self, files: Iterable[str | Path]) -> None:
        """Sends files, such as a report."""
        run = self._run
        for file in map(Path, files):
            if run is not None:
                self._send(lambda file=file: run.add(file))

    def _open(self) -> None:
        found = self._remembered()
        try:
            self._run = _TRACKERS[self._tracker](self._project, self._name, self._settings, found)
        except Exception as error:
            raise MachineError(
                f"{self._tracker} is unavailable: {str(error).strip()[:500]} Check its server and environment "
                "variables, or train without it."
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfgpu-track")
        if self._remember is not None:
            atomic.write_text(self._remember, json.dumps({"tracker": self._tracker, "run": self._run.name}) + "\n")

    def _remembered(self) -> str | None:
        if self._remember is None or not self._remember.exists():
            return None
        try:
            kept = json.loads(self._remember.read_text(encoding="utf-8"))
            tracker, run = str(kept["tracker"]), str(kept["run"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self._remember} is damaged. Remove it to begin a new {self._tracker} run.") from None
        if tracker != self._tracker:
            raise InputError(
                f"This training was tracked with {tracker}. Received: {self._tracker!r}. Use {tracker} again."
            )
        return run

    def _send(self, what: Callable[[], None]) -> None:
        assert self._thread is not None

        def send() -> None:
            try:
                what()
            except Exception as error:
                _log.warning("%s did not accept a message: %s. The local files have its values.", self._tracker, error)

        self._sent = [each for each in self._sent if not each.done()]
        self._sent.append(self._thread.submit(send))

    def _close(self, status: str) -> None:
        if self._run is None or self._thread is None:
            return
        run, thread = self._run, self._thread
        self._send(lambda: run.close(status))
        self._run = self._thread = None
        _, late = wait(self._sent, timeout=LAST_S)
        thread.shutdown(wait=False, cancel_futures=True)
        if late:
            _log.warning("%s did not receive all values; the local files have them.", self._tracker)
        self._sent = []


class _Mlflow:
    """A tracker's run; `name` is its id there."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, str], found: str | None):
        entities = importlib.import_module("mlflow.entities")
        self._metric, parameter = entities.Metric, entities.Param
        self._client = importlib.import_module("mlflow.tracking").MlflowClient()
        if found is not None:
            self.name = found
            self._client.update_run(found, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project)
        self.name = self._client.create_run(place, run_name=name).info.run_id
        limit = 5000  # characters of a parameter that MLflow takes
        self._client.log_batch(self.name, params=[parameter(k, v[:limit]) for k, v in settings.items()])

    def log(self, numbers: Mapping[str, float], step: int, at_s: float) -> None:
        at = round(1000 * at_s)
        self._client.log_batch(self.name, metrics=[self._metric(k, v, at, step) for k, v in numbers.items()])

    def add(self, file: Path) -> None:
        self._client.log_artifact(self.name, str(file))

    def close(self, status: str) -> None:
        self._client.set_terminated(self.name, status.upper())


class _Wandb:
    """Like `_Mlflow`."""

    def __init__(self, project: str, name: str | None, settings: Mapping[str, str], found: str | None):
        how = {"resume": "allow", "id": found} if found is not None else {}
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=name, config=dict(settings), reinit="create_new", **how)
        self.name = self._run.id

    def log(self, numbers: Mapping[str, float], step: int, at_s: float) -> None:
        self._run.log(dict(numbers), step=step)

    def add(self, file: Path) -> None:
        self._run.save(str(file), base_path=str(file.parent), policy="now")

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


_TRACKERS: dict[str, type[_Mlflow | _Wandb]] = {"mlflow": _Mlflow, "wandb": _Wandb}


def check(tracker: str) -> None:
    """Checks that a tracker is known and its package installed.

    Raises:
        InputError: it is not; the message lists the trackers, or says what to install.
    """
    if tracker not in _TRACKERS:
        raise unknown("tracker", tracker, _TRACKERS)
    required(tracker, f"{tracker} is not installed", "Run pip install 'tfgpu[track]'.")

"""Resource use of a training, sampled by a background thread."""

import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import keras

from tfgpu.callbacks.watcher import Places, Watcher
from tfgpu.cluster import Cluster
from tfgpu.core import input_stats, step_blocks
from tfgpu.errors import InputError, is_number, whole_number
from tfgpu.sensors import prometheus as prometheus_format
from tfgpu.sensors.epochs import Epoch
from tfgpu.sensors.sample import Value

SAMPLES, EPOCHS, PROMETHEUS = "monitor-worker{}.csv", "monitor-epochs-worker{}.csv", "monitor-worker{}.prom"
"""A worker's files; `{}` is its number."""


class Monitor(keras.callbacks.Callback):
    """Monitors GPUs, CPU, memory, disks, network and waits for data during training, and says what limits the speed.

    A background thread takes one sample per second. No step waits for it, and it does not shorten blocks of steps.
    Without a GPU, the GPU columns are missing. Each process that trains monitors its own machine and writes its own
    files; rows are appended to the files of an earlier training. An error in the monitor does not stop the training;
    it is logged once as a warning.

    | file | |
    |---|---|
    | `monitor-worker0.csv` | one row per sample |
    | `monitor-epochs-worker0.csv` | one row per epoch: means, maxima, energy, what limited it |
    | `monitor-worker0.prom` | the newest sample for node_exporter's textfile collector |

    Args:
        folder: for the files; None writes none.
        every_s: seconds between samples. The thread waits longer if a sample uses more than a hundredth of that as CPU
            time.
        csv: whether to write the two tables; None writes them if there is a folder.
        tensorboard: a folder for TensorBoard's events, one run per worker (`monitor-worker0`); None writes none.
        prometheus: `True` writes a file in `folder`; a port on this machine, or `"host:port"`, serves it at `/metrics`
            (worker N at the port plus N); None does neither.
        worker: this process's number; None reads it from the cluster's environment.

    Attributes:
        epochs: the rows of the epochs so far, as in `monitor-epochs-worker0.csv`; complete once `fit` has ended.
        cost_s: the CPU time that the samples of the last `fit` took, in seconds.

    Raises:
        InputError: an argument is invalid.
        MachineError: when `fit` begins, the port cannot be opened.

    Example:
        >>> import tensorflow as tf
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> monitor = Monitor("run")
        >>> history = model.fit(tf.ones((2, 1)), tf.ones((2, 1)), epochs=2, callbacks=[monitor], verbose=0)
        >>> [row["examples"] for row in monitor.epochs]
        [2, 2]
    """

    every_batch = False  # Blocks of steps are enough.
    has_memory = False

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        every_s: float = 1.0,
        csv: bool | None = None,
        tensorboard: str | Path | None = None,
        prometheus: bool | int | str | None = None,
        worker: int | None = None,
    ):
        super().__init__()
        if not is_number(every_s) or every_s < 0.01:
            raise InputError(f"`every_s` must be 0.01 seconds or more. Received: every_s={every_s!r}. Try 1.")
        if folder is None and (csv or prometheus is True):
            raise InputError("`csv` and `prometheus=True` write files. Received: folder=None. Give a folder.")
        cluster = Cluster.from_environment()
        worker = max(0, cluster.rank) if worker is None else whole_number("worker", worker, minimum=0)
        self._settings = {"every_s": float(every_s), "worker": worker, "workers": cluster.size}
        base = None if folder is None else Path(os.fspath(folder))
        events = None if tensorboard is None else Path(os.fspath(tensorboard)) / f"monitor-worker{worker}"
        self._places = _places(base, csv is not False, prometheus, worker, events)
        self._watcher: Watcher | None = None
        self._forgotten: weakref.finalize[[], Monitor] | None = None
        self._fit: threading.Thread | None = None
        self._begun = self._epoch_begun = self._block_begun = 0.0
        self._block_ended: float | None = None
        self._first = self._epoch_steps = self._timed_steps = 0
        self._train_s = 0.0
        self._is_traced = False
        self._rows: int | None = None
        self._counter = input_stats.RowCounter(None)
        self._run: weakref.ref[step_blocks.Run] | None = None
        self.epochs: list[dict[str, Value]] = []
        self.cost_s: float = 0.0

    @property
    def port(self) -> int | None:
        """The port that serves Prometheus metrics now."""
        return self._watcher.port if self._watcher is not None else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if (other := self._fit) is not None and other is not threading.current_thread() and other.is_alive():
            raise InputError("A Monitor can monitor one `fit` at a time. Create another one for the second `fit`.")
        run = step_blocks.current()
        if run is not None and self._run is not None and self._run() is run:
            raise InputError("The same Monitor is in `callbacks` twice. Pass it once.")
        self.close()
        self._fit, self._run = threading.current_thread(), weakref.ref(run) if run is not None else None
        self._is_traced, self._block_ended, self.epochs = False, None, []
        self._begun, self._counter = time.monotonic(), input_stats.RowCounter(run)
        optimizer = getattr(self.model, "optimizer", None)
        step = 0 if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))
        computing_s = (lambda: input_stats.computing_s(run)) if run is not None else lambda: None
        now = {"begun": self._begun, "step": step, "computing_s": computing_s, "epochs": self.epochs}
        self._watcher = Watcher(self._places, **self._settings, **now)
        # Without the repairs, a failed `fit` does not notify its callbacks.
        self._forgotten = weakref.finalize(self, self._watcher.stop)
        if run is not None:
            run.exits.callback(self.close)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch_begun = time.monotonic()
        self._epoch_steps = self._timed_steps = 0
        self._train_s, self._block_ended, self._rows = 0.0, None, None
        self._counter.begin(self.model)
        if self._watcher is not None:
            self._watcher.epoch = epoch + 1

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._first = batch
        self._block_begun = time.monotonic() if self._block_ended is None else self._block_ended

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._block_ended = now = time.monotonic()
        # Keras numbers its own blocks (`steps_per_execution`) as if the last one were full.
        steps = min(batch, ((self.params or {}).get("steps") or batch + 1) - 1) - self._first + 1
        self._epoch_steps += steps
        if self._is_traced:
            self._timed_steps += steps
            self._train_s += now - self._block_begun
        if self._watcher is not None:
            self._watcher.note(steps, now - self._block_begun if self._is_traced else None)
        self._is_traced = True  # The first block of a `fit` includes tracing.

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._count()  # Keras resets the metrics right after this.
        self._block_ended = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._count()
        if self._watcher is not None:
            begin, end = self._epoch_begun - self._begun, time.monotonic() - self._begun
            steps = self._epoch_steps, self._train_s, self._timed_steps
            self._watcher.end(Epoch(epoch + 1, begin, end, *steps, self._rows))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after a last sample; `fit` calls this, also when it fails."""
        if self._forgotten is not None:  # It references the watcher, and so the data of the `fit`.
            self._forgotten.detach()
        self._forgotten = self._fit = None
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.finish()
            self.cost_s = watcher.cost_s

    def __getstate__(self) -> dict[str, Any]:
        """Copies the settings; a copy monitors nothing yet."""
        idle = dict.fromkeys(("_watcher", "_forgotten", "_fit", "_run"))
        return {**self.__dict__, **idle, "_counter": input_stats.RowCounter(None)}

    def _count(self) -> None:
        if self._rows is None and self._epoch_steps:
            self._rows = self._counter.count(self._epoch_steps)


def _places(base: Path | None, has_tables: bool, prometheus: Any, worker: int, events: Path | None) -> Places:
    server, samples, epochs, text = None, None, None, None
    if base is not None and has_tables:
        samples, epochs = base / SAMPLES.format(worker), base / EPOCHS.format(worker)
    if base is not None and prometheus is True:
        text = base / PROMETHEUS.format(worker)
    if prometheus is not None and not isinstance(prometheus, bool):
        host, port = prometheus_format.address(prometheus)
        server = host, port + worker if port else 0
        if server[1] > 65535:
            raise InputError(
                f"Worker {worker} serves its metrics at port `prometheus` + {worker}, which must be at most 65535. "
                f"Received: {prometheus!r}. Use 9400."
            )
    return Places(samples, epochs, text, server, events)

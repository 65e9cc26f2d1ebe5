"""Closures: a few steps that one worker runs in one call, scheduled by the coordinator with their batches."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.framework.config import is_op_determinism_enabled

from tfgpu.core import step_blocks, step_loop
from tfgpu.errors import InputError
from tfgpu.parameter_server.exact_counts import Ledger, count_in_ledger, counting
from tfgpu.parameter_server.worker_data import WorkerIterator

_log = logging.getLogger(__name__)

CLOSURES_A_WORKER = 2
"""Closures that wait or run at a time: one runs while the next one's batches travel."""
CLOSURE_BYTES = 1 << 25
"""Batches of more bytes than this are sent one a closure."""
SILENCE_S = 60
"""Seconds without a finished closure after which a warning says so: all workers may be dead."""
_LOOK_S = 1.0
_PROGRESS_S = 0.5
_RETRY_S = 0.1


@dataclass(frozen=True)
class Settings:
    """How the coordinator schedules, kept on the strategy.

    Attributes:
        max_staleness: a closure starts when all but this many just before it are done; None leaves it to the queue.
    """

    max_staleness: int | None = None


def set_settings(strategy: tf.distribute.Strategy, settings: Settings) -> None:
    """Says how models under the strategy are trained."""
    strategy._tfgpu_settings = settings


class Closures(step_loop.Steps):
    """Schedules steps of a model on the workers, several a closure, and adds up what they counted.

    Args:
        model: the compiled model.
        step_function: `model.train_step` or `model.test_step`.
    """

    def __init__(self, model, step_function: Callable):
        super().__init__(model, step_function)
        self._trial, self._jit = None, False
        self._is_training = step_function == model.train_step
        self._counts_updates = self._is_training and self.logs_are_results
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        self._workers = workers_of(self._strategy)
        self.pace = _Pace(self._workers)
        self._functions: dict[tuple, Callable] = {}
        self._run_on: _Run | None = None

    @property
    def is_out(self) -> bool:
        """Whether closures have been scheduled that nobody has waited for."""
        return self._run_on is not None

    def __call__(self, batches):
        """Schedules steps: of a `Block` or an iterator. Outside of `fit` and `evaluate` it waits for them.

        Returns:
            The logs as far as closures are done; they may be empty at first.

        Raises:
            tf.errors.OutOfRangeError: there was no batch left at all.
        """
        block = batches if isinstance(batches, step_blocks.Block) else None
        count = self._model.steps_per_execution if block is None else block.count
        iterator = batches if block is None else block.iterator
        is_there = isinstance(iterator, WorkerIterator)
        data = iterator.take(count, self._is_training) if is_there else self._taken(iterator, count)
        if block is not None:
            block.done = len(data)
        if not data:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        if self._run_on is None:
            most, check = self._workers * CLOSURES_A_WORKER, self._coordinator.done
            self._run_on = _Run(self._model, most, self._staleness, self._counts_updates, check)
        if is_there:
            self.pace.most_bytes = 1  # nothing is sent
            self._schedule_where_data_is(iterator, len(data))
        for group in [] if is_there else _alike(data):
            self._schedule(group)
        return self.join() if step_blocks.current() is None else self._progress()

    def join(self) -> dict:
        """Waits for all closures, adds what they counted to the metrics, and returns the logs."""
        run = self._run_on
        try:
            run.wait()
            self._coordinator.join()
        except Exception:
            self.stop()
            raise
        run.close()
        self._run_on = None
        for variable, total in run.totals():
            variable.assign_add(total)
        self.logs = self._logs(iter(run.parts))
        run.check_updates()
        return self.logs

    def stop(self) -> None:
        """Waits until nothing of what was scheduled runs any more, and forgets it."""
        if self._run_on is None:
            return
        run, self._run_on = self._run_on, None
        with contextlib.suppress(Exception):  # the first error is on its way to the caller
            self._coordinator.join()
        run.close()

    @property
    def _staleness(self) -> int | None:
        return getattr(self._strategy, "_tfgpu_settings", Settings()).max_staleness

    def _taken(self, iterator, count: int) -> list:
        """The next batches, at most `count`, as tensors."""
        data = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while len(data) < count:
                data.append(tf.nest.map_structure(_tensor, next(iterator)))
        if data and not self.pace.most_bytes:
            self.pace.most_bytes = _bytes(data[0])
        return data

    def _schedule(self, group: list) -> None:
        """Sends a closure its batches."""
        leaves = [[v for v in tf.nest.flatten(batch) if v is not None] for batch in group]
        is_stacked = _can_stack(leaves[0])
        arguments = [tf.stack(column) for column in zip(*leaves, strict=True)] if is_stacked else leaves[0]

        def packed(values):
            values = iter(values)
            return tf.nest.map_structure(lambda v: None if v is None else next(values), group[0])

        def batch_at(at, *arguments):
            return packed([v[at] for v in arguments] if is_stacked else arguments)

        def count_of(*arguments):
            return tf.shape(arguments[0])[0] if is_stacked else 1

        signature = [tf.TensorSpec([None, *v.shape[1:]], v.dtype) for v in arguments] if is_stacked else None
        key = repr(_kind(group[0])), is_stacked
        self._send(key, batch_at, count_of, arguments, len(group), signature)

    def _schedule_where_data_is(self, data: WorkerIterator, count: int) -> None:
        """Lets the worker that runs the closure read the batches itself."""
        arguments = [data.on_workers(self._coordinator), tf.constant(count)]
        key = repr(data.element_spec), "on workers"
        self._send(key, lambda at, data, count: data.get_next(), lambda data, count: count, arguments, count)

    def _send(self, key, batch_at: Callable, count_of: Callable, arguments: list, count: int, signature=None) -> None:
        if key not in self._functions:
            run = self._make_closure(batch_at, count_of)
            self._functions[key] = tf.function(run, autograph=False, input_signature=signature)
        number = self._run_on.enter()
        remote = self._coordinator.schedule(self._functions[key], args=tuple(arguments))
        self._run_on.follow(number, remote, count, self.pace)

    def _make_closure(self, batch_at: Callable, count_of: Callable) -> Callable:
        """The function that a worker runs: the steps on the batches, one after another.

        Args:
            batch_at: the batch of a number, from 0, by that and the closure's arguments.
            count_of: the number of batches, by the closure's arguments.
        """
        metrics = _unique(self._model.metrics)
        variables = _unique(v for metric in metrics for v in metric.variables)
        for metric in metrics:
            count_in_ledger(type(metric))
        _refuse_metrics(variables)

        def step(batch, state):
            with counting(Ledger(variables, state)) as ledger:
                parts = self._only_step(batch, False)
                return [tf.ensure_shape(v, s.shape) for v, s in zip(ledger.values(), state, strict=True)], parts

        def run(*arguments):
            self._picks = []
            began = _clock()
            with tf.control_dependencies([began]):
                state = [tf.zeros(v.shape, v.dtype) for v in variables]

            def another(at, state, kept):
                state, parts = self._strategy.run(step, args=(batch_at(at, *arguments), state))
                return at + 1, state, self._keep(parts, kept)

            begin, count = (0, state, tf.raw_ops.OptionalNone()), count_of(*arguments)
            done, state, kept = tf.while_loop(lambda at, *_: at < count, another, begin)
            parts = self._kept_parts(kept)
            with tf.control_dependencies([done, *state, *parts]):
                return state, parts, _clock() - began

        return run

    def _progress(self) -> dict:
        state = self._run_on.news()
        if state is not None and self._layout is not None:
            self._run_on.shown = {k: v.numpy() for k, v in self._logs(iter(self._run_on.parts), state).items()}
        return self._run_on.shown


class _Pace(step_blocks.Pace):
    """How many steps a closure has: towards the data's end fewer, so that no worker waits long for another's last."""

    def __init__(self, workers: int):
        super().__init__()
        self._workers, self.most_bytes = workers, 0

    def of(self, left: float) -> int:
        most = max(1, CLOSURE_BYTES // self.most_bytes) if self.most_bytes else 1
        if math.isfinite(left):
            most = min(most, max(1, math.ceil(left / (CLOSURES_A_WORKER * self._workers))))
        return min(self.steps, most)


class _Run:
    """Closures of one epoch that are scheduled, and what those counted that are done.

    Args:
        model: whose metrics they count.
        most: closures that may be out at a time.
        ahead: how many closures just before one may be undone when it starts; None for any number.
        counts_updates: each step is one update of the model's optimizer.
        check: raises what has failed for good, such as a parameter server that is gone.
    """

    def __init__(
        self, model, most: int, ahead: int | None, counts_updates: bool, check: Callable[[], object] = lambda: None
    ):
        self._model, self._most, self._ahead, self._check = model, most, ahead, check
        self._variables = _unique(v for metric in model.metrics for v in metric.variables)
        self._totals = [0] * len(self._variables)
        self._changed = threading.Condition()
        self._out: set[int] = set()
        self._next = self._steps = self._last = 0
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="tfgpu-closure")
        self._is_new, self._shown_at, self._at_first = False, 0.0, None
        self.parts: list = []
        self.shown: dict = {}
        self._before = int(model.optimizer.iterations) if counts_updates and model.optimizer is not None else None

    def enter(self) -> int:
        """Waits until another closure may start; returns its number."""
        with self._changed:
            self._wait_for(self._has_room)
            self._out.add(self._next)
            self._next += 1
            return self._next - 1

    def _has_room(self) -> bool:
        is_near = self._ahead is None or not self._out or self._next - min(self._out) <= self._ahead
        return is_near and len(self._out) < self._most

    def follow(self, number: int, remote, count: int, pace: _Pace) -> None:
        """Takes in, in a thread, what a scheduled closure of `count` steps returns."""
        self._threads.submit(self._take_in, number, remote, count, pace, time.monotonic())

    def _take_in(self, number: int, remote, count: int, pace: _Pace, began: float) -> None:
        try:
            state, parts, seconds = self._fetched(remote)
        except BaseException as error:  # handed to whoever waits
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            # In float64, as the order in which closures end is no run's twin.
            self._totals = [total + np.asarray(v, _wide(v)) for total, v in zip(self._totals, state, strict=True)]
            if number >= self._last:
                self._last, self.parts = number, parts
            self._steps += count
            # Where the worker has no clock, with the time that the closure waited for it.
            pace.note(count, float(seconds) if math.isfinite(seconds) else time.monotonic() - began)
            self._is_new = True
            self._out.discard(number)
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until no closure is out."""
        with self._changed:
            self._wait_for(lambda: not self._out)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not self._changed.wait_for(lambda: self._error is not None or condition(), timeout=_LOOK_S):
            try:
                self._check()
            except Exception as error:
                self._error = self._error or error
            if time.monotonic() - began > SILENCE_S:
                began = time.monotonic()
                _log.warning("No worker has finished anything for %d s; %d closures wait.", SILENCE_S, len(self._out))
        if self._error is not None:
            raise self._error

    def _fetched(self, remote):
        """What a closure returned. Where its worker dies before that has arrived, what it returns on another worker."""
        while True:
            try:
                return remote.fetch()
            except tf.errors.OpError as error:
                if self._error is not None or not cluster_coordinator._is_worker_failure(error):
                    raise
                time.sleep(_RETRY_S)  # TensorFlow runs the closure again, and puts the new values into `remote`

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=True)

    def totals(self, add_to=None) -> list[tuple]:
        """The metrics' variables and what to add to each; with `add_to`, the sums of its values and that."""
        with self._changed:
            sums = self._totals if add_to is None else [a + t for a, t in zip(add_to, self._totals, strict=True)]
            return [(v, np.asarray(t).astype(v.dtype)) for v, t in zip(self._variables, sums, strict=True)]

    def news(self) -> list[tuple] | None:
        """The metrics' variables and their values so far; None for half a second after the last time."""
        if not self._is_new or time.monotonic() - self._shown_at < _PROGRESS_S:
            return None
        self._is_new, self._shown_at = False, time.monotonic()
        if self._at_first is None:
            self._at_first = [v.numpy() for v in self._variables]
        return self.totals(add_to=self._at_first)

    def check_updates(self) -> None:
        """Says so where a worker died in a closure: the updates that it had applied stay, and come again."""
        if self._before is None:
            return
        extra = int(self._model.optimizer.iterations) - self._before - self._steps
        if extra:
            _log.warning(
                "Updates that workers applied and died before their closures were done: %d. Those closures ran again "
                "elsewhere. `optimizer.iterations` counts updates; metrics count each example once.",
                extra,
            )


def workers_of(strategy: tf.distribute.Strategy) -> int:
    """The number of workers of a strategy with parameter servers."""
    return max(1, strategy.extended._num_workers)


def _refuse_metrics(variables: list) -> None:
    for variable in variables:
        if variable.aggregation != "sum":
            raise InputError(
                f"The metric's variable {variable.path!r} has aggregation={variable.aggregation!r}: workers can only "
                "add up what each has counted. Write the metric with sums (aggregation='sum')."
            )


def _clock() -> tf.Tensor:
    """The worker's clock in seconds; NaN where TensorFlow has none, because operations shall be deterministic."""
    return tf.constant(math.nan, tf.float64) if is_op_determinism_enabled() else tf.timestamp()


def _unique(values) -> list:
    return list({id(v): v for v in values}.values())


def _tensor(value):
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


def _kind(batch):
    return tf.nest.map_structure(lambda v: None if v is None else tf.type_spec_from_value(v), batch)


def _can_stack(leaves: list) -> bool:
    return bool(leaves) and all(isinstance(v, tf.Tensor) for v in leaves)


def _alike(data: list) -> list[list]:
    """The batches in runs of equal shapes, which travel as one tensor each; ragged and sparse ones by themselves."""
    groups, before = [], None
    for batch in data:
        kind = repr(_kind(batch)) if _can_stack([v for v in tf.nest.flatten(batch) if v is not None]) else None
        if groups and kind is not None and kind == before:
            groups[-1].append(batch)
        else:
            groups.append([batch])
        before = kind
    return groups


def _bytes(batch) -> int:
    parts = [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]
    return max(1, sum(int(tf.size(v)) * v.dtype.size for v in parts))


def _wide(value) -> np.dtype:
    return np.float64 if np.asarray(value).dtype.kind == "f" else np.asarray(value).dtype

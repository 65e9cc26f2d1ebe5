"""The closures of one epoch that are scheduled, and the sums of what the finished ones counted."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import step_blocks

_log = logging.getLogger(__name__)

SILENCE_S = 60
"""Seconds without a finished closure after which a warning says so: all workers may be dead."""
_CHECK_S = 1.0
_PROGRESS_S = 0.5
_RETRY_S = 0.1


class ScheduledClosures:
    """Waits for closures in threads, and adds up what they return.

    Args:
        model: the model whose metrics they count.
        limit: how many closures may be unfinished at a time.
        max_staleness: how many of the closures just before one may be unfinished when it starts; None: any number.
        counts_updates: whether each step is one update of the model's optimizer.
        check: raises an error that ends the training, such as a parameter server that is gone.

    Attributes:
        parts: what the latest finished closure returned besides the metrics.
        shown: the logs that were last shown.
    """

    def __init__(
        self,
        model,
        limit: int,
        max_staleness: int | None,
        counts_updates: bool,
        check: Callable[[], object] = lambda: None,
    ):
        self._model, self._limit, self._max_staleness, self._check = model, limit, max_staleness, check
        self._variables = unique(v for metric in model.metrics for v in metric.variables)
        self._totals = [0] * len(self._variables)
        self._changed = threading.Condition()
        self._unfinished: set[int] = set()
        self._next = self._steps = self._latest = 0
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="tfgpu-closure")
        self._has_news, self._shown_at, self._initial = False, 0.0, None
        self.parts: list = []
        self.shown: dict = {}
        self._before = int(model.optimizer.iterations) if counts_updates and model.optimizer is not None else None

    def enter(self) -> int:
        """Waits until another closure may start; returns its number."""
        with self._changed:
            self._wait_for(self._has_room)
            self._unfinished.add(self._next)
            self._next += 1
            return self._next - 1

    def _has_room(self) -> bool:
        bound = self._max_staleness
        is_fresh = bound is None or not self._unfinished or self._next - min(self._unfinished) <= bound
        return is_fresh and len(self._unfinished) < self._limit

    def follow(self, number: int, remote, count: int, pace: step_blocks.Pace) -> None:
        """Waits in a thread for what a scheduled closure of `count` steps returns, and adds it up."""
        self._threads.submit(self._add, number, remote, count, pace, time.monotonic())

    def _add(self, number: int, remote, count: int, pace: step_blocks.Pace, began: float) -> None:
        try:
            state, parts, seconds = self._fetch(remote)
        except BaseException as error:  # raised in the waiting thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return
        with self._changed:
            # In float64: the order in which closures finish differs from run to run.
            self._totals = [total + np.asarray(v, _wide(v)) for total, v in zip(self._totals, state, strict=True)]
            if number >= self._latest:
                self._latest, self.parts = number, parts
            self._steps += count
            # A worker without a clock returns NaN; then the time includes the closure's wait for a worker.
            pace.note(count, float(seconds) if math.isfinite(seconds) else time.monotonic() - began)
            self._has_news = True
            self._unfinished.discard(number)
            self._changed.notify_all()

    def _fetch(self, remote):
        """What a closure returned. If its worker dies first, what it returns on another worker."""
        while True:
            try:
                if (found := distribute.fetch(remote)) is not None:
                    return found
            except tf.errors.OpError as error:
                if self._error is not None or not distribute.is_worker_failure(error):
                    raise
            time.sleep(_RETRY_S)  # TensorFlow runs the closure again, and puts the new values into `remote`

    def wait(self) -> None:
        """Waits until all closures have finished."""
        with self._changed:
            self._wait_for(lambda: not self._unfinished)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not self._changed.wait_for(lambda: self._error is not None or condition(), timeout=_CHECK_S):
            try:
                self._check()
            except Exception as error:
                self._error = self._error or error
            if time.monotonic() - began > SILENCE_S:
                began = time.monotonic()
                count = len(self._unfinished)
                _log.warning("No worker has finished a closure for %d s; %d closures are waiting.", SILENCE_S, count)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=True)

    def totals(self, add_to=None) -> list[tuple]:
        """The metrics' variables, each with what was counted; plus the values of `add_to`, if given."""
        with self._changed:
            sums = self._totals if add_to is None else [a + t for a, t in zip(add_to, self._totals, strict=True)]
            return [(v, np.asarray(t).astype(v.dtype)) for v, t in zip(self._variables, sums, strict=True)]

    def news(self) -> list[tuple] | None:
        """The metrics' variables with their current values; None for half a second after the last time."""
        if not self._has_news or time.monotonic() - self._shown_at < _PROGRESS_S:
            return None
        self._has_news, self._shown_at = False, time.monotonic()
        if self._initial is None:
            self._initial = [v.numpy() for v in self._variables]
        return self.totals(add_to=self._initial)

    def check_updates(self) -> None:
        """Warns if a worker died in a closure: the updates that it had applied stay, and are applied again."""
        if self._before is None:
            return
        extra = int(self._model.optimizer.iterations) - self._before - self._steps
        if extra:
            _log.warning(
                "%d updates came from workers that died before their closures were done. Those closures ran again "
                "elsewhere, so these updates were applied twice. `optimizer.iterations` counts updates; metrics count "
                "each example once.",
                extra,
            )


def unique(values) -> list:
    """The values without repetitions, by identity, in their order."""
    return list({id(v): v for v in values}.values())


def _wide(value) -> np.dtype:
    return np.float64 if np.asarray(value).dtype.kind == "f" else np.asarray(value).dtype

"""Compares the replicas while `fit` runs: between blocks of steps, and before a callback of tfgpu or Keras saves.

A comparison takes time, so by default it is repeated so rarely that it takes at most `SHARE` of the training. On
several workers all decide alike: from the number of steps, from times that all have agreed on.
"""

import hashlib
import logging
import time
from collections.abc import Iterable

import keras
import numpy as np

from tfgpu.compat import slots
from tfgpu.compat.keras import tree
from tfgpu.compat.variables import held
from tfgpu.consistency import differences, digests, settings, stock_saves
from tfgpu.core import extensions, replication, step_blocks
from tfgpu.core.state import broadcast, training_state
from tfgpu.errors import ReplicasDiffer

SHARE = 0.01
"""The share of the training's time that comparisons may take by default."""
FIRST_S = 2e-3
"""How long the first comparison takes for each copy of a variable: its function is traced then."""
_log = logging.getLogger(__name__)


class Watch:
    """Compares the replicas of one `fit`.

    Args:
        model: the model that trains.
        checks: how often, and what becomes of a difference.
        callbacks: of the `fit`.

    Attributes:
        steps: done in this `fit`.
        comparisons: made in this `fit`.
        seconds: that they took, on the mean of the workers.
    """

    def __init__(self, model: keras.Model, checks: settings.Checks, callbacks: Iterable = ()):
        self._model, self._checks, self._strategy = model, checks, model.distribute_strategy
        self._saves = stock_saves.StockSaves(callbacks)
        self._spans = replication.spans_processes(self._strategy)
        self._cost: float | None = None
        self._last, self._since = None, 0.0
        self.steps = self.comparisons = 0
        self.seconds = 0.0

    def left(self) -> int:
        """The most steps before the next comparison must be made."""
        return self._checks.every - self.steps % self._checks.every

    def after_block(self, steps: int, seconds: float) -> None:
        """Compares if it is time to, or if one of Keras's callbacks saves next.

        Args:
            steps: of the block.
            seconds: that it took, the same number on all workers.
        """
        self.steps, self._since = self.steps + steps, self._since + seconds
        every = self._checks.every
        if every is None:
            is_due = SHARE * self._since >= (self._first_cost() if self._cost is None else self._cost)
        else:
            is_due = self.steps // every > (self._last or 0) // every
        if self._saves.come_after(steps) or is_due:
            self.compare()

    def before_steps(self, block: object) -> None:
        """Learns when Keras's callbacks save. On several workers, each must call it."""
        self._saves.agree(self._strategy if self._spans else None)

    def before_epoch_end(self) -> None:
        """Compares if one of Keras's callbacks may save at the end of an epoch."""
        if self._saves.at_epoch_end:
            self.before_reading()

    def before_reading(self) -> None:
        """Compares, if steps have run since the last comparison. On several workers, each must call it."""
        if self._last != self.steps:
            self.compare()

    def compare(self) -> None:
        """Compares all copies of all variables. On several workers, each must call it.

        Raises:
            ReplicasDiffer: some differ, or cannot be mended.
        """
        for value in tree.flatten(getattr(self._model.train_function, "logs", None) or {}):
            np.asarray(value)  # a GPU may still be computing
        began, is_first = time.perf_counter(), self._cost is None
        found = digests.compared(self._model)
        names, variables = list(found), list(found.values())
        if is_first:
            digests.of_copies(self._model, variables)  # traces it
            began = time.perf_counter()
        mine = digests.of_copies(self._model, variables)
        table, places = self._of_all(mine, began) if self._spans else (mine, [self.steps])
        if not self._spans:
            self._note_cost(time.perf_counter() - began)
        self.comparisons, self._since = self.comparisons + 1, 0.0
        equal_at, self._last = self._last, self.steps
        if len(set(places)) > 1:
            told = ", ".join(f"worker {at}: {place}" for at, place in enumerate(places))
            raise ReplicasDiffer(f"The workers have done different numbers of steps in this `fit`: {told}.")
        difference = None if table is None else differences.find(table)
        if difference is not None:
            self._act_on(difference, names, variables, equal_at)

    def _of_all(self, mine: np.ndarray, began: float) -> tuple[np.ndarray | None, list[int]]:
        """All replicas' digests, [replicas, variables], or None if they are equal; and each worker's steps."""
        is_alike = bool((mine == mine[:1]).all())
        hashed = int.from_bytes(hashlib.sha256(mine[:1].tobytes()).digest()[:8], "little", signed=True)
        cost = int(1e9 * (time.perf_counter() - began))
        facts = broadcast.of_all_workers(
            self._strategy, np.array([hashed, is_alike, mine.shape[1], self.steps, cost], "int64")
        )
        self._note_cost(float(np.mean(facts[:, 4])) / 1e9)
        places = facts[:, 3].tolist()
        if (facts[:, 0] == facts[0, 0]).all() and facts[:, 1].all():
            return None, places
        if (facts[:, 2] != mine.shape[1]).any():
            told = ", ".join(f"worker {at}: {count}" for at, count in enumerate(facts[:, 2].tolist()))
            raise ReplicasDiffer(f"The workers' models have different numbers of variables: {told}.", step=self.steps)
        return broadcast.of_all_workers(self._strategy, mine).reshape(-1, mine.shape[1]), places

    def _act_on(self, difference: differences.Difference, names: list, variables: list, equal_at: int | None) -> None:
        devices = len(self._strategy.extended.worker_devices) if self._spans else None
        paths = [getattr(variable, "path", name) for name, variable in zip(names, variables, strict=True)]
        if not self._checks.goes_on:
            raise differences.stop(difference, paths, devices, self.steps, equal_at)
        for at in difference.variables:
            self._mend(variables[at])
        said = differences.message(difference, paths, devices, self.steps, equal_at)
        _log.warning("%s Training continues from the chief's weights.", said)

    def _mend(self, variable: keras.Variable) -> None:
        """Gives every copy the value of the chief's first one."""
        copies = held(variable).values
        value = np.array(copies[0].numpy())
        if self._spans:
            content = broadcast.bytes_from_chief(self._strategy, value.tobytes())
            value = np.frombuffer(content, value.dtype).reshape(value.shape)
        for copy in copies:
            copy.assign(value)

    def _first_cost(self) -> float:
        """What the first comparison will cost, tracing included, by the number of copies."""
        optimizer = self._model.optimizer
        variables = len(self._model.variables) + (len(optimizer.variables) if optimizer is not None else 0)
        return FIRST_S * variables * len(self._strategy.extended.worker_devices)

    def _note_cost(self, seconds: float) -> None:
        self.seconds += seconds
        self._cost = seconds if self._cost is None else (self._cost + seconds) / 2


def watch_of(model: keras.Model) -> Watch | None:
    """What compares the replicas of a model; None while it does not train."""
    return slots.get(model, "replica_watch")


def _start(run: step_blocks.Run) -> None:
    """Compares the replicas of a `fit` that begins."""
    strategy = run.model.distribute_strategy
    checks = settings.of(strategy)
    if run.kind != "train" or checks is None or checks.every == 0 or strategy.num_replicas_in_sync == 1:
        return
    if replication.local_training_of(strategy) is not None:
        return
    kept = slots.of(run.model)
    watch = kept.replica_watch = Watch(run.model, checks, step_blocks.listed(run.arguments.get("callbacks")))
    run.exits.callback(setattr, kept, "replica_watch", None)
    run.before_steps.append(watch.before_steps)
    run.after_block.append(watch.after_block)
    run.epoch_ends.append(watch.before_epoch_end)
    if checks.every:
        run.ends.append(watch.left)


class _BeforeSaving(training_state.StateProvider):
    """Compares the replicas before a checkpoint reads them, so that what is saved is good."""

    def settle(self, model) -> None:
        watch = watch_of(model)
        if watch is not None and replication.replica_context() is None:
            watch.before_reading()


extensions.run_starts.register(_start)
extensions.state_providers.register(_BeforeSaving())

"""Compares the replicas while `fit` runs: between blocks of steps, and before a callback of tfgpu or Keras saves.

A comparison takes time, so by default it is repeated so rarely that it takes at most `SHARE` of the training. On
several workers all decide alike: from the number of steps, from times that all have agreed on.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.callbacks import batches_since_save
from tfgpu.compat.keras import tree
from tfgpu.compat.variables import held
from tfgpu.consistency import digests, settings
from tfgpu.core import extensions, replication, step_blocks
from tfgpu.core.state import broadcast, training_state
from tfgpu.errors import ReplicasDiffer

SHARE = 0.01
"""The share of the training's time that comparisons may take by default."""
FIRST_S = 2e-3
"""How long the first comparison takes for each copy of a variable: its function is traced then."""
_MOST_NAMED = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Difference:
    """Where the replicas' digests differ.

    Attributes:
        variables: positions of the variables that are not the same on all replicas, in order.
        replicas: those that differ from the majority in the first of them; without a majority, all.
        are_known: a majority holds one value, so that the others are the ones that differ.
    """

    variables: tuple[int, ...]
    replicas: tuple[int, ...]
    are_known: bool


def find(table: np.ndarray) -> Difference | None:
    """Compares digests.

    Args:
        table: [replicas, variables].

    Returns:
        None if all replicas have the same.

    Example:
        >>> find(np.array([[1, 2], [1, 2], [1, 3]]))
        Difference(variables=(1,), replicas=(2,), are_known=True)
        >>> find(np.array([[1, 2], [1, 3]]))
        Difference(variables=(1,), replicas=(0, 1), are_known=False)
    """
    differing = tuple(int(at) for at in np.flatnonzero((table != table[:1]).any(0)))
    if not differing:
        return None
    column = table[:, differing[0]].tolist()
    (value, count), *_ = Counter(column).most_common(1)
    is_known = 2 * count > len(column)
    others = tuple(at for at, each in enumerate(column) if not is_known or each != value)
    return Difference(differing, others, is_known)


def _message(found: Difference, paths: Sequence[str], devices: int | None, step: int, equal_at: int | None) -> str:
    """Says who differs.

    Args:
        found: from `find`.
        paths: of all variables.
        devices: replicas in each worker; None if there is one process.
        step: steps of this `fit` done.
        equal_at: the step after which all were last found equal.
    """
    names = [_name(replica, devices) for replica in found.replicas[:_MOST_NAMED]]
    names += ["others"] if len(found.replicas) > _MOST_NAMED else []
    told = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
    verb = "differ" if len(names) > 1 else "differs"
    who = f"{told} {verb} from the other replicas" if found.are_known else f"{told} differ from each other"
    what = f"{paths[found.variables[0]]!r}"
    if len(found.variables) > 1:
        what += f", and in {len(found.variables) - 1} more variables, up to {paths[found.variables[-1]]!r}"
    before = "" if equal_at is None else f"; after step {equal_at} all were equal"
    return f"After step {step} of this `fit`, {who}, first in {what}{before}."


def _name(replica: int, devices: int | None) -> str:
    if devices is None:
        return f"replica {replica}"
    worker, device = divmod(replica, devices)
    return f"worker {worker}" if devices == 1 else f"replica {replica} (worker {worker}, device {device})"


class StockSaves:
    """When Keras's own callbacks save in one `fit`, those with `save_freq`, so that the replicas are compared before.

    `ModelCheckpoint` and `BackupAndRestore` write what the chief holds, and the other workers need not have them. So
    all workers go by the chief's callbacks, and compare where all of them come: at an epoch's end before any callback,
    or after the steps at which a callback with `save_freq=N` saves. It counts as Keras does, except where a `fit`
    resumes within an epoch: there a new `ModelCheckpoint` counts the epoch's earlier batches too, and the comparison
    comes up to N - 1 steps away from its save.

    Args:
        callbacks: of this worker.

    Attributes:
        at_epoch_end: a callback may save at the end of an epoch.

    Example:
        >>> saves = StockSaves([keras.callbacks.ModelCheckpoint("at_{batch}.keras", save_freq=3)])
        >>> saves.agree(None)
        >>> [saves.come_after(1) for _ in range(4)]
        [False, False, True, False]
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]):
        self._callbacks = [each for each in callbacks if _saves(getattr(each, "save_freq", None))]
        self._counts: list[list[int]] = []
        self.at_epoch_end = False

    def agree(self, strategy: tf.distribute.Strategy | None) -> None:
        """Goes by the chief's callbacks from here on. Every worker must call it.

        Args:
            strategy: of several workers; None for one process.
        """
        mine = [[each.save_freq, batches_since_save(each)] for each in self._callbacks]
        found = mine if strategy is None else json.loads(broadcast.texts_of_all_workers(strategy, json.dumps(mine))[0])
        self.at_epoch_end = any(every == "epoch" for every, _ in found)
        self._counts = [each for each in found if isinstance(each[0], int)]

    def come_after(self, steps: int) -> bool:
        """Counts steps; returns whether a callback saves after them."""
        saves = False
        for count in self._counts:
            count[1] += steps
            if count[1] >= count[0]:
                count[1], saves = 0, True
        return saves


def _saves(every: object) -> bool:
    return every == "epoch" or isinstance(every, int) and every > 0


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
        self._saves = StockSaves(callbacks)
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
        difference = None if table is None else find(table)
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

    def _act_on(self, difference: Difference, names: list, variables: list, equal_at: int | None) -> None:
        devices = len(self._strategy.extended.worker_devices) if self._spans else None
        paths = [getattr(variable, "path", name) for name, variable in zip(names, variables, strict=True)]
        said = _message(difference, paths, devices, self.steps, equal_at)
        if not self._checks.goes_on:
            raise ReplicasDiffer(
                f"{said} Either memory or a device failed (see `tfgpu doctor`), or one worker runs code that the "
                "others do not, such as a callback. Checkpoints are written only if all are equal: start the same "
                "command again to resume from the newest. To continue from the chief's weights instead, use "
                "`tfgpu.strategy(on_difference='chief')`.",
                replicas=difference.replicas,
                variable=paths[difference.variables[0]],
                step=self.steps,
            )
        for at in difference.variables:
            self._mend(variables[at])
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

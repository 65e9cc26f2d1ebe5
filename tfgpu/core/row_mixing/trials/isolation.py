"""Runs a user's function on the side, as a replica that holds some of the rows: what it does leaves no trace.

A trial runs while a step is traced. It gets a thread of its own, with no graph, no gradient tape and no scope around
it, and runs eagerly. Keras variables are read from a stateless scope, which keeps what is assigned; TensorFlow's own
variables, what Python holds and the state of random generators are put back.
"""

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import tensorflow as private_tf
from tfgpu.core import replication, step_context
from tfgpu.core.row_mixing.trials.step_recorder import Recorder
from tfgpu.core.state import layer_state, python_places, python_state
from tfgpu.core.state.trial_scope import Apart
from tfgpu.core.step_context import RowRange, Step
from tfgpu.errors import InputError

_SEED = 7_340_033


@dataclass(frozen=True)
class TrialShard:
    """A shard of a drawn batch: as a slice of its rows, and as the range that a replica would hold."""

    first: int
    count: int
    total: int

    def of(self, table: np.ndarray | tf.Tensor):
        """These rows of a table that has one or several for each row of the batch."""
        each = int(table.shape[0]) // self.total
        return table[self.first * each : (self.first + self.count) * each]

    @property
    def share(self) -> float:
        return self.count / self.total

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """In the block this thread is a replica that holds these rows and meets no other."""
        rows = RowRange(*(tf.constant(number, tf.int32) for number in (self.count, self.first, self.total)))
        facts = Step(rows, tf.constant(self.share, tf.float32), local_forward=True)
        with step_context.scope(step=facts, keeps_own_state=True):
            yield


def shards_of(rows: int) -> tuple[TrialShard, TrialShard, TrialShard]:
    """A batch of so many rows, whole and in two shards, neither of an even length if the rows are."""
    first = (rows - 1) // 2
    return TrialShard(0, rows, rows), TrialShard(0, first, rows), TrialShard(first, rows - first, rows)


def run(function: Callable[[], Any]) -> Any:
    """Runs a function in a thread that knows nothing of the step that is traced; returns or raises what it does."""
    if step_context.current().is_trying:
        return function()
    context, state, found = replication.replica_context(), private.copied_thread_state(), []

    def work():
        private.thread_state().update(state)
        try:
            replica = contextlib.nullcontext()
            if context is not None:
                replica = tf.distribute.ReplicaContext(context.strategy, context.replica_id_in_sync_group)
            with step_context.scope(is_trying=True), kept_draws(), replica, tf.device("CPU:0"):
                found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    with tf.init_scope(), hidden_kernel_errors():
        thread = threading.Thread(target=work, name="tfgpu trial")
        thread.start()
        thread.join()
    ((result, error),) = found
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def kept_draws(seed: int = 0) -> Iterator[None]:
    """What draws random numbers within leaves those that come afterward as they would be."""
    python, numpy, tensorflow = random.getstate(), np.random.get_state(), private_tf.eager_random()
    before = tensorflow.getstate() if tensorflow is not None else None
    if tensorflow is not None:
        tensorflow.seed(_SEED + seed)  # TensorFlow goes on where an operation has the seed of an earlier one
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if tensorflow is not None:
            tensorflow.setstate(before)


_MOST_EQUAL = 100  # a loop may end where two numbers are not equal


class Sandbox:
    """Runs of a user's code of which nothing stays: variables, what Python holds and random states are put back.

    Args:
        things: the code, and what it works on.
        layers: where given, of all layers these alone may be changed.

    Attributes:
        is_later: runs see the counters as they are after many steps.
        beyond: as `Apart`'s.
        has_compared: the code has compared single numbers by `==`, and they were not equal: as a count of steps with
            that of the step in which something happens.
        has_equal: such numbers count as equal.
    """

    is_later, beyond, has_compared, has_equal = False, 0, False, False

    def __init__(self, *things: object, layers: Iterable[keras.layers.Layer] | None = None):
        self._kept = python_state.Kept([*things, private.thread_state()], layers)
        self._made: list[weakref.ref] = []
        self._left = _MOST_EQUAL

    def counts_as_equal(self) -> bool:
        """For `private.comparing`: whether two numbers count as equal, up to a hundred times in a run."""
        self.has_compared, self._left = True, self._left - 1
        return self.has_equal and self._left >= 0

    @contextlib.contextmanager
    def around(self, found: Recorder, seed: int = 0) -> Iterator[Apart]:
        """Surrounds one run, and notes in `found` what it would assign."""
        scope, self._left = Apart(self._kept.variables, is_later=self.is_later, beyond=self.beyond), _MOST_EQUAL
        try:
            with kept_draws(seed), scope, self._kept.without_iterators(), layer_state.noting_assignments() as noted:
                yield scope
            found.own_reads = {*scope.own_reads}
            found.assigned, found.has_made = scope.assigned(noted), bool(scope.made_variables())
            found.changes = self._kept.changes()
            found.generators = self._kept.draws(found.changes)
            found.counts = self._kept.counts(found.changes)
            found.one_copy = [key for key in scope.with_one_copy() if key in found.assigned]
        finally:
            self._made += map(weakref.ref, scope.made_variables())
            scope.restore()
            self._kept.put_back()

    def check_nothing_stays(self) -> None:
        """Looks for variables that the runs have made, and that something still holds.

        Raises:
            InputError: there is one, which a real run would find in the place of its own.
        """
        if not any(each() is not None for each in self._made):
            return
        gc.collect()
        left = [each() for each in self._made if each() is not None]
        if left:
            names = ", ".join(repr(getattr(each, "path", each.name)) for each in left[:3])
            raise InputError(
                f"The code creates variables in its first call ({names}). tfgpu tries it before the first step, and "
                "cannot remove them from where the code keeps them. Create them before `fit`, within "
                "`strategy.scope()`, or keep them in an attribute of the model."
            )


def tensors_in(things: Iterable[object]) -> dict[tuple[int, str], tf.Tensor]:
    """The tensors that objects hold directly in attributes, by object's place and name."""
    return {
        (at, name): value
        for at, thing in enumerate(things)
        for name, value in vars(thing).items()
        if isinstance(value, python_places.TENSORS)
    }


# Up to TensorFlow 2.19, the level follows the date and the time; since 2.20, it is the line's first letter.
_LINES = r"^([IWE][0-9]{4}|[0-9-]{10} [0-9:.]+: [IWE]) .*\b(op_kernel|local_rendezvous)\.cc:[0-9]+\] "
_entered = threading.Lock()


@contextlib.contextmanager
def hidden_kernel_errors() -> Iterator[None]:
    """A trial's failures stay off the screen: TensorFlow's kernels write a warning for each, naming values of ours.

    A label of -100 in cross-entropy is tried because some losses ignore it. Where one does not, the kernel fails, the
    trial goes on without that label, and the user would read that -100 is no valid label.

    A process filters file descriptor 2, which TensorFlow's C++ code writes to. It outlives a crash of this one.

    Everything else that any thread writes meanwhile appears at once. TF_CPP_MIN_LOG_LEVEL=0 shows all.
    """
    is_first = _entered.acquire(blocking=False)
    try:
        shown = _filter() if is_first and os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1" else None
        try:
            yield
        finally:
            if shown is not None:
                _end(*shown)
    finally:
        if is_first:
            _entered.release()


def _filter() -> tuple[int, subprocess.Popen] | None:
    """The screen, and the process that writes to it; None without a screen or `grep`."""
    try:
        screen = os.dup(2)
    except OSError:
        return None
    try:
        command = ["grep", "--line-buffered", "-avE", _LINES]
        process = subprocess.Popen(  # in a session of its own, which Ctrl-C does not reach
            command, stdin=subprocess.PIPE, stdout=screen, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:
        os.close(screen)
        return None
    _flush()
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    return screen, process


def _end(screen: int, process: subprocess.Popen) -> None:
    _flush()
    os.dup2(screen, 2)
    os.close(screen)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that was started meanwhile has the same screen
        process.wait(timeout=1)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()

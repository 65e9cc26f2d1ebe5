"""Records some calls after the first ones, in `fit` or a hand-written loop."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from tfgpu import run as scripts
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError, no_script, positive, whole_number
from tfgpu.measure.profiling import hooks, trace, verdict, writing
from tfgpu.measure.profiling.verdict import Report
from tfgpu.recipes import building, runner
from tfgpu.recipes.recipe import Recipe

_LEAST, _LEAST_S, _MOST = 3, 0.3, 200


class Finished(BaseException):
    """Ends a script once enough is recorded. Not an `Exception`, so that scripts do not catch it."""


class Session:
    """Skips the warm-up, records some steps, and stops.

    It counts calls from Python: of a tf.function, which may run many steps, or of a gradient outside any tf.function.

    Args:
        folder: where the trace goes.
        skip: warm-up calls of a function to skip.
        calls: calls to record; more if they take less than 0.3 s, fewer if they take longer than `seconds`.
        seconds: the longest time to record, once there are three calls.
        ends: raise `Finished` when enough is recorded.

    Attributes:
        is_on: whether it is recording.
        is_done: whether steps were recorded.
        report: the result; None before the end.
        batch: rows of a step, if the caller knows and sets it.
    """

    def __init__(self, folder: Path, *, skip: int, calls: int, seconds: float, ends: bool = False):
        self.folder = folder.absolute()  # the script may change the working directory before it ends
        self.is_on, self.report, self.batch = False, None, None
        self._skip, self._calls, self._seconds, self._ends = skip, calls, seconds, ends
        self._counts, self._plain = Counter(), {}
        self._leader, self._done, self._began, self.is_done = "", 0, 0.0, False
        self._lock = threading.RLock()

    def before_call(self, name: str) -> None:
        """Called before each call; starts and stops the profiler."""
        if self.is_done:
            return
        with self._lock:
            if self.is_on:
                self._count(name)
            else:
                self._counts[name] += 1
                if self._counts[name] > self._skip:
                    self._start(name)

    def note_plain(self, where: str, replicas: int) -> None:
        """Records a source line that passes whole batches to every replica."""
        self._plain[where] = replicas

    def close(self) -> None:
        """Stops recording and reads the trace."""
        with self._lock:
            if self.is_on:
                self._stop()

    @property
    def seen(self) -> str:
        """A text of the most frequent calls."""
        return ", ".join(f"{name} {count} times" for name, count in self._counts.most_common(3)) or "no tf.function"

    def _start(self, leader: str) -> None:
        self._leader, self._done, self._began = leader, 0, time.perf_counter()
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, device_tracer_level=1)
        try:
            tf.profiler.experimental.start(str(self.folder), options=options)
        except tf.errors.AlreadyExistsError as error:
            raise MachineError(
                "TensorFlow's profiler is already running. Only one can run: remove profile_batch from "
                "TensorBoard's callback."
            ) from error
        self.is_on = True

    def _count(self, name: str) -> None:
        self._done += name == self._leader
        took = time.perf_counter() - self._began
        enough = self._done >= self._calls and (took >= _LEAST_S or self._done >= _MOST)
        if name == self._leader and (enough or (self._done >= _LEAST and took >= self._seconds)):
            self._stop()
            if self._ends and threading.current_thread() is threading.main_thread():
                raise Finished

    def _stop(self) -> None:
        self.is_on, self.is_done = False, True
        tf.profiler.experimental.stop()
        recorded = trace.read(self.folder)
        self.report = verdict.judge(recorded, lambda retraced: hooks.look(retraced, self._plain, self.batch))
        writing.write(self.report, self.folder)


@contextlib.contextmanager
def profile(
    folder: str | Path = "profile", *, skip: int = 3, calls: int = 10, seconds: float = 5.0, ends: bool = False
) -> Iterator[Session]:
    """Profiles some of the steps that run in the block, in `fit` or in a hand-written loop.

    Args:
        folder: where the trace, the verdict and the charts go.
        skip: warm-up calls of a tf.function to skip; in `fit` a call is a block of steps.
        calls: calls to record after them; more if they take less than 0.3 s together.
        seconds: the longest time to record.
        ends: leave the block as soon as enough is recorded, by an exception that ends here.

    Yields:
        The session. Its `report` is set after the block; it stays None if there were too few calls.

    Raises:
        InputError: a number is out of range, or `folder` is a file.
        MachineError: TensorFlow's profiler is already running.

    Example:
        >>> step = tf.function(lambda x: tf.reduce_sum(x @ x))
        >>> with profile("profile", seconds=0.1) as session:
        ...     for _ in range(8):
        ...         number = step(tf.ones([64, 64]))
        >>> session.report.window.marked_by, session.report.shares.device
        ('<lambda>', False)
    """
    skip, calls = whole_number("skip", skip, minimum=0), whole_number("calls", calls, minimum=2)
    positive("seconds", seconds)
    writing.create_folder(Path(folder))
    session = Session(Path(folder), skip=skip, calls=calls, seconds=seconds, ends=ends)
    with hooks.listening(session):
        try:
            yield session
        except Finished:
            pass
        finally:
            session.close()


_EPOCHS = 10_000  # enough for any window; the profiler ends the training


def profile_script(
    script: str | Path, arguments: Sequence[str] = (), folder: str | Path = "profile", *, whole: bool = False, **window
) -> Report:
    """Runs a script with the repairs, as `tfgpu run` does, and profiles some of its steps.

    Args:
        script: the file.
        arguments: the arguments of the script.
        folder: where the files go.
        whole: run the script to its end. With several workers, it always does, so that no worker waits for another.
        window: `skip`, `calls` and `seconds`, see `profile`.

    Returns:
        The report.

    Raises:
        InputError: the script does not exist, or made too few calls.
        MachineError: TensorFlow's profiler is already running.
    """
    if not Path(script).is_file():
        raise no_script(str(script))
    alone = not Cluster.from_environment().is_multi_worker
    with profile(folder, ends=alone and not whole, **window) as session:
        scripts.run(script, arguments)
    return _end(session, str(script))


def profile_recipe(what: Recipe, name: str, folder: str | Path = "profile", **window) -> Report:
    """Trains a recipe without a run directory, and profiles some of the steps.

    Args:
        what: the recipe.
        name: its file, for messages.
        folder: where the files go.
        window: `skip`, `calls` and `seconds`, see `profile`.

    Returns:
        The report.

    Raises:
        InputError: the recipe is invalid, or there are several workers.
        MachineError: TensorFlow's profiler is already running.
    """
    cluster = runner.check_alone(what, "A recipe is profiled", instead=", or profile a script")
    with building.prepare(what):
        job = building.build(what, cluster)
        with profile(folder, ends=True, **window) as session:
            session.batch = what.global_batch
            job.model.fit(job.data.train, epochs=_EPOCHS, shuffle=False, verbose=0)
    return _end(session, name)


def read_trace(path: str | Path, folder: str | Path = "profile") -> Report:
    """Analyzes a trace written by TensorFlow's profiler or TensorBoard's callback.

    Such a trace lacks the changed argument of a retraced function, names of functions of the input, lines that read
    tensors, and whole batches passed to replicas.

    Args:
        path: an `.xplane.pb` file, or a folder with one below it.
        folder: where the files go.

    Returns:
        The report.

    Raises:
        InputError: there is no trace.
    """
    report = verdict.judge(trace.read(path))
    writing.create_folder(Path(folder))
    writing.write(report, Path(folder))
    return report


def _end(session: Session, target: str) -> Report:
    if not session.is_done:
        raise InputError(
            f"{target} ended before enough was recorded. It called {session.seen}. Use --skip 0, or run more steps."
        )
    return session.report

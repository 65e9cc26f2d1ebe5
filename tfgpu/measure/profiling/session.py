"""Which steps are recorded: some calls after the first ones, in `fit`, `Trainer` or a loop of one's own."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfgpu.core import profiling_hooks
from tfgpu.errors import InputError, MachineError
from tfgpu.measure.profiling import around, commands, trace, verdict, writing

_LEAST, _LEAST_S, _MOST = 3, 0.3, 200


class Finished(BaseException):
    """Enough has been recorded; ends a script that need not go on. No `Exception`, so that scripts let it pass."""


class Session:
    """Waits for the steps to settle, records some of them, and stops.

    What is counted are calls from Python: of a tf.function, which may run many steps, or of a gradient outside any.

    Args:
        folder: where the trace goes.
        skip: calls of a function that are let pass: they trace and warm up.
        calls: to record; at least 0.3 s of them, and fewer than that many where they take `seconds`.
        seconds: how long to record at most, once there are three calls.
        ends: raise `Finished` when enough has been recorded.
        nvtx: put an NVTX range around the steps instead of recording them.

    Attributes:
        is_on: it records.
        report: what was found; None before the end, and with `nvtx`.
        batch: rows of a step; whoever knows it may set it.
    """

    def __init__(self, folder: Path, *, skip: int, calls: int, seconds: float, ends: bool = False, nvtx: bool = False):
        self.folder, self.is_on, self.report, self.batch = folder, False, None, None
        self._skip, self._calls, self._seconds, self._ends, self._nvtx = skip, calls, seconds, ends, nvtx
        self._counts, self._plain = Counter(), {}
        self._leader, self._done, self._began, self._over = "", 0, 0.0, False
        self._held = contextlib.ExitStack()
        self._lock = threading.RLock()

    def before_call(self, name: str) -> None:
        """Is told of each call, and starts and stops the profiler."""
        if self._over:
            return
        with self._lock:
            if self.is_on:
                self._count(name)
            else:
                self._counts[name] += 1
                if self._counts[name] > self._skip:
                    self._start(name)

    def note_plain(self, where: str, replicas: int) -> None:
        """Is told where every replica gets whole batches."""
        self._plain[where] = replicas

    def close(self) -> None:
        """Stops, if it records, and reads what there is."""
        with self._lock:
            if self.is_on:
                self._stop()

    @property
    def seen(self) -> str:
        """What was called, in words."""
        return ", ".join(f"{name} {count} times" for name, count in self._counts.most_common(3)) or "no tf.function"

    @property
    def is_done(self) -> bool:
        """Steps were recorded."""
        return self._over

    def _start(self, leader: str) -> None:
        self._leader, self._done, self._began = leader, 0, time.perf_counter()
        if self._nvtx:
            self._held.enter_context(commands.marked())
        else:
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, device_tracer_level=1)
            try:
                tf.profiler.experimental.start(str(self.folder), options=options)
            except tf.errors.AlreadyExistsError as error:
                raise MachineError(
                    "TensorFlow's profiler is running already. Leave profile_batch out of TensorBoard's callback, and "
                    "profile in one place."
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
        self.is_on, self._over = False, True
        self._held.close()
        if self._nvtx:
            return
        tf.profiler.experimental.stop()
        recorded = trace.read(self.folder)
        self.report = verdict.judge(recorded, lambda retraced: around.look(retraced, self._plain, self.batch))
        writing.write(self.report, recorded, self.folder)


@contextlib.contextmanager
def profile(
    folder: str | Path = "profile",
    *,
    skip: int = 3,
    calls: int = 10,
    seconds: float = 5.0,
    ends: bool = False,
    nvtx: bool = False,
) -> Iterator[Session]:
    """Profiles some of the steps inside, whoever runs them: `fit`, `Trainer`, or a loop of your own.

    Args:
        folder: where the trace, the verdict and the pictures go.
        skip: calls of a tf.function that are let pass, since they trace and warm up; `fit` runs blocks of steps.
        calls: to record after them; more where they take less than 0.3 s together.
        seconds: how long to record at most.
        ends: leave the block as soon as there is enough, by an exception that ends here.
        nvtx: put an NVTX range around the steps, for `nsys` and `ncu`, instead of recording them.

    Yields:
        The session, whose `report` is there after the block; None where there were too few calls.

    Raises:
        InputError: a number is out of range, or `folder` is a file.
        MachineError: TensorFlow's profiler runs already.

    Example:
        >>> step = tf.function(lambda x: tf.reduce_sum(x @ x))
        >>> with profile("profile", seconds=0.1) as session:
        ...     for _ in range(8):
        ...         number = step(tf.ones([64, 64]))
        >>> session.report.window.marked_by, session.report.shares.device
        ('<lambda>', False)
    """
    if skip < 0 or calls < 2 or not seconds > 0:
        raise InputError(
            f"`skip` must be from 0, `calls` from 2, `seconds` above 0. Received: {skip!r}, {calls!r}, {seconds!r}."
        )
    writing.check_folder(Path(folder))
    if nvtx:
        commands.check_nvtx()
    session = Session(Path(folder), skip=skip, calls=calls, seconds=seconds, ends=ends, nvtx=nvtx)
    with profiling_hooks.listening(session):
        try:
            yield session
        except Finished:
            pass
        finally:
            session.close()

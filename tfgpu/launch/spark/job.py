"""Training on data in Spark: a barrier stage with one task per worker; TensorFlow runs in a child process of the task.

Source: https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.BarrierTaskContext.html
"""

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, MachineError, required, whole_number
from tfgpu.launch.functions.group import Progress, run_until_done, work_of
from tfgpu.launch.functions.relay import Relay, Work
from tfgpu.launch.spark import channel
from tfgpu.launch.spark import data as spark_data
from tfgpu.launch.spark.frame import RowAssignment, ordered, repartitioned, to_frame

_LOOK_S = 0.2
_LINES = 20
"""How many lines of Spark's own error are shown."""


@dataclass(frozen=True)
class TaskSpec:
    """What is sent to each task.

    Args:
        work: what the worker's process runs.
        assignment: which rows each worker gets.
        listener: host and port of the driver's `TaskListener`.
        key: lets the task connect there.
    """

    work: Work
    assignment: RowAssignment
    listener: tuple[str, int]
    key: bytes = field(repr=False)


def spark_job(
    train: Callable[..., object],
    data: Any,
    workers: int = 2,
    *,
    global_batch: int,
    arguments: Sequence[object] = (),
    gpus_per_worker: int = 0,
    shuffle_seed: int | None = None,
    max_restarts: int = 0,
    startup_timeout_s: float = 60.0,
    heartbeat_timeout_s: float = 60.0,
    grace_period_s: float = 10.0,
    driver_port: int = 0,
    logs: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """Trains on a DataFrame or RDD, on the executors, and returns when the training is done.

    Each worker is a task of one barrier stage. A Spark shuffle sends it its rows of every batch; the task keeps them in
    an Arrow file on its disk, and runs `train(data, *arguments)` in a child process with its own TF_CONFIG, where
    `model.fit` trains on `data.batches(...)`. The batches are those that one device would read from the data frame in
    order, for any number of workers and partitions. The first worker that fails ends the group (SIGTERM, grace period,
    SIGKILL). The group is restarted, and `train` resumes from its checkpoint if it saves any.

    Args:
        train: a function of a `SparkData` and of `arguments`.
        data: a `pyspark.sql.DataFrame`; or an RDD of Rows, dictionaries, or tuples (columns `_1`, `_2`, ...).
        workers: processes that train, including the chief; as many task slots must be free.
        global_batch: rows per batch over all workers; best a multiple of the number of replicas.
        arguments: the function's arguments after the data.
        gpus_per_worker: GPUs per worker: those that Spark assigns to the task (`spark.task.resource.gpu.amount`).
        shuffle_seed: shuffles the rows once, in the same order for every epoch and any number of workers; None keeps
            the data frame's order.
        max_restarts: restarts of the group after failures. A preemption uses none.
        startup_timeout_s: seconds to wait for task slots, and for workers to find each other.
        heartbeat_timeout_s: the heartbeat timeout in seconds; 0: none.
        grace_period_s: seconds that workers get to save after a request to stop that no failure caused.
        driver_port: where this program listens for its tasks; 0 takes a free port.
        logs: folder for one log file per worker, on its machine; the output also goes to the executors' stderr.
        environment: environment variables of every worker.
        on_progress: called in this process with each report that the chief makes by `tfgpu.callbacks.Report()` or
            `tfgpu.launch.report`; `"start"` holds the number of the attempt, from 0.

    Returns:
        What the chief's function returned.

    Raises:
        InputError: Spark is not installed, a setting is out of range, the function cannot be pickled, there are too few
            rows, or a worker found wrong input.
        MachineError: Spark has too few task slots, or a worker failed and no restart is left.

    Example:
        weights = tfgpu.launch.spark_job(train, spark.read.parquet("rows/"), workers=4, global_batch=256)
    """
    sql = pyspark_sql()
    if not callable(train):
        raise InputError(f"`train` must be a function of a `SparkData`. Received: {train!r}.")
    global_batch = whole_number("global_batch", global_batch)
    settings = {"max_restarts": max_restarts, "logs": logs, "environment": environment}
    settings |= {"startup_timeout_s": startup_timeout_s, "heartbeat_timeout_s": heartbeat_timeout_s}
    # None: all GPUs that Spark assigns to the task
    settings |= {"workers": workers, "gpus_per_worker": gpus_per_worker or None}
    work = work_of(train, arguments, grace_period_s=grace_period_s, **settings)
    frame = to_frame(sql, data)
    _wait_for_slots(frame.sparkSession, workers, startup_timeout_s)
    with ordered(frame, shuffle_seed) as (rows, counts):
        assignment = RowAssignment(sum(counts.values()), global_batch, workers, max(gpus_per_worker, 1))
        _check(assignment)
        shares = repartitioned(rows, counts, assignment)
        return run_until_done(
            work, lambda attempt: _connected(shares, work, assignment, driver_port, attempt), on_progress
        )


def pyspark_sql():
    """The module `pyspark.sql`.

    Raises:
        InputError: Spark is not installed.
    """
    sql = required("pyspark.sql", "`spark_job` needs Spark", "Run: pip install 'tfgpu[spark]'")
    spark_data.pyarrow()
    return sql


def _check(assignment: RowAssignment) -> None:
    for name, count in (("rows", assignment.rows), ("global_batch", assignment.global_batch)):
        if count < assignment.replicas:
            why = f"Each of the {assignment.replicas} replicas needs a row of the first batch."
            raise InputError(f"{why} Received: {name}={count}. Use fewer workers.")


def _wait_for_slots(spark, workers: int, timeout_s: float) -> None:
    """Waits for executors to start: Spark itself retries 40 times, 15 s apart, and then does not say what it has."""
    scala = spark.sparkContext._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    end = time.monotonic() + timeout_s
    while (slots := scala.maxNumConcurrentTasks(profile)) < workers:
        if time.monotonic() > end:
            raise MachineError(
                f"Spark has {slots} task slots after startup_timeout_s={timeout_s:g}; {workers} workers need one each "
                "at the same time. Start more executors, give them more cores, or use fewer workers."
            )
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _connected(shares, work: Work, assignment: RowAssignment, port: int, attempt: int) -> Iterator[Sequence]:
    """Runs the barrier stage, whose tasks connect, and ends it."""
    spark = shares.sparkSession
    if attempt > 1:
        _wait_for_slots(spark, assignment.workers, work.job.startup_timeout_s)
    links = [channel.SparkLink(rank) for rank in range(assignment.workers)]
    with channel.TaskListener(spark.conf.get("spark.driver.host", "localhost"), links, port) as listener:
        stage = _Stage(shares, TaskSpec(work, assignment, listener.address, listener.key), links)
        try:
            yield links
        finally:
            stage.end(work.grace_period_s)
            # Spark reports a stage as done while its tasks are still being ended.
            listener.wait(work.grace_period_s + 5)
        _check_python(stage.error)


class _Stage:
    """The barrier stage, which a thread of the driver waits for."""

    def __init__(self, shares, spec: TaskSpec, links: Sequence[channel.SparkLink]):
        from pyspark import InheritableThread

        self._context = shares.sparkSession.sparkContext
        self._group = f"tfgpu-{uuid.uuid4()}"
        self.error: Exception | None = None
        tasks = shares.mapInArrow(lambda batches: run_task(spec, batches), "rank int", barrier=True)

        def run():
            self._context.setJobGroup(self._group, f"tfgpu: {spec.work.job.script}", interruptOnCancel=True)
            try:
                tasks.collect()
            except Exception as error:  # of any class, by py4j
                self.error = error
            for link in links:
                if not link.is_served:
                    link.lose(_lines(self.error))

        self._thread = InheritableThread(target=run)
        self._thread.start()

    def end(self, grace_period_s: float) -> None:
        """Waits for the tasks to end on their own, then lets Spark kill them."""
        self._thread.join(grace_period_s + 5)
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
            self._thread.join()


def _lines(error: Exception | None) -> list[str]:
    """The informative lines of Spark's error, without the JVM's stack trace."""
    lines = [line for line in str(error or channel.GONE).splitlines() if line.strip() and not line.startswith("\tat ")]
    return lines[:_LINES]


def _check_python(error: Exception | None) -> None:
    """Raises `MachineError` if the executors' Python is unsuitable, which no restart can fix."""
    text = str(error)
    if "ModuleNotFoundError" in text or "PYTHON_VERSION_MISMATCH" in text:
        reason = next((line for line in text.splitlines() if "ModuleNotFoundError" in line or "MISMATCH" in line), "")
        raise MachineError(
            f"The executors' Python lacks packages that this one has: {reason.strip()[:300]} Install tfgpu[spark] "
            "there, or set PYSPARK_PYTHON to the Python that has it before Spark starts."
        ) from error


def run_task(spec: TaskSpec, batches: Iterator) -> Iterator:
    """The task of one worker: stores its rows, and runs its supervisor until it ends.

    Args:
        spec: what to run.
        batches: `pyarrow.RecordBatch` objects with this worker's rows, in order.
    """
    from pyspark import BarrierTaskContext

    context, assignment = BarrierTaskContext.get(), spec.assignment
    rank = context.partitionId()
    # Where Spark keeps its temporary files on this machine; None leaves it to Python.
    local = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("LOCAL_DIRS")
    folder = Path(tempfile.mkdtemp(prefix="tfgpu-rows-", dir=local.split(",")[0] if local else None))
    gpus = context.resources().get("gpu")  # The GPUs that Spark assigned to the task, which sees no others.
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses) if gpus else ""}
    try:
        path, rows = spark_data.spool(batches, folder)
        if rows != assignment.rows_of(rank):
            raise MachineError(
                f"Spark gave worker {rank} {rows} rows, but counted {assignment.rows_of(rank)} before: the data "
                "changes each time it is read. Write it to a table first, or use `DataFrame.checkpoint()`."
            )
        address = context.getTaskInfos()[rank].address
        host = address.rpartition(":")[0] or address
        with channel.connected(spec.listener, spec.key, rank) as line:
            share = spark_data.SparkData(assignment, rank, str(path))
            options = {"data": share, "environment": devices, "folders": [folder]}
            channel.relay(line, Relay(spec.work, rank, host, **options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return iter(())

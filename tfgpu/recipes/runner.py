"""From a recipe to a run directory. Everything is checked and built before the first file is written."""

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console

from tfgpu import atomic
from tfgpu.callbacks import tracking
from tfgpu.callbacks.memory import Memory
from tfgpu.callbacks.metrics_file import EventsFile, MetricsFile
from tfgpu.callbacks.monitor import Monitor
from tfgpu.callbacks.progress import Progress
from tfgpu.checkpoint.background_writer import Writer
from tfgpu.checkpoint.callback import Checkpoint
from tfgpu.cluster import Cluster
from tfgpu.core import replication
from tfgpu.core.state import broadcast
from tfgpu.data import Data
from tfgpu.errors import InputError, Preempted
from tfgpu.recipes import building, compiling, directory, facts, finetune, recipe
from tfgpu.recipes.heads import metric_names
from tfgpu.recipes.recipe import Recipe
from tfgpu.recipes.report import MOST_CLASSES, monitored, render
from tfgpu.recipes.watch import (
    Terminated,
    TrainingError,
    Watch,
    describe_failure,
    describe_interrupt,
    how_to_resume,
    terminable,
    unstarted,
)
from tfgpu.serving.stock import save_stock_model

_log = logging.getLogger(__name__)
MOST_PREDICTED = 100_000  # test examples; larger splits get no matrix


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        accuracy: on the test split, 0 to 1; None for other tasks, or without a test split.
        loss: on the test split; None without one.
        history: one mapping per epoch, as in `metrics.csv`.
        run_directory: the run's files; None on a worker that is not the chief.
        facts: the section `run` of `config.yaml`.
        metrics: all metrics on the test split by name; empty without one.
    """

    accuracy: float | None
    loss: float | None
    history: tuple[Mapping[str, float], ...]
    run_directory: Path | None
    facts: Mapping[str, Any] = field(repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict)


def run(
    what: Recipe,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    show: bool = False,
    track: str | None = None,
    project: str = "tfgpu",
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Result:
    """Trains, tests and writes the run directory.

    A failure before the first step leaves no files. In a cluster every worker calls this function; the chief writes.

    Args:
        what: the recipe.
        output: the run directory; None creates `runs/<time>-<model>`.
        resume: resume the run in `output` from its last checkpoint. Only `epochs` may increase, and settings of the
            input speed may differ.
        overwrite: replace the run in `output`.
        show: print a headline and the training progress.
        track: `"mlflow"` or `"wandb"`: also send settings, metrics and the report there (see `callbacks.Track`).
        project: its name there.
        callbacks: further callbacks, called after all but the checkpoint's; `config.yaml` does not record them.

    Returns:
        The result, with the metrics on the test split.

    Raises:
        InputError: something in the recipe or the output directory is invalid.
        TrainingError: training started and failed.
        Preempted: SIGTERM was received during or after training; the run is saved, and the message says how to resume.
        KeyboardInterrupt: interrupted by SIGINT, or by SIGTERM before training.

    Example:
        >>> run(Recipe(epochs=2), output="runs/first").run_directory
        PosixPath('runs/first')
    """
    started = datetime.now()
    cluster = check(what, output, resume=resume, overwrite=overwrite)
    if track is not None:
        tracking.check(track)
    with contextlib.ExitStack() as held:
        with unstarted():
            held.enter_context(building.prepare(what))
            job = (finetune if what.preset else building).build(what, cluster)
            about = facts.collect(job, started)
        console = Console(highlight=False, soft_wrap=True) if show and cluster.is_chief else None
        if console:
            console.print("\n".join(facts.headline(what, about)), markup=False, soft_wrap=not console.is_terminal)
        early = compiling.about_average(what, job.model.optimizer, steps_per_epoch=job.data.info.steps_per_epoch)
        if early and cluster.is_chief:
            _log.warning(early)
        path, made = None, []
        if cluster.is_chief:
            claim = directory.claim(output, what, resume=resume, overwrite=overwrite)
            path, made = held.enter_context(claim)
        tracker = _tracker(track, project, what, path)
        if tracker:
            held.enter_context(tracker)
        # A worker that is not the chief writes its parts of the checkpoints, and nothing else.
        shared = _shared(job.strategy, path, output)
        more = [*([tracker] if tracker else []), *callbacks]
        rows = _train(job, path, shared, about, made=made, resume=resume, console=console, more=more)
        try:
            with terminable():
                result = _finish(job, path, about, rows)
            if tracker and path:
                tracker.log({f"test_{name}": value for name, value in result.metrics.items()}, step=len(rows))
                tracker.add(path / name for name in (directory.CONFIG, directory.METRICS, directory.REPORT))
            return result
        except KeyboardInterrupt as interrupt:
            saved = f"All epochs are saved, but the model or the report is incomplete. {how_to_resume(shared)}"
            if not isinstance(interrupt, Terminated):
                raise KeyboardInterrupt(f"Interrupted. {saved}") from None
            _log.warning("Received SIGTERM. %s", saved)
            raise Preempted(f"Received SIGTERM. {saved}") from None


def check_alone(what: Recipe, subject: str, *, instead: str = "") -> Cluster:
    """Like `check`, for what runs in one process: also rejects a cluster."""
    cluster = check(what)
    if cluster.is_multi_worker:
        raise InputError(f"{subject} in one process, but the environment has a cluster. Unset TF_CONFIG{instead}.")
    return cluster


def check(
    what: Recipe,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    is_dry: bool = False,
) -> Cluster:
    """Rejects what it can before any device is initialized; a dry run needs no data."""
    if keras.backend.backend() != "tensorflow":
        raise InputError(
            f"tfgpu needs Keras's TensorFlow backend. Received: {keras.backend.backend()!r}. Unset KERAS_BACKEND."
        )
    cluster = Cluster.from_environment()
    recipe.check(what, needs_data=not is_dry)
    compiling.check_optimizer(what)
    if what.strategy == "parameter_server" or cluster.parameter_servers:
        raise InputError(
            "`tfgpu train` does not support parameter servers. Use multi_worker, or your own script with "
            "tfgpu.strategies.parameter_server()."
        )
    if cluster.is_chief:
        directory.check(output, resume=resume, overwrite=overwrite)
    if resume:
        if output is None:
            raise InputError("Resuming needs the run's directory. Pass it as the output.")
        directory.check_same(what, recipe.make(directory.recorded(output)), directory=output)
    return cluster


def _train(
    job: building.Job,
    path: Path | None,
    shared: Path | None,
    about: Mapping[str, Any],
    *,
    made: list[Path],
    resume: bool,
    console: Console | None,
    more: Sequence[keras.callbacks.Callback],
) -> list[dict[str, float]]:
    """Runs the remaining epochs and returns the rows of all epochs."""
    watch = Watch(job.data)
    progress = Progress(console=console) if console else None
    try:
        # Leaving the block, even after an error, waits for all pending writes.
        with terminable(), Writer() as writer:
            if path:
                directory.write_config(path, job.recipe, about)
            checkpoint = _checkpoint(job, shared, writer, resume=resume)
            position = checkpoint.restore(job.model) if resume else None
            first, done = (position.epoch, [dict(row) for row in position.history]) if position else (0, [])
            metrics = MetricsFile(path / directory.METRICS if path else None, rows=done, writer=writer)
            metrics.write()
            watch.epoch = first
            events = EventsFile(path / directory.LOGS if path else None, writer=writer)
            callbacks = [*job.callbacks, Memory(), metrics, watch, events]
            callbacks += [*_monitor(job, shared), *([progress] if progress else []), *more, checkpoint]
            job.data.seek(first)
            # Even with no epoch left: the last checkpoint precedes the end of `fit`, which assigns averaged weights.
            job.model.fit(
                job.data.train,
                validation_data=job.data.validation,
                initial_epoch=first,
                epochs=job.recipe.epochs,
                callbacks=callbacks,
                shuffle=False,  # the data is already shuffled
                verbose=0,
            )
            return metrics.rows
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_interrupt(path, made, watch, resume=resume)) from None
    except Exception as error:
        if not watch.steps and not resume and path:
            directory.abandon(path, made)
        if isinstance(error, InputError | TrainingError):
            raise
        raise TrainingError(describe_failure(error, watch, job.recipe)) from error
    finally:
        if progress:
            progress.close()


def _monitor(job: building.Job, path: Path | None) -> list[Monitor]:
    """Monitors each worker's machine; without a directory there is nowhere to write."""
    if not job.recipe.watch_machine or path is None:
        return []
    return [Monitor(path / directory.MONITOR, tensorboard=path / directory.LOGS, worker=job.cluster.rank)]


def _finish(job: building.Job, path: Path | None, about: dict[str, Any], rows: list[dict[str, float]]) -> Result:
    """Tests the trained model, and writes the model, the report and the final facts."""
    tested = {} if job.data.test is None else job.model.evaluate(job.data.test, verbose=0, return_dict=True)
    tested = {name: float(tested[name]) for name in (*metric_names(job.heads), "loss") if name in tested}
    if job.finetuned and tested:  # over tokens, where Keras's is a mean over batches
        tested["loss"] = math.log(tested["perplexity"])
    about = {
        **about,
        "finished": datetime.now().isoformat(timespec="seconds"),
        "training_time_s": round(sum(row["epoch_time_s"] for row in rows), 3),
        **{f"test_{name}": value for name, value in tested.items()},
        "final_weights": compiling.ends_with(job.callbacks),
    }
    can_predict = job.data.test is not None and not job.cluster.is_multi_worker
    matrix = _confusion(job.model, job.data) if can_predict else None
    samples = job.finetuned.samples(job.model, job.recipe) if job.finetuned else ()
    _save(job, path)
    if path:
        machines = monitored(path / directory.MONITOR) if job.recipe.watch_machine else None
        page = facts.report(job, about, rows, tested, confusion=matrix, monitor=machines, samples=samples)
        atomic.write_text(path / directory.REPORT, render(page))
        directory.write_config(path, job.recipe, about)
    return Result(tested.get("accuracy"), tested.get("loss"), tuple(rows), path, about, tested)


def _tracker(track: str | None, project: str, what: Recipe, path: Path | None) -> tracking.Track | None:
    if track is None or path is None:
        return None
    settings = what.model_dump(mode="json")
    return tracking.Track(
        track, project=project, name=path.name, settings=settings, remember=path / directory.TRACKER, is_chief=True
    )


def _shared(strategy: tf.distribute.Strategy, path: Path | None, output: str | Path | None) -> Path | None:
    """The run's directory, as this worker finds it; the chief alone has chosen the name of a new one."""
    if output or not replication.spans_processes(strategy):
        return path or (Path(output) if output else None)
    return Path(broadcast.bytes_from_chief(strategy, str(path or "").encode()).decode())


def _checkpoint(job: building.Job, path: Path | None, writer: Writer, *, resume: bool) -> Checkpoint:
    """Returns the callback that every worker needs."""
    checkpoint = Checkpoint(
        (path or Path()) / directory.CHECKPOINTS,
        every_steps=job.recipe.checkpoint_steps or None,
        resume=resume,
        data=job.data,
        is_chief=job.cluster.is_chief,
        writer=writer,
    )
    checkpoint.go_on = how_to_resume(path)
    checkpoint.warns_when_over = False
    return checkpoint


def _save(job: building.Job, path: Path | None) -> None:
    """Saves the model as one that opens where tfgpu is not installed."""
    if job.finetuned:
        job.finetuned.save(path / directory.PRESET if path else None)
    elif path:
        save_stock_model(job.model, path / directory.MODEL)


def _confusion(model: Any, data: Data) -> list[list[int]] | None:
    """Counts the test examples by true and predicted class.

    Args:
        model: trained.
        data: the run's data.

    Returns:
        None for too many examples or classes, or if the model does not learn one class per example.
    """
    info, classes = data.info, data.info.classes
    if classes > MOST_CLASSES or info.test_examples > MOST_PREDICTED or info.labels not in ("class", "one_hot"):
        return None
    labels = np.concatenate([np.asarray(y) for _, y, *_ in data.test])
    labels = labels.argmax(-1) if info.labels == "one_hot" else labels.astype(int).ravel()
    guesses = np.argmax(model.predict(data.test, verbose=0), axis=-1).ravel()
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (labels, guesses), 1)
    return counts.tolist()

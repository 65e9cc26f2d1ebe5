"""Profiles a script, a recipe, or a recorded trace."""

from collections.abc import Sequence
from pathlib import Path

from tfgpu import run as scripts
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, no_script
from tfgpu.measure.profiling import trace, verdict, writing
from tfgpu.measure.profiling.session import Session, profile
from tfgpu.measure.profiling.verdict import Report
from tfgpu.recipes import building, runner
from tfgpu.recipes.recipe import Recipe

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

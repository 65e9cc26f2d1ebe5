"""A study: trainings of a recipe with different settings, sequential or parallel."""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError, positive, unknown, whole_number
from tfgpu.recipes import directory
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune import journal, process, space
from tfgpu.tune.journal import PRUNERS, SAMPLERS, Journal
from tfgpu.tune.results import StudyResult, TrialResult, best_of
from tfgpu.tune.spec import StudySpec, claimed, recipe_of, spec_for

__all__ = ["StudyResult", "TrialResult", "study"]

Progress = Callable[[TrialResult], None]
ALIKE = 3
"""This many equal failures, before any trial is complete, end the study."""
BEST = "best.yaml"
_WAIT_S = 0.05
_GRACE_S = 10.0


def study(
    recipe: Recipe | str | Path | None = None,
    folder: str | Path = "study",
    *,
    trials: int = 20,
    search: Mapping[str, Any] | Sequence[str] | None = None,
    parallel: int = 1,
    use_ray: bool = False,
    sampler: str | None = None,
    pruner: str | None = None,
    monitor: str | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    resume: bool = False,
    allow_code: bool = False,
    on_trial: Progress | None = None,
) -> StudyResult:
    """Trains a recipe repeatedly with different settings, and selects the best by its validation error.

    Each trial has its own run directory and runs in a separate process. The first one has the recipe's own settings, if
    the search space contains them. With one trial at a time, the same seed gives the same trials on the same hardware,
    also if the study was killed and resumed.

    Args:
        recipe: the recipe that the trials modify: a `Recipe`, a file, or the name of a ready recipe. None takes the
            default recipe, or that of the resumed study.
        folder: the folder for `journal.log`, `trials/`, `best.yaml`.
        trials: the number of trials, including those of earlier starts.
        search: settings with their values, see `parse_search`; None takes `default_space`.
        parallel: the number of concurrent trials. Above 1, each gets its own GPU or, without GPUs, a share of the
            cores.
        use_ray: run on a Ray cluster whose machines share the folder, instead of this machine.
        sampler: "tpe" (default) or "random".
        pruner: which trials end early: "median" (default), "halving" or "none".
        monitor: what to minimize: "val_error" (default), "val_loss" or another entry of the logs.
        seed: the seed of the sampler (default 0). Training uses the recipe's seed.
        timeout_s: time limit of a trial in seconds; None sets no limit.
        resume: resume the study in `folder`; running trials resume from their checkpoints. For trials
            whose folders are gone, the journal has settings and values.
        allow_code: whether a recipe's file, or the study to resume, may name functions to call.
        on_trial: called after each trial.

    Returns:
        The result. The best of many validation errors is optimistic; `test_accuracy` is not.

    Raises:
        InputError: the recipe, the search or the folder is invalid.
        MachineError: no trial completes, or the folder can no longer be written.

    Example:
        >>> from tfgpu import tune
        >>> result = tune.study("digits", "studies/digits", trials=30, parallel=2)   # doctest: +SKIP
        >>> result.best.settings["optimizer"], result.test_accuracy                  # doctest: +SKIP
        ('nadam', 0.98)
    """
    whole_number("trials", trials)
    whole_number("parallel", parallel)
    if timeout_s is not None:
        positive("timeout_s", timeout_s)
    for name, value, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
        if value is not None and value not in known:
            raise unknown(name, value, known)
    journal.optuna()
    given = {"sampler": sampler, "pruner": pruner, "monitor": monitor, "seed": seed}
    base = recipe_of(recipe, allow_code)
    spec = spec_for(Path(folder), base, search, given, resume=resume, allow_code=allow_code)
    _check(spec, parallel)
    where = process.places(parallel, use_ray=use_ray)
    try:
        with claimed(spec, resume=resume) as path:
            return _Study(path, spec, where, timeout_s, on_trial).run(trials)
    except OSError as error:  # The disk is full, or the folder was deleted.
        raise MachineError(f"The study stopped: {error}. Fix it, and use --resume (`resume=True`).") from error
    finally:
        where.close()


class _Study:
    """A running study, which writes everything in its folder except the run directories."""

    def __init__(self, folder: Path, spec: StudySpec, where: Any, timeout_s: float | None, on_trial: Progress | None):
        self._folder, self._spec, self._where = folder, spec, where
        self._timeout_s, self._on_trial = timeout_s, on_trial
        ends = spec.space.get("epochs")
        longest = spec.recipe.epochs if ends is None else max(getattr(ends, "values", (getattr(ends, "high", 1),)))
        self._journal = Journal(
            folder, spec.space, sampler=spec.sampler, pruner=spec.pruner, epochs=int(longest), seed=spec.seed
        )
        self._running: dict[int, _Running] = {}

    def run(self, trials: int) -> StudyResult:
        if self._spec.has_own:
            self._journal.enqueue({name: space.value_of(self._spec.recipe, name) for name in self._spec.space})
        waiting = self._journal.unfinished()
        try:
            while True:
                self._fill(waiting, trials)
                if not (self._running or waiting or len(self._journal.trials) < trials):
                    break
                if not self._look():
                    time.sleep(_WAIT_S)
                self._check_alike()
        finally:
            if self._running:  # In parallel, since each may need time to save.
                with ThreadPoolExecutor(len(self._running)) as pool:
                    list(pool.map(lambda one: one.process.stop(_GRACE_S), self._running.values()))
        return self._finish()

    def _fill(self, waiting: list[Any], trials: int) -> None:
        """Starts trials in free slots."""
        for slot in range(self._where.slots):
            if slot in self._running:
                continue
            if waiting:
                trial = waiting.pop(0)
            elif len(self._journal.trials) < trials:
                trial = self._journal.ask()
            else:
                return
            self._start(slot, trial)

    def _start(self, slot: int, trial: Any) -> None:
        settings = self._journal.settings(trial)
        try:
            what = space.with_settings(self._spec.recipe, settings)
        except InputError as error:  # Settings that are valid separately, but not together.
            self._end(trial, {"end": "failed", "reason": str(error)}, 0.0)
            return
        run = self._folder / f"trials/{trial.number:04d}"
        run.parent.mkdir(exist_ok=True)
        goes_on = (run / directory.CONFIG).is_file()
        if run.exists() and not goes_on:
            shutil.rmtree(run)  # Left by a trial that was killed before its first step.
        task = {
            "recipe": what.model_dump(mode="json"),
            "folder": str(run.absolute()),
            "resume": goes_on,
            "monitor": self._spec.monitor,
        }
        handle = self._where.start(slot, task, run.with_suffix(".log").absolute())
        self._running[slot] = _Running(trial, handle, time.monotonic())

    def _look(self) -> bool:
        """Handles the messages of the trials; returns whether there were any."""
        heard = False
        for slot, one in list(self._running.items()):
            for message in one.process.news():
                heard = True
                if "epoch" in message:
                    prune = self._journal.report(one.trial, message["epoch"], message["value"])
                    one.process.answer(prune)
                else:
                    self._leave(slot, message)
                    break
            else:
                if self._timeout_s is not None and time.monotonic() - one.begun > self._timeout_s:
                    reason = f"not finished after {self._timeout_s:g} s"
                    self._leave(slot, {"end": "timed out", "reason": reason})
        return heard

    def _leave(self, slot: int, ended: dict[str, Any]) -> None:
        one = self._running.pop(slot)
        one.process.stop()
        self._end(one.trial, ended, time.monotonic() - one.begun)

    def _end(self, trial: Any, ended: dict[str, Any], time_s: float) -> None:
        self._journal.tell(trial, ended, time_s)
        if self._on_trial is not None:
            self._on_trial(self._results()[trial.number])

    def _results(self) -> tuple[TrialResult, ...]:
        return tuple(_result(trial, self._spec.space) for trial in self._journal.trials)

    def _check_alike(self) -> None:
        """Ends the study if its first trials all fail with the same message."""
        ended = [trial for trial in self._results() if trial.status != "running"]
        failed = [trial for trial in ended if trial.status == "failed"]
        if len(failed) < ALIKE or len(failed) < len(ended):
            return
        if len({re.sub(r"[\d.]+", "N", trial.reason) for trial in failed}) == 1:
            raise MachineError(
                f"The first {len(failed)} trials all failed in the same way: {failed[-1].reason} See "
                f"{self._folder / failed[-1].folder}.log. Fix it, and start the study again in another folder."
            )

    def _finish(self) -> StudyResult:
        found = self._results()
        best = best_of(found)
        if best is None:
            reasons = "; ".join(sorted({f"{trial.status}: {trial.reason}" for trial in found}))[:500]
            raise MachineError(
                f"None of {len(found)} trials is complete ({reasons}). Narrow the search, or see "
                f"{self._folder / 'trials'}/*.log."
            )
        own = found[0] if self._spec.has_own and found[0].status == "complete" else None
        what = space.with_settings(self._spec.recipe, best.settings)
        head = (
            f"# The best of {len(found)} trials ({best.folder}, {self._spec.monitor} {best.value:.4g}).\n"
            "# Repeat it: tfgpu train best.yaml --output another\n"
        )
        text = yaml.safe_dump(what.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        atomic.write_text(self._folder / BEST, head + text)
        return StudyResult(
            folder=self._folder,
            monitor=self._spec.monitor,
            trials=found,
            best=best,
            own=own,
            recipe_file=self._folder / BEST,
            test_accuracy=best.test_accuracy,
            own_test_accuracy=own.test_accuracy if own else None,
        )


class _Running(NamedTuple):
    trial: Any
    process: Any
    begun: float


def _result(trial: Any, searched: space.Space) -> TrialResult:
    attributes = trial.user_attrs
    return TrialResult(
        number=trial.number,
        status=attributes.get("status", "running"),
        settings=journal.settings_of(trial, searched),
        value=trial.value if attributes.get("status") == "complete" else None,
        val_loss=attributes.get("val_loss"),
        epochs=dict(sorted(trial.intermediate_values.items())),
        reason=attributes.get("reason", ""),
        time_s=attributes.get("time_s", 0.0),
        test_accuracy=attributes.get("test_accuracy"),
    )


def _check(spec: StudySpec, parallel: int) -> None:
    recipes.check(spec.recipe)
    space.check(spec.space, spec.recipe)
    _check_names(spec)
    if "TF_CONFIG" in os.environ:
        raise InputError("A study starts its own processes, but TF_CONFIG is set. Unset it.")
    if parallel > 1 and spec.recipe.devices not in (None, 1):
        raise InputError(
            f"With parallel={parallel} each trial has one device. Received: devices={spec.recipe.devices!r} in the "
            "recipe. Omit it, or use parallel=1."
        )


def _check_names(spec: StudySpec) -> None:
    """Finds errors that would only occur in trials: unknown names, settings that the model lacks."""
    from tfgpu import models
    from tfgpu.recipes import compiling

    names = getattr(spec.space.get("optimizer"), "values", (spec.recipe.optimizer,))
    for name in names:
        compiling.check_optimizer(space.with_settings(spec.recipe, {"optimizer": name}))
    _check_styles(spec)
    taken = models.defaults_of(spec.recipe.model)
    for name in recipes.STYLE:
        if name in spec.space and taken and name not in taken and ":" not in spec.recipe.model:
            raise InputError(f"The model {spec.recipe.model!r} has no setting {name}. Remove it from the search.")


def _check_styles(spec: StudySpec) -> None:
    """Finds unknown models, activations, initializers and normalizations."""
    from tfgpu import models

    searched = getattr(spec.space.get("model"), "values", (spec.recipe.model,))
    for model in searched:
        models.defaults_of(model)
    styles = [models.styles_of(model) for model in searched]
    if not all(styles):  # a custom model may define its own names
        return
    for kind in styles[0]:
        known = list(dict.fromkeys(name for style in styles for name in style[kind]))
        for name in (kind, f"model_options.{kind}"):
            given = [space.value_of(spec.recipe, name)] if name.endswith(f".{kind}") or kind in recipes.STYLE else []
            for value in getattr(spec.space.get(name), "values", given):
                if value is not None and value not in known:
                    raise unknown(kind, value, known)

"""A study's record in Optuna's journal, a file of JSON lines that only the study's process writes.

Source: Akiba et al., 2019, https://arxiv.org/abs/1907.10902;
    https://optuna.readthedocs.io/en/stable/reference/storages.html
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, required
from tfgpu.tune.space import Choice, Domain, Range, Space

FILE = "journal.log"
NAME = "tfgpu"
SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "halving", "none")
UNFIT = ("diverged", "out of memory", "timed out")
"""Trials with these ends are stored as pruned, so that the sampler learns from them: Optuna ignores failed trials."""


def optuna() -> Any:
    """Imports Optuna.

    Raises:
        InputError: it is not installed.
    """
    return required("optuna", "A study needs Optuna", "Run: pip install 'tfgpu[tune]'")


class Journal:
    """The stored trials of a study. The caller must hold the lock of the study's folder.

    Args:
        folder: the folder of the study.
        space: the search space.
        sampler: "tpe" or "random".
        pruner: "median", "halving" or "none".
        epochs: the most epochs of a trial.
        seed: the seed of the sampler.

    Raises:
        InputError: an existing journal is damaged.
    """

    def __init__(self, folder: Path, space: Space, *, sampler: str, pruner: str, epochs: int, seed: int):
        self._optuna, self._space, self._sampler, self._seed = optuna(), space, sampler, seed
        remove_partial_line(folder / FILE)
        journal = self._optuna.storages.journal
        try:
            with quiet():
                self._storage = self._optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / FILE)))
                self._study = self._optuna.create_study(
                    storage=self._storage,
                    study_name=NAME,
                    direction="minimize",
                    pruner=self._pruner(pruner, epochs),
                    load_if_exists=True,
                )
        except OSError:
            raise
        except Exception as error:  # Optuna does not define its errors for malformed lines.
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"{folder / FILE} is damaged ({why}). Start a new study in another folder.") from error

    @property
    def trials(self) -> list[Any]:
        """Optuna's frozen trials in order, without enqueued ones."""
        with quiet():
            waiting = self._optuna.trial.TrialState.WAITING
            return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state != waiting]

    def enqueue(self, settings: dict[str, Any]) -> None:
        """Uses these settings for the first trial."""
        with quiet():
            if not self._study.get_trials(deepcopy=False):
                drawn = {name: as_drawn(self._space[name], value) for name, value in settings.items()}
                self._study.enqueue_trial(drawn)

    def unfinished(self) -> list[Any]:
        """The unfinished trials of an earlier process, to be resumed."""
        with quiet():
            study = self._storage.get_study_id_from_name(NAME)
            running = [t.number for t in self.trials if t.state == self._optuna.trial.TrialState.RUNNING]
            known = [self._storage.get_trial_id_from_study_id_trial_number(study, number) for number in running]
            return [self._optuna.trial.Trial(self._study, trial) for trial in known]

    def ask(self) -> Any:
        """Begins a trial. Its settings depend only on the seed, its number and the earlier results."""
        with quiet():
            # A sampler for each trial: a resumed study draws as an uninterrupted one.
            seed = (self._seed * 1_000_003 + len(self.trials)) % 2**32
            samplers = self._optuna.samplers
            kind = samplers.TPESampler if self._sampler == "tpe" else samplers.RandomSampler
            self._study.sampler = kind(seed=seed)
            return self._study.ask()

    def settings(self, trial: Any) -> dict[str, Any]:
        """A trial's settings, drawn or stored."""
        with quiet():
            return {name: _draw(trial, name, domain) for name, domain in self._space.items()}

    def report(self, trial: Any, epoch: int, value: float) -> bool:
        """Records an epoch; returns whether to prune the trial."""
        with quiet():
            if epoch not in self._study.get_trials(deepcopy=False)[trial.number].intermediate_values:
                trial.report(value, epoch)
            return bool(trial.should_prune())

    def tell(self, trial: Any, ended: dict[str, Any], time_s: float) -> None:
        """Records the end of a trial."""
        states, status = self._optuna.trial.TrialState, ended["end"]
        with quiet():
            for name in ("reason", "val_loss", "test_accuracy"):
                if ended.get(name) is not None:
                    trial.set_user_attr(name, ended[name])
            trial.set_user_attr("status", status)
            trial.set_user_attr("time_s", round(time_s, 2))
            if status == "complete":
                self._study.tell(trial, ended["value"])
            else:
                pruned = status == "pruned" or status in UNFIT
                self._study.tell(trial, state=states.PRUNED if pruned else states.FAIL)

    def _pruner(self, name: str, epochs: int) -> Any:
        pruners = self._optuna.pruners
        if name == "median":
            return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(1, epochs // 4))
        if name == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=max(1, epochs // 9), reduction_factor=3)
        return pruners.NopPruner()


def settings_of(trial: Any, space: Space) -> dict[str, Any]:
    """The settings of a frozen trial, as values of the recipe."""
    return {name: _of_drawn(space[name], trial.params[name]) for name in space if name in trial.params}


def as_drawn(domain: Domain, value: Any) -> Any:
    """Converts a value to Optuna's representation: powers of two as exponents, lists as JSON.

    Example:
        >>> as_drawn(Range(16, 64, "powers"), 32), as_drawn(Choice(([8], [16])), [8])
        (5, '[8]')
    """
    if isinstance(domain, Choice):
        return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
    return int(value).bit_length() - 1 if domain.scale == "powers" else value


def remove_partial_line(path: Path) -> None:
    """Removes an incomplete last line and the lock of a killed process. The caller must hold the folder's lock."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with open(path, "r+b") as file:
                file.truncate(whole)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Optuna's message for each trial, but not its warnings."""
    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _draw(trial: Any, name: str, domain: Domain) -> Any:
    if isinstance(domain, Choice):
        drawn = trial.suggest_categorical(name, [as_drawn(domain, value) for value in domain.values])
    elif domain.scale == "powers":
        drawn = trial.suggest_int(name, *domain.exponents)
    elif domain.whole:
        drawn = trial.suggest_int(name, int(domain.low), int(domain.high), log=domain.scale == "log")
    else:
        drawn = trial.suggest_float(name, domain.low, domain.high, log=domain.scale == "log")
    return _of_drawn(domain, drawn)


def _of_drawn(domain: Domain, drawn: Any) -> Any:
    if isinstance(domain, Range):
        return 2 ** int(drawn) if domain.scale == "powers" else drawn
    return next(value for value in domain.values if as_drawn(domain, value) == drawn)

"""Tries whether a step of the user's own can run on each replica's rows, or must see the whole batch.

Keras's own `train_step` and `compute_loss` are known. Any other is run eagerly on a few drawn rows, all at once and in
two parts, and nothing that it does stays: variables, random states, metrics and optimizers are as they were. Compared
are the gradients that reach an optimizer, the numbers of the logs and what is assigned to variables. Where the parts,
put together as replicas put them together, are the whole, the step runs by rows.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, slots, training
from tfgpu.core import step_context, worker_rows
from tfgpu.core.metric_logs import LogReader, function_of
from tfgpu.core.row_mixing import captures, choices, comparison, isolation, step_outputs, verdicts
from tfgpu.core.row_mixing.part_trial import CannotTry, Trial, drawn_batches
from tfgpu.core.row_mixing.step_recorder import ROWS, Apart, Recorder
from tfgpu.core.state.sharded_variable import shard_info
from tfgpu.core.step_context import RowRange
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_CLOSE_IN_16_BITS = 2e-2
_METHODS = (
    "train_step",
    "test_step",
    "compute_loss",
    "compute_metrics",
    "get_metrics_result",
    "stateless_compute_loss",
)


@dataclass(frozen=True)
class Predictions:
    """What a `predict_step` needs and gives.

    Attributes:
        need_whole_batch: it must see the whole batch for one device's result.
        have_rows: of each of its outputs, whether it has rows of the batch; None where that is not known.
    """

    need_whole_batch: bool = False
    have_rows: tuple[bool, ...] | None = None


def predictions(model: keras.Model, spec: object) -> Predictions:
    """Tries a `predict_step` of the user's own, as `needs_whole_batch` does.

    Args:
        model: any.
        spec: of a batch, or of one replica's rows of it, as `tf.TensorSpec`s in the structure that the step gets.

    Raises:
        InputError: as `needs_whole_batch`.
    """
    have_rows: list = []
    needs = needs_whole_batch(model, model.predict_step, spec, have_rows=have_rows)
    return Predictions(needs, tuple(have_rows) or None)


def needs_whole_batch(
    model: keras.Model,
    step_function: Callable,
    spec: object,
    rows: int | None = None,
    have_rows: list | None = None,
) -> bool:
    """Whether a step must see the whole batch for one device's result.

    Args:
        model: the compiled and built model.
        step_function: `model.train_step`, `model.test_step` or `model.predict_step`.
        spec: of a whole batch, as `tf.TensorSpec`s in the structure that the step gets.
        rows: of a full batch, where that is known.
        have_rows: is given whether each output of a `predict_step` has rows, where the trial shows it.

    Raises:
        InputError: the step could not be tried, and the strategy asks for an error then; or it must see the whole
            batch, and each replica holds a part of the weights.
    """
    own = _own_methods(model, step_function)
    if not own:
        return False
    name = f"`{type(model).__name__}.{own[0]}`"
    needs = _found(model, step_function, spec, own, name, rows, have_rows)
    if needs and _is_over_replicas(model):
        raise InputError(
            f"{name} mixes rows and must see the whole batch, which is not possible if each replica holds a part of "
            "the weights. Use `parallel.shard(model, stage=2)`, or mark the method with "
            "`@tfgpu.by_rows` if it does not mix rows."
        )
    return needs


def _is_over_replicas(model: keras.Model) -> bool:
    """Whether each replica holds a part of the weights (ZeRO, stage 3)."""
    infos = [shard_info(variable) for variable in model.variables]
    return any(info is not None and info.sharding.over_replicas for info in infos)


def _found(
    model: keras.Model,
    step_function: Callable,
    spec: object,
    own: list[str],
    name: str,
    rows: int | None,
    have_rows: list | None,
) -> bool:
    """What the user says of a step of their own, or a trial."""

    def note(becomes: str, why: str, source: str, size: int | None = 0) -> verdicts.Piece:
        piece = verdicts.Piece(f"step {name[1:-1]}", becomes, why, source, size, rows)
        return verdicts.note(piece, model.distribute_strategy)

    chosen = {choices.of(function_of(getattr(model, each))) for each in own} - {None}
    if chosen:
        needs = choices.ON_ALL_ROWS in chosen
        note(verdicts.ON_ALL_ROWS if needs else verdicts.BY_ROWS, "", verdicts.MARKED, None if needs else 0)
        return needs
    try:
        trial = _StepTrial(model, step_function, spec)
        differs = trial.differing()
        if have_rows is not None:
            have_rows += trial.have_rows
    except CannotTry as error:
        return _unproven(model, name, error, spec, note)
    becomes, why = (verdicts.ON_ALL_ROWS, f"{differs} would differ") if differs else (verdicts.BY_ROWS, "")
    piece = note(becomes, why, verdicts.TRIED, trial.bytes_a_row if differs else 0)
    if differs:
        _log.warning(
            "%s is not by rows (%s would differ between replicas and one device). So that it is what one device "
            "computes, it sees the whole batch on every replica; the model's layers still compute each replica's rows. "
            "The outputs travel between the replicas in every step (%s). Where this is not needed, mark the method "
            "with `@tfgpu.by_rows`.",
            name,
            differs,
            piece.traffic,
        )
    elif trial.draws:
        _log.warning(
            "%s draws random numbers by tf.random: each replica draws its own. With `keras.random` and a "
            "`keras.random.SeedGenerator` each row gets the numbers that one device draws for it.",
            name,
        )
    return differs is not None


def _unproven(model: keras.Model, name: str, error: CannotTry, spec: object, note: Callable) -> bool:
    way = slots.get(model.distribute_strategy, "unproven", "gather")
    must_stay = name.endswith(".predict_step`") and (error.is_of_outputs or not step_outputs.can_travel(spec))
    way = "warn" if way == "gather" and (_is_over_replicas(model) or must_stay) else way
    said = f"Whether {name} gives each row its own number could not be tried ({error})."
    becomes = {"gather": verdicts.ON_ALL_ROWS, "warn": verdicts.BY_ROWS, "refuse": verdicts.REFUSED}[way]
    note(becomes, str(error), verdicts.UNPROVEN, None if way == "gather" else 0)
    if way == "refuse":
        raise InputError(f"{said} Mark the method with `@tfgpu.by_rows` or `@tfgpu.on_all_rows`.")
    becomes = "It sees the whole batch on every replica" if way == "gather" else "It runs on each replica's rows"
    _log.warning("%s %s. Mark it with `@tfgpu.by_rows` or `@tfgpu.on_all_rows`.", said, becomes)
    return way == "gather"


def has_own_predictions(model: keras.Model) -> bool:
    """Whether a model's `predict_step` is not Keras's."""
    return bool(_own_methods(model, model.predict_step))


def has_own_step(model: keras.Model, kind: str) -> bool:
    """Whether a model's step, "train" or "test", is not wholly Keras's, so that it may have to see the whole batch."""
    return bool(_own_methods(model, getattr(model, f"{kind}_step")))


def _own_methods(model: keras.Model, step_function: Callable) -> list[str]:
    """The methods of a step that are not Keras's."""
    if step_function == model.predict_step:
        names = ["predict_step"]
    else:
        step = "train_step" if step_function == model.train_step else "test_step"
        names = [each for each in _METHODS if not each.endswith("_step") or each == step]
    return [name for name in names if not _is_of_keras(function_of(getattr(model, name)))]


def _is_of_keras(function: Callable | None) -> bool:
    return function is not None and (function.__module__ or "").split(".")[0] in ("keras", "tfgpu")


class _StepTrial(Trial):
    """Runs a step on drawn rows, outside any replica."""

    def __init__(self, model: keras.Model, step_function: Callable, spec: object):
        super().__init__(captures.of(step_function))
        self._model, self._spec = model, spec
        self._step = training.without_optionals(model, step_function)
        self._predicts = step_function == model.predict_step
        self._owners = {id(v): at for at, metric in enumerate(model.metrics) for v in metric.variables}
        # Replicas weigh what passes its moments as a mean over rows. A gradient of something else is no such mean.
        self._normalizes = any(
            isinstance(each, keras.layers.BatchNormalization) for each in layers.layers_within(model)
        )
        is_narrow = tf.as_dtype(model.compute_dtype).size < 4
        self._close = _CLOSE_IN_16_BITS if is_narrow else comparison.CLOSE

    def _batches(self) -> Iterator[object]:
        for leaves in drawn_batches(tf.nest.flatten(self._spec), self._captured.numbers, ROWS):
            yield tf.nest.pack_sequence_as(self._spec, leaves)

    def _recorded(self, batch, start: int, stop: int, *, seed: int = 0) -> Recorder:
        rows = tf.nest.map_structure(
            lambda v: worker_rows.sliced(v, start, stop - start) if tf.is_tensor(v) else v, batch
        )
        found, scope = Recorder((stop - start) / ROWS, start, stop), Apart()
        numbers = (tf.constant(n, tf.int32) for n in (stop - start, start, ROWS))
        with (
            isolation.kept_draws(seed),
            self._captured.preserving_variables(),
            step_context.scope(is_trying=True, recorder=found, trial_rows=RowRange(*numbers)),
            tf.device("CPU:0"),
            scope,
        ):
            if self._predicts:
                found.outputs = step_outputs.as_numbers(self._step(rows))
            else:
                found.logs = self._logs(rows)
        found.assigned = scope.assigned()
        return found

    def _logs(self, rows) -> list[np.ndarray]:
        """The numbers in the logs of a step on some rows that are no metric results."""
        reader = LogReader(self._model)
        with reader.recording() as results:
            logs = self._step(rows)
        return [
            np.asarray(value, "float64") for value in reader.other_values(logs, results, keras.ops.convert_to_numpy)
        ]

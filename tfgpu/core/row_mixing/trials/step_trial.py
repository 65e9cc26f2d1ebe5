"""Tries whether a step of the user's own can run on each replica's rows, or must see the whole batch.

Keras's own `train_step` and `compute_loss` are known. Any other is run eagerly on a few drawn rows, all at once and in
two parts, and nothing that it does stays: variables, random states, metrics and optimizers are as they were. Compared
are the gradients that reach an optimizer, the numbers of the logs and what is assigned to variables. Where the parts,
put together as replicas put them together, are the whole, the step runs by rows.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, slots, training
from tfgpu.core import nested_graphs, replica_attributes, replication, step_context, worker_rows
from tfgpu.core.metric_logs import LogReader, function_of, uses_results
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.replica_attributes import PythonState
from tfgpu.core.row_mixing import choices, row_sums, verdicts
from tfgpu.core.row_mixing.trials import comparison, weights_in_pieces
from tfgpu.core.row_mixing.trials.drawn_inputs import CannotTry, drawn_batches
from tfgpu.core.row_mixing.trials.draws import given_rows
from tfgpu.core.row_mixing.trials.part_trial import CLOSE_IN_16_BITS, Trial, Tried
from tfgpu.core.row_mixing.trials.step_recorder import ROWS, Recorder
from tfgpu.core.step_context import RowRange
from tfgpu.core.trial_cache import store
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_MEETS = "it combines the replicas' rows itself"
_METHODS = "train_step test_step compute_loss compute_metrics get_metrics_result stateless_compute_loss".split()


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
    arguments: dict | None = None,
    python: PythonState | None = None,
    log_reader: LogReader | None = None,
) -> bool:
    """Whether a step must see the whole batch for one device's result.

    Args:
        model: the compiled and built model.
        step_function: `model.train_step`, `model.test_step` or `model.predict_step`.
        spec: of a whole batch, as `tf.TensorSpec`s in the structure that the step gets.
        rows: of a full batch, where that is known.
        have_rows: is given whether each output of a `predict_step` has rows, where the trial shows it.
        arguments: of the `fit` or `evaluate`, by name. Of arrays among them the first rows are tried, and then drawn
            ones. On several workers drawn ones are: all must find the same, whatever each has read.
        python: is told what the step changes in Python, so that each replica has its own.
        log_reader: is told whether the step may use results of metrics besides returning them.

    Raises:
        InputError: the step could not be tried, and the strategy asks for an error then; or it must see the whole
            batch (or may have to, if it could not be tried), and each replica holds a part of the weights.
    """
    if not (own := _own_methods(model, step_function)):
        return False
    question = _Question(model, step_function, spec, own, rows, log_reader or LogReader(model))
    return question.answer(have_rows, arguments or {}, python)


class _Question:
    """Whether a step of the user's own needs the whole batch: by what the user says of it, or by a trial."""

    def __init__(
        self,
        model: keras.Model,
        step_function: Callable,
        spec: object,
        own: list[str],
        rows: int | None,
        log_reader: LogReader,
    ):
        self._model, self._step_function, self._spec, self._own, self._rows = model, step_function, spec, own, rows
        self._log_reader = log_reader
        self._name = f"`{type(model).__name__}.{own[0]}`"
        self._in_pieces = weights_in_pieces.of(model)

    def answer(self, have_rows: list | None, arguments: dict, python: PythonState | None) -> bool:
        """Notes what is found, and says it where the step does not simply run by rows."""
        chosen = {choices.of(_method(self._model, each)) for each in self._own} - {None}
        if chosen:
            return self._marked(choices.ON_ALL_ROWS in chosen)
        try:
            tried = self._tried(arguments)
            if have_rows is not None:
                have_rows += tried.have_rows
        except CannotTry as error:
            return self._unproven(error)
        except row_sums.Meets:
            return self._meets()
        self._keep_python(tried, python)
        self._log_reader.sums_results = tried.uses_results
        draw_sizes.keep(self._model, self._step_function.__name__, tried.sizes)
        if tried.own_reads:
            _log.warning(
                "%s reads variables of metrics (%s), in which each replica has counted only its own rows. Use the "
                "metric's `result()`, which covers all replicas.",
                self._name,
                ", ".join(tried.own_reads),
            )
        if tried.draws:
            _log.warning(
                "%s draws random numbers with tf.random, so replicas draw other numbers than one device. Use "
                "`keras.random` with a `keras.random.SeedGenerator`.",
                self._name,
            )
        if tried.differs:
            self._tell_whole(tried)
            return True
        self._note(verdicts.BY_ROWS, "", verdicts.TRIED, 0)
        return False

    def _keep_python(self, tried: Tried, python: PythonState | None) -> None:
        """Gives each replica its own of what the step changes in Python, where nothing is made once for all of them."""
        if python is not None and not tried.makes:
            python.note((self._step_function, self._model), tried.changes)
        shared = tried.changes if python is None else tried.shared
        strategy, is_eager = self._model.distribute_strategy, self._model.run_eagerly
        replica_attributes.tell(self._name, tried, strategy, shared, is_eager=is_eager)

    def _tried(self, arguments: dict) -> Tried:
        """What the trial finds, in this run or in an earlier one."""
        is_alone = not replication.spans_processes(self._model.distribute_strategy)
        given = given_rows(arguments, self._spec, ROWS) if is_alone else None
        trial = _StepTrial(self._model, self._step_function, self._spec, given)
        if self._in_pieces is not None:
            return trial.run()
        things = self._step_function.__name__, self._model, self._spec, given
        return store.found("step", things, trial.run, Tried.kept, Tried, weights=True)

    def _note(self, becomes: str, why: str, source: str, size: int | None = 0) -> verdicts.Piece:
        piece = verdicts.Piece(f"step {self._name[1:-1]}", becomes, why, source, size, self._rows)
        return verdicts.note(piece, self._model.distribute_strategy)

    def _marked(self, needs: bool) -> bool:
        if needs:
            self._check_can_see_all("it is marked with `tfgpu.on_all_rows`", verdicts.MARKED)
        self._log_reader.sums_results = needs
        becomes = verdicts.ON_ALL_ROWS if needs else verdicts.BY_ROWS
        self._note(becomes, "", verdicts.MARKED, None if needs else 0)
        return needs

    def _check_can_see_all(self, why: str, source: str) -> None:
        """Refuses a step that must see the whole batch where each replica holds a part of the weights."""
        if self._in_pieces is None:
            return
        self._note(verdicts.REFUSED, why, source)
        raise InputError(
            f"{self._name} must see the whole batch ({why}), {self._in_pieces.refusal}, or mark the method with "
            "`@tfgpu.by_rows` if it treats each row separately."
        )

    def _tell_whole(self, tried: Tried) -> None:
        why = f"{tried.differs} would differ"
        self._check_can_see_all(why, verdicts.TRIED)
        piece = self._note(verdicts.ON_ALL_ROWS, why, verdicts.TRIED, tried.bytes_a_row)
        _log.warning(
            "%s mixes rows of the batch (%s between replicas and one device). To match one device, it sees the whole "
            "batch on every replica: the outputs are sent in every step (%s). The model's layers still compute only "
            "each replica's rows. If it treats each row separately, mark the method with `@tfgpu.by_rows`.",
            self._name,
            why,
            piece.traffic,
        )

    def _meets(self) -> bool:
        """What becomes of a step that is written for replicas: it knows that it sees one's rows."""
        if slots.get(self._model.distribute_strategy, "unproven") == "refuse":
            return self._unproven(CannotTry(_MEETS))
        self._note(verdicts.BY_ROWS, _MEETS, verdicts.UNPROVEN)
        _log.warning(
            "%s calls TensorFlow's `all_reduce`, `all_gather` or `merge_call`: %s, so it runs on each replica's rows "
            "and is not tried. Use `tfgpu.gather` instead, or mark it with `@tfgpu.by_rows` if it is right.",
            self._name,
            _MEETS,
        )
        return False

    def _unproven(self, error: CannotTry) -> bool:
        """What becomes of a step that could not be tried."""
        way = self._way(error)
        said = f"{self._name} could not be tried ({error}), so it is unknown whether it mixes rows of the batch."
        self._log_reader.sums_results = way == "gather"
        if way == "gather":
            self._check_can_see_all(f"it could not be tried: {error}", verdicts.UNPROVEN)
        becomes = {"gather": verdicts.ON_ALL_ROWS, "warn": verdicts.BY_ROWS, "refuse": verdicts.REFUSED}[way]
        self._note(becomes, str(error), verdicts.UNPROVEN, None if way == "gather" else 0)
        if way == "refuse":
            raise InputError(f"{said} Mark the method with `@tfgpu.by_rows` or `@tfgpu.on_all_rows`.")
        becomes = "It sees the whole batch on every replica" if way == "gather" else "It runs on each replica's rows"
        _log.warning("%s %s. Mark it with `@tfgpu.by_rows` or `@tfgpu.on_all_rows`.", said, becomes)
        return way == "gather"

    def _way(self, error: CannotTry) -> str:
        """The strategy's `unproven`; predictions that cannot travel are computed by rows."""
        way = slots.get(self._model.distribute_strategy, "unproven", "gather")
        is_of_outputs = error.is_of_outputs or not comparison.can_travel(self._spec)
        must_stay = self._step_function == self._model.predict_step and is_of_outputs
        return "warn" if way == "gather" and must_stay else way


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
    return [name for name in names if not _is_of_keras(model, name)]


def _method(model: keras.Model, name: str) -> Callable:
    """A method, or a tf.function of one, also where `parallel` runs it on devices of its own."""
    method = getattr(model, name)
    return getattr(method, "unplaced", method)


def _is_of_keras(model: keras.Model, name: str) -> bool:
    function = function_of(_method(model, name))
    return function is not None and (function.__module__ or "").split(".")[0] in ("keras", "tfgpu")


class _StepTrial(Trial):
    """Runs a step on a few rows, the user's own and drawn ones, outside any replica."""

    def __init__(self, model: keras.Model, step_function: Callable, spec: object, given: object | None = None):
        super().__init__(step_function, model)
        self._given, self._model, self._spec = given, model, spec
        self._step = training.without_optionals(model, step_function)
        self._calls = 2 if model.run_eagerly else 1  # what an eager step keeps in Python may change the next
        self._predicts = step_function == model.predict_step
        self._owners = {id(v): at for at, metric in enumerate(model.metrics) for v in metric.variables}
        # Replicas weigh what passes its moments as a mean over rows. A gradient of something else is no such mean.
        within = layers.layers_within(model)
        self._normalizes = any(isinstance(each, keras.layers.BatchNormalization) for each in within)
        self._stand_ins, self._shards = weights_in_pieces.of(model), frozenset()
        if self._stand_ins is not None:
            self._stand_ins.draw()
            self._shards = frozenset(self._stand_ins.ids)
        if not all(id(each) in self._shards for each in model.trainable_variables):
            self._shards = frozenset()
        is_narrow = tf.as_dtype(model.compute_dtype).size < 4
        self._close = CLOSE_IN_16_BITS if is_narrow else comparison.CLOSE
        trains_by_own = step_function == model.train_step and not _is_of_keras(model, "train_step")
        self._asks_for_sizes, self._may_count = trains_by_own and not self._shards, False

    def _batches(self) -> Iterator[object]:
        if self._given is not None:
            yield self._given
        for leaves in drawn_batches(tf.nest.flatten(self._spec), self._captured.numbers, ROWS, self._told):
            yield tf.nest.pack_sequence_as(self._spec, leaves)
        waits = (self._captured.beyond, False), (0, True)  # for so many steps, or for every so manyth
        for beyond, has_equal in waits:
            if self._may_count and (beyond or has_equal and self._sandbox.has_compared):
                self._sandbox.is_later, self._sandbox.beyond, self._sandbox.has_equal = True, beyond, has_equal
                leaves = next(drawn_batches(tf.nest.flatten(self._spec), [], ROWS, self._told))
                yield tf.nest.pack_sequence_as(self._spec, leaves)

    def _difference(self, batch) -> str | None:
        with nested_graphs.noting_conditions() as met:
            found, once = super()._difference(batch), self._first
        others = [*({place} for place in met), nested_graphs.Everywhere()] if met else []
        for places in others:  # each condition alone, then all together
            if found == "":
                with nested_graphs.taking_other_branches(places):
                    found = super()._difference(batch) or ""
        found = self._and_in_size(found, batch, once)
        for scale in (None, self._stand_ins.larger_first) if self._stand_ins is not None else ():
            if found == "":
                found = self._of_pieces(batch, scale)
        return found

    def _of_pieces(self, batch, scale: Callable | None) -> str:
        """What of a step on whole weights the steps on their pieces do not make."""
        found = []
        for at in (None, *range(self._stand_ins.pieces)):
            sized = scale and functools.partial(scale, at)
            found.append(self._recorded(batch, 0, ROWS, piece=at, scale=sized))
        return self._stand_ins.differing(found[0], found[1:], self._close) or ""

    def _recorded(
        self, batch, start: int, stop: int, *, seed: int = 0, piece: int | None = None, scale: Callable | None = None
    ) -> Recorder:
        count = stop - start
        rows = tf.nest.map_structure(lambda v: worker_rows.sliced(v, start, count) if tf.is_tensor(v) else v, batch)
        found = Recorder((stop - start) / ROWS, start, stop, shards=self._shards, scale=scale)
        numbers = (tf.constant(n, tf.int32) for n in (stop - start, start, ROWS))
        with (
            self._sandbox.around(found, seed) as scope,
            step_context.scope(is_trying=True, recorder=found, trial_rows=RowRange(*numbers)),
            self._noted.run(stop - start),
            tf.device("CPU:0"),
            contextlib.nullcontext() if self._stand_ins is None else self._stand_ins.seen(scope, piece),
            scope.noting(),
        ):
            if self._predicts:
                found.outputs = comparison.as_numbers(self._step(rows))
            for _ in range(0 if self._predicts else self._calls):
                found.logs += self._logs(rows, found)
        self._may_count |= scope.may_count
        return found

    def _ways_of(self, variable, found: list, parts: list[Recorder]) -> dict[str, np.ndarray]:
        ways = super()._ways_of(variable, found, parts)
        if variable.is_plain:  # no replica hears of another's value, which the next step may use in any way
            ways.pop("average", None)
        elif variable.aggregation == "sum" and not (variable.is_own or variable.is_inside):  # the rule of `layer_state`
            ways = {"sum": ways["sum"] if variable.is_added else sum(found)}
        return ways

    def _logs(self, rows, found: Recorder) -> list[np.ndarray]:
        """The numbers in the logs of a step on some rows that are no metric results; notes other uses of those."""
        reader = LogReader(self._model)
        with reader.recording() as results:
            logs = self._step(rows)
        found.uses_results |= uses_results(logs, results)
        return reader.other_values(logs, results, comparison.in_float64)

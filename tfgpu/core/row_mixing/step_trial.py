"""Tries whether a step of the user's own can run on each replica's rows, or must see the whole batch.

Keras's own `train_step` and `compute_loss` are known. Any other is run eagerly on a few drawn rows, all at once and in
two parts, and nothing that it does stays: variables, random states, metrics and optimizers are as they were. Compared
are the gradients that reach an optimizer, the numbers of the logs and what is assigned to variables. Where the parts,
put together as replicas put them together, are the whole, the step runs by rows.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, slots, training
from tfgpu.compat.tensorflow import NoneTensorSpec
from tfgpu.core import step_context, worker_rows
from tfgpu.core.metric_logs import LogReader, function_of
from tfgpu.core.row_mixing import captures, choices, comparison, draws, isolation, step_outputs, verdicts
from tfgpu.core.row_mixing.step_recorder import ROWS, Apart, NotBuilt, Recorder
from tfgpu.core.state.sharded_variable import shard_info
from tfgpu.core.step_context import RowRange
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_FIRST = 3  # rows of the first part, of 7: no fraction of the one is one of the other
_CLOSE_FOR_BIASES, _CLOSE_IN_16_BITS = 1e-2, 2e-2
_NOISY, _TIMES_NOISE = 1e-3, 8.0  # what rounding may do to two runs; how much more it may do to the parts
_SMALL = 1e-2  # of the largest gradient: what is smaller is rounding
_METHODS = (
    "train_step",
    "test_step",
    "compute_loss",
    "compute_metrics",
    "get_metrics_result",
    "stateless_compute_loss",
)


class _CannotTry(Exception):
    """The step does not run on drawn rows."""

    is_of_outputs = False  # what it returns are no numbers


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
        trial = _Trial(model, step_function, spec)
        differs = trial.differing()
        if have_rows is not None:
            have_rows += trial.have_rows
    except _CannotTry as error:
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


def _unproven(model: keras.Model, name: str, error: _CannotTry, spec: object, note: Callable) -> bool:
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


class _Trial:
    """Runs a step on drawn rows, whole and in two parts, outside any replica."""

    def __init__(self, model: keras.Model, step_function: Callable, spec: object):
        self._model, self._spec = model, spec
        self._step = training.without_optionals(model, step_function)
        self._predicts = step_function == model.predict_step
        self._captured = captures.of(step_function)
        self._owners = {id(v): at for at, metric in enumerate(model.metrics) for v in metric.variables}
        self._ways: dict = {}
        self.draws, self.bytes_a_row, self.have_rows = 0, 0, []
        # Replicas weigh what passes its moments as a mean over rows. A gradient of something else is no such mean.
        self._normalizes = any(
            isinstance(each, keras.layers.BatchNormalization) for each in layers.layers_within(model)
        )
        is_narrow = tf.as_dtype(model.compute_dtype).size < 4
        self._close = _CLOSE_IN_16_BITS if is_narrow else comparison.CLOSE

    def differing(self) -> str | None:
        """What of the whole the parts do not make; None if they make everything.

        Raises:
            _CannotTry: the step ran on no drawn rows.
        """
        passing = NotBuilt, step_outputs.NoNumbers
        try:
            found = draws.judged(self._draws(), self._difference, is_last=bool, passing=(*passing, _CannotTry))
        except passing as error:
            refused = _CannotTry(str(error))
            refused.is_of_outputs = isinstance(error, step_outputs.NoNumbers)
            raise refused from None
        if found.verdict is None:
            raise _CannotTry(found.why or "its data cannot be drawn")
        return found.verdict or None

    def _draws(self) -> Iterator[object]:
        """Batches of drawn rows: normal and positive numbers, few and many classes, labels that stand for none."""
        draw = np.random.default_rng(0)
        nones = [*draws.NONES, *(int(n) for n in self._captured.numbers if n == int(n) and n not in draws.NONES)]
        has_labels = any(getattr(each, "dtype", tf.string).is_integer for each in tf.nest.flatten(self._spec)[1:])
        nones = nones if has_labels else []
        kinds = [("normal", 2, None), ("positive", 8, None), *(("normal", 2, none) for none in nones)]
        for numbers, classes, none in kinds:
            leaves = tf.nest.flatten(self._spec)
            drawn = [_drawn(draw, spec, numbers, classes, none if at else None) for at, spec in enumerate(leaves)]
            if any(value is _UNKNOWN for value in drawn):
                raise _CannotTry("its data cannot be drawn")
            yield tf.nest.pack_sequence_as(self._spec, drawn)

    def _difference(self, batch) -> str | None:
        """What differs, "" for nothing; None where the numbers that came out are not finite."""
        whole = self._recorded(batch, 0, ROWS)
        self.draws, self.bytes_a_row = whole.draws, whole.bytes_a_row
        if not _is_finite(whole):
            return None
        if whole.derives_tensors and self._normalizes:
            return "gradients of inputs through BatchNormalization"
        again = self._recorded(tf.nest.map_structure(_nudged, batch), 0, ROWS, seed=1)
        if self._what_differs(whole, [again], again, close=max(_NOISY, self._close)) is not None:
            raise ValueError("it draws random numbers with tf.random; use keras.random")
        parts = [self._recorded(batch, 0, _FIRST), self._recorded(batch, _FIRST, ROWS)]
        return self._what_differs(whole, parts, again, close=self._close) or ""

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

    def _what_differs(self, whole: Recorder, parts: list[Recorder], again: Recorder, *, close: float) -> str | None:
        """What of the whole is not the parts', put together; `again` is the whole with other rounding."""
        if any(
            len(each.updates) != len(whole.updates) or len(each.logs) != len(whole.logs) for each in (*parts, again)
        ):
            return "the number of updates"
        for at, gradients in enumerate(whole.updates):
            together = [_total([part.updates[at][place] for part in parts]) for place in range(len(gradients))]
            if not _are_close(gradients, together, again.updates[at], close):
                return "the gradients"
        if not self._are_outputs(whole, parts, again, close):
            return "what it returns"
        shares = [part.share for part in parts]
        for at, value in enumerate(whole.logs):
            together = sum(share * part.logs[at] for share, part in zip(shares, parts, strict=True))
            if not _are_close([value], [together], [again.logs[at]], close):
                return "a number in the logs"
        for key, (variable, before, after) in whole.assigned.items():
            found = [part.assigned.get(key, (variable, before, before))[2] for part in parts]
            noisy = again.assigned.get(key, (variable, before, before))[2]
            ways = _ways_together(variable, before, after, found, shares)
            ways = {way for way, value in ways.items() if _are_close([after], [value], [noisy], close)}
            owner = self._owners.get(key, key)  # the variables of a metric go together
            if len(parts) > 1:
                ways = self._ways[owner] = self._ways.get(owner, ways) & ways
            if not ways:
                return f"the variable {variable.path!r}"
        return None

    def _are_outputs(self, whole: Recorder, parts: list[Recorder], again: Recorder, close: float) -> bool:
        """Whether the parts' predictions are the whole's: rows one after another, and else the same of each."""
        if any(len(each.outputs) != len(whole.outputs) for each in (*parts, again)):
            return False
        for at, value in enumerate(whole.outputs):
            found = [part.outputs[at] for part in parts]
            has_rows = step_outputs.have_rows(value, found, [each.stop - each.start for each in parts])
            if len(parts) > 1:
                self.have_rows = [*self.have_rows[:at], has_rows, *self.have_rows[at + 1 :]]
            together = [np.concatenate(found)] if has_rows else found
            if not all(_are_close([value], [each], [again.outputs[at]], close) for each in together):
                return False
        return True


def _ways_together(variable, before, after, found: list, shares: list[float]) -> dict[str, np.ndarray]:
    """What replicas may make of their values of a variable: a sum, an average or the same value."""
    ways = {"same": found[0]}
    if np.issubdtype(after.dtype, np.floating):
        ways["average"] = sum(share * value for share, value in zip(shares, found, strict=True))
    if variable.aggregation == "sum":
        ways["sum"] = before + sum(value - before for value in found)
    return ways


def _are_close(values: list, others: list, again: list, close: float) -> bool:
    """Whether numbers are as good as equal, by the rounding that another run of the whole shows."""
    if any(
        (a is None) != (b is None) or (a is not None and a.shape != b.shape)
        for a, b in zip(values, others, strict=True)
    ):
        return False
    kept = [at for at, value in enumerate(values) if value is not None]
    # A bias's gradient is a sum over all places of an image, which TensorFlow's CPU kernel adds up one by one. What
    # mixes rows shows in the kernels' gradients, too.
    has_kernels = any(values[at].ndim > 1 for at in kept)
    largest = max((_size(values[at], others[at]) for at in kept), default=0.0)
    for at in kept:
        size = max(_size(values[at], others[at]), _SMALL * largest)
        noise = _size(values[at] - again[at]) if values[at].dtype.kind == "f" else 0.0
        by = _CLOSE_FOR_BIASES if has_kernels and values[at].ndim < 2 else close
        if np.any(np.abs(values[at] - others[at]) > max(max(by, close) * size, _TIMES_NOISE * noise)):
            return False
    return math.isfinite(largest)


def _nudged(value):
    """A tensor of floats moved by less than the data's own precision, so that all sums round otherwise."""
    if not tf.is_tensor(value) or not value.dtype.is_floating or value.dtype.size < 4:
        return value
    return value * tf.cast(1 + 2.0**-20, value.dtype)


_UNKNOWN = object()


def _drawn(draw: np.random.Generator, spec, numbers: str, classes: int, none: int | None):
    """A tensor of drawn rows for a spec, or `_UNKNOWN` where none can be drawn."""
    if spec is None or isinstance(spec, (NoneTensorSpec, tf.OptionalSpec)):
        return None
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return _UNKNOWN
    known = [draws.UNKNOWN if size is None else size for size in spec.shape[1:]]
    shape = [ROWS, *known] if spec.shape.rank else []
    if spec.dtype.is_floating:
        values = draws.values(draw, shape, numbers)
    elif spec.dtype.is_integer:
        values = draws.values(draw, shape, "whole", below=classes)
        if none is not None and spec.dtype.min <= none <= spec.dtype.max:
            values = draws.with_special(draw, values, none, 0.3)
    elif spec.dtype.is_bool:
        values = draw.random(shape) < 0.5
    else:
        return _UNKNOWN
    return draws.cast(values, spec.dtype)


def _total(gradients: list):
    present = [each for each in gradients if each is not None]
    return sum(present) if present else None


def _size(*values: np.ndarray) -> float:
    return max(float(np.abs(each).max(initial=0.0)) for each in values)


def _is_finite(found: Recorder) -> bool:
    gradients = [each for update in found.updates for each in update if each is not None]
    return all(np.isfinite(each).all() for each in [*gradients, *found.logs, *found.outputs])

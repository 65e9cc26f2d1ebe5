"""Tries whether a step of the user's own can run on each replica's rows, or must see the whole batch.

Keras's own `train_step` and `compute_loss` are known. Any other is run eagerly on a few drawn rows, all at once and in
two parts, and nothing that it does stays: variables, random states, metrics and optimizers are as they were. Compared
are the gradients that reach an optimizer, the numbers of the logs and what is assigned to variables. Where the parts,
put together as replicas put them together, are the whole, the step runs by rows.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, slots, training, variables
from tfgpu.compat.keras import StatelessScope
from tfgpu.compat.tensorflow import NoneTensorSpec
from tfgpu.core import batch_sharding, step_context
from tfgpu.core.metric_logs import LogReader, function_of
from tfgpu.core.row_mixing import captures, choices, isolation
from tfgpu.core.state.sharded_variable import shard_info
from tfgpu.core.step_context import RowRange
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_ROWS, _FIRST = 7, 3  # drawn rows, and those of the first part: no fraction of one is one of the other
_CLOSE, _CLOSE_IN_16_BITS = 2e-5, 2e-2
_SMALL = 1e-2  # of the largest gradient: what is smaller is rounding
_NONES = (-1, -100, 255)  # labels that stand for "none"
_METHODS = (
    "train_step",
    "test_step",
    "compute_loss",
    "compute_metrics",
    "get_metrics_result",
    "stateless_compute_loss",
)


class NotBuilt(Exception):
    """A layer would make its variables in a trial."""


@dataclass
class Recorder:
    """What a step did on some rows.

    Attributes:
        share: the rows as a fraction of all.
        updates: for each call of an optimizer, the gradients as replicas would weigh them.
        logs: numbers of the logs that are no metric results.
        assigned: Keras variables by `id`, with the value that they would have.
        derives_tensors: it took gradients with respect to something other than variables.
    """

    share: float
    updates: list[list] = field(default_factory=list)
    logs: list[np.ndarray] = field(default_factory=list)
    assigned: dict = field(default_factory=dict)
    derives_tensors: bool = False
    _is_sum: bool = False

    def note_target(self, target: object, sources: object) -> None:
        """A tape is asked for a gradient: that of a vector is a sum over rows."""
        is_vector = tf.is_tensor(target) and bool(target.shape.rank) and target.shape.num_elements() != 1
        are_variables = [isinstance(source, (keras.Variable, tf.Variable)) for source in tf.nest.flatten(sources)]
        self._is_sum |= is_vector and any(are_variables)
        self.derives_tensors |= not all(are_variables)

    def note_call(self, layer: keras.layers.Layer) -> None:
        """A layer is called: one that is to make its variables now cannot be tried."""
        if not layer.built:
            raise NotBuilt(f"the layer {layer.name!r} is not built; build the model before `fit`")

    def note_update(self, gradients: list) -> None:
        """An optimizer is to apply gradients."""
        weight = 1.0 if self._is_sum else self.share
        self._is_sum = False
        dense = [None if g is None else np.asarray(tf.convert_to_tensor(g), "float64") for g in gradients]
        self.updates.append([None if g is None else weight * g for g in dense])


class _Apart(StatelessScope):
    """Nothing that a step assigns to Keras's variables stays."""

    def __init__(self):
        super().__init__(collect_losses=True)
        self._variables: dict = {}

    def add_update(self, update: tuple) -> None:
        self._variables[id(update[0])] = update[0]
        super().add_update(update)

    def assigned(self) -> dict:
        """Variables by `id`: each with the value that it has, and the one that it was given."""
        return {
            key: tuple(
                [
                    variable,
                    *(
                        np.asarray(tf.convert_to_tensor(v))
                        for v in (variables.held(variable), self.get_current_value(variable))
                    ),
                ]
            )
            for key, variable in self._variables.items()
        }


class _CannotTry(Exception):
    """The step does not run on drawn rows."""


def needs_whole_batch(model: keras.Model, step_function: Callable, spec: object) -> bool:
    """Whether a step must see the whole batch for one device's result.

    Args:
        model: the compiled and built model.
        step_function: `model.train_step` or `model.test_step`.
        spec: of a whole batch, as `tf.TensorSpec`s in the structure that the step gets.

    Raises:
        InputError: the step could not be tried, and the strategy asks for an error then; or it must see the whole
            batch, and each replica holds a part of the weights.
    """
    own = _own_methods(model, step_function)
    if not own:
        return False
    name = f"`{type(model).__name__}.{own[0]}`"
    needs = _found(model, step_function, spec, own, name)
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


def _found(model: keras.Model, step_function: Callable, spec: object, own: list[str], name: str) -> bool:
    """What the user says of a step of their own, or a trial."""
    chosen = {choices.of(function_of(getattr(model, each))) for each in own} - {None}
    if chosen:
        return choices.ON_ALL_ROWS in chosen
    try:
        differs = _Trial(model, step_function, spec).differing()
    except _CannotTry as error:
        return _unproven(model, name, str(error))
    if differs:
        _log.warning(
            "%s is not by rows (%s would differ between replicas and one device). So that it is what one device "
            "computes, it sees the whole batch on every replica; the model's layers still compute each replica's rows. "
            "The outputs travel between the replicas in every step. Where this is not needed, mark the method with "
            "`@tfgpu.by_rows`.",
            name,
            differs,
        )
    return differs is not None


def _unproven(model: keras.Model, name: str, why: str) -> bool:
    way = slots.get(model.distribute_strategy, "unproven", "gather")
    way = "warn" if way == "gather" and _is_over_replicas(model) else way
    said = f"Whether {name} gives each row its own number could not be tried ({why})."
    if way == "refuse":
        raise InputError(f"{said} Mark the method with `@tfgpu.by_rows` or `@tfgpu.on_all_rows`.")
    becomes = "It sees the whole batch on every replica" if way == "gather" else "It runs on each replica's rows"
    _log.warning("%s %s. Mark it with `@tfgpu.by_rows` or `@tfgpu.on_all_rows`.", said, becomes)
    return way == "gather"


def _own_methods(model: keras.Model, step_function: Callable) -> list[str]:
    """The methods of a step that are not Keras's."""
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
        self._captured = captures.of(step_function)
        self._owners = {id(v): at for at, metric in enumerate(model.metrics) for v in metric.variables}
        self._ways: dict = {}
        # Replicas weigh what passes its moments as a mean over rows. A gradient of something else is no such mean.
        self._normalizes = any(
            isinstance(each, keras.layers.BatchNormalization) for each in layers.layers_within(model)
        )
        is_narrow = tf.as_dtype(model.compute_dtype).size < 4
        self._close = _CLOSE_IN_16_BITS if is_narrow else _CLOSE

    def differing(self) -> str | None:
        """What of the whole the parts do not make; None if they make everything.

        Raises:
            _CannotTry: the step ran on no drawn rows.
        """
        reasons, tried = [], 0
        for batch in self._draws():
            try:
                found = self._difference(batch)
            except NotBuilt as error:
                raise _CannotTry(str(error)) from None
            except Exception as error:  # of the user's code, on numbers that are none of its own
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            tried += 1
            if found is not None:
                return found
        if not tried:
            raise _CannotTry(reasons[0] if reasons else "its data cannot be drawn")
        return None

    def _draws(self) -> Iterator[object]:
        """Batches of drawn rows: normal and positive numbers, few and many classes, labels that stand for none."""
        draw = np.random.default_rng(0)
        nones = [*_NONES, *(int(n) for n in self._captured.numbers if n == int(n) and n not in _NONES)]
        kinds = [("normal", 2, None), ("uniform", 8, None), *(("normal", 2, none) for none in nones)]
        for numbers, classes, none in kinds:
            leaves = tf.nest.flatten(self._spec)
            drawn = [_drawn(draw, spec, numbers, classes, none if at else None) for at, spec in enumerate(leaves)]
            if any(value is _UNKNOWN for value in drawn):
                raise _CannotTry("its data cannot be drawn")
            yield tf.nest.pack_sequence_as(self._spec, drawn)

    def _difference(self, batch) -> str | None:
        whole = self._recorded(batch, 0, _ROWS)
        if not _is_finite(whole):
            raise ValueError("it gives no finite number for drawn ones")
        if whole.derives_tensors and self._normalizes:
            return "gradients of inputs through BatchNormalization"
        again = self._recorded(batch, 0, _ROWS, seed=1)
        if not self._is_same(whole, [again]):
            raise ValueError("it draws random numbers with tf.random; use keras.random")
        parts = [self._recorded(batch, 0, _FIRST), self._recorded(batch, _FIRST, _ROWS)]
        return self._what_differs(whole, parts)

    def _recorded(self, batch, start: int, stop: int, *, seed: int = 0) -> Recorder:
        rows = tf.nest.map_structure(
            lambda v: batch_sharding.sliced(v, start, stop - start) if tf.is_tensor(v) else v, batch
        )
        found, scope = Recorder((stop - start) / _ROWS), _Apart()
        numbers = (tf.constant(n, tf.int32) for n in (stop - start, start, _ROWS))
        with (
            isolation.kept_draws(seed),
            self._captured.preserving_variables(),
            step_context.scope(is_trying=True, recorder=found, trial_rows=RowRange(*numbers)),
            tf.device("CPU:0"),
            scope,
        ):
            reader = LogReader(self._model)
            with reader.recording() as results:
                logs = self._step(rows)
            found.logs = [
                np.asarray(value, "float64") for value in reader.other_values(logs, results, keras.ops.convert_to_numpy)
            ]
        found.assigned = scope.assigned()
        return found

    def _is_same(self, whole: Recorder, others: list[Recorder]) -> bool:
        return self._what_differs(whole, others, weigh=False) is None

    def _what_differs(self, whole: Recorder, parts: list[Recorder], *, weigh: bool = True) -> str | None:
        """What of the whole is not the parts', put together."""
        if any(len(part.updates) != len(whole.updates) or len(part.logs) != len(whole.logs) for part in parts):
            return "the number of updates"
        for at, gradients in enumerate(whole.updates):
            together = [_total([part.updates[at][place] for part in parts]) for place in range(len(gradients))]
            if not self._are_close(gradients, together):
                return "the gradients"
        shares = [part.share if weigh else 1.0 for part in parts]
        for at, value in enumerate(whole.logs):
            if not self._are_close([value], [sum(s * part.logs[at] for s, part in zip(shares, parts, strict=True))]):
                return "a number in the logs"
        for key, (variable, before, after) in whole.assigned.items():
            found = [part.assigned.get(key, (variable, before, before))[2] for part in parts]
            ways = self._ways_together(variable, before, after, found, shares)
            owner = self._owners.get(key, key)  # the variables of a metric go together
            if weigh:
                ways = self._ways[owner] = self._ways.get(owner, ways) & ways
            if not ways:
                return f"the variable {variable.path!r}"
        return None

    def _ways_together(self, variable, before, after, found: list, shares: list[float]) -> set[str]:
        """In which ways replicas would make a variable's value of theirs: as a sum, an average or the same value."""
        ways = {"same": found[0]}
        if np.issubdtype(after.dtype, np.floating):
            ways["average"] = sum(s * value for s, value in zip(shares, found, strict=True))
        if variable.aggregation == "sum":
            ways["sum"] = before + sum(value - before for value in found)
        return {way for way, value in ways.items() if self._are_close([after], [value])}

    def _are_close(self, values: list, others: list) -> bool:
        if any(
            (a is None) != (b is None) or (a is not None and a.shape != b.shape)
            for a, b in zip(values, others, strict=True)
        ):
            return False
        pairs = [(a, b) for a, b in zip(values, others, strict=True) if a is not None]
        largest = max((_size(a, b) for a, b in pairs), default=0.0)
        return all(
            bool(np.all(np.abs(a - b) <= self._close * max(_size(a, b), _SMALL * largest))) for a, b in pairs
        ) and math.isfinite(largest)


_UNKNOWN = object()


def _drawn(draw: np.random.Generator, spec, numbers: str, classes: int, none: int | None):
    """A tensor of drawn rows for a spec, or `_UNKNOWN` where none can be drawn."""
    if spec is None or isinstance(spec, (NoneTensorSpec, tf.OptionalSpec)):
        return None
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return _UNKNOWN
    shape = [_ROWS, *(8 if size is None else size for size in spec.shape[1:])] if spec.shape.rank else []
    if spec.dtype.is_floating:
        values = draw.normal(size=shape) if numbers == "normal" else draw.uniform(0.05, 0.95, shape)
    elif spec.dtype.is_integer:
        values = draw.integers(0, classes, shape)
        if none is not None and spec.dtype.min <= none <= spec.dtype.max:
            values = np.where(draw.random(shape) < 0.3, none, values)
    elif spec.dtype.is_bool:
        values = draw.random(shape) < 0.5
    else:
        return _UNKNOWN
    return tf.cast(tf.convert_to_tensor(values), spec.dtype)


def _total(gradients: list):
    present = [each for each in gradients if each is not None]
    return sum(present) if present else None


def _size(*values: np.ndarray) -> float:
    return max(float(np.abs(each).max(initial=0.0)) for each in values)


def _is_finite(found: Recorder) -> bool:
    gradients = [each for update in found.updates for each in update if each is not None]
    return all(np.isfinite(each).all() for each in [*gradients, *found.logs])

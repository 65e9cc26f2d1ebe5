"""Finds the calls of a model that need all rows of a batch: each runs on a few rows, whole and in two halves."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, variables
from tfgpu.compat.keras import StatelessScope, get_mask, set_mask
from tfgpu.core.row_mixing import choices, own_layers
from tfgpu.parallel import model_graph
from tfgpu.parallel.pipeline import sections
from tfgpu.parallel.pipeline.micro_batches import MicroBatches, map_with_mask

_ROWS, _SIZES = 4, (32, 8)
_TOLERANCES = {"float16": 3e-2, "bfloat16": 3e-2}
_WHOLE, _HALVES = MicroBatches(_ROWS, 1), MicroBatches(_ROWS, 2)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowMixing:
    """What `probe` found.

    Attributes:
        mixing: calls whose result for a row depends on other rows, by the `id` of their node.
        other_rows: symbolic tensors whose first axis has another number of rows than the batch, by `id`.
    """

    mixing: frozenset[int] = frozenset()
    other_rows: frozenset[int] = frozenset()


def probe(model: keras.Model, strategy: tf.distribute.Strategy, batch=None) -> RowMixing:
    """Runs each call of a functional model in training on four rows, and on two and two. The model does not change.

    Args:
        model: functional or Sequential, built.
        strategy: of one replica, which runs the calls.
        batch: inputs as the model takes them, of which the first rows are used; None draws random numbers. If the model
            cannot run on the inputs, a warning says so, and calls of the user's own layers count as mixing rows.
    """
    for inputs in _inputs(model_graph.functional(model), batch):
        try:
            return _Trial(model, inputs).run(strategy)
        except Exception as error:  # from a layer's own code
            reason = error
    # Of calls of which nothing is known: those that run code of the user's that is not marked `tfgpu.by_rows`.
    unproven = {
        id(call.node): call.name
        for call in model_graph.calls(model)
        for each in model_graph.with_layers_within(call.layers)
        if own_layers.is_own(each) and choices.of(each) != choices.BY_ROWS
    }
    _log.warning(
        "Could not find out whether rows of %r depend on each other (%s: %s). %sGive some inputs as `batch`.",
        model.name,
        type(reason).__name__,
        " ".join(str(reason).split())[:200],
        f"So {', '.join(unproven.values())} of your own takes whole batches, not micro-batches. " if unproven else "",
    )
    return RowMixing(frozenset(unproven))


def _inputs(graph, batch) -> Iterator[list]:
    if batch is not None:
        yield [None if v is None else np.take(v, np.arange(_ROWS) % len(v), 0) for v in tf.nest.flatten(batch)]
        return
    for size in _SIZES:
        yield [_drawn((_ROWS, *(n or size for n in tensor.shape[1:])), tensor.dtype) for tensor in graph.inputs]


def _drawn(shape: tuple, dtype: str):
    draw = np.random.default_rng(0)
    if dtype == "string":
        return draw.integers(0, 2, shape).astype(str)
    return draw.normal(size=shape) if tf.as_dtype(dtype).is_floating else draw.integers(0, 2, shape)


class _Trial:
    """One run of all calls: values by the `id` of the symbolic tensor, for the whole batch and for both halves."""

    def __init__(self, model: keras.Model, inputs: list):
        symbolic, self._calls = model_graph.functional(model).inputs, model_graph.calls(model)
        given = zip(symbolic, inputs, strict=True)
        self._whole = {id(tensor): _tensor(value, tensor.dtype) for tensor, value in given}
        self._halves: tuple[dict, dict] = {}, {}
        self._by_rows: set[int] = set(self._whole)  # that have halves
        self._other_rows: set[int] = set()

    def run(self, strategy: tf.distribute.Strategy) -> RowMixing:
        agree = [each for calls in self._groups() for each in self._run(strategy, calls)]
        mixing = {id(call.node) for call, is_equal in zip(self._calls, agree, strict=True) if not is_equal}
        return RowMixing(frozenset(mixing), frozenset(self._other_rows))

    def _groups(self) -> list[list[model_graph.Call]]:
        """Calls that run together: one at a time where variables have no values yet, which are lent for that time."""
        waits = any(map(variables.is_deferred, _variables(self._calls)))
        return [[call] for call in self._calls] if waits else [self._calls]

    def _run(self, strategy: tf.distribute.Strategy, calls: list[model_graph.Call]) -> list[tf.Tensor]:
        # In a replica's graph, where random draws are those of the rows of the whole batch.
        run = tf.function(lambda given: strategy.run(self._run_all, (calls, given)), autograph=False)
        given = {key: (value, get_mask(value)) for key, value in self._whole.items()}
        with variables.lent(_variables(calls)):
            agree, found = run.get_concrete_function(given)(given)  # a call would warn of many tracings
        self._whole = {key: _masked(*pair) for key, pair in found.items()}
        return agree

    @tf.autograph.experimental.do_not_convert
    def _run_all(self, calls: list[model_graph.Call], given: dict) -> tuple[list[tf.Tensor], dict]:
        """Whether each call agrees, and the values of the whole batch with their masks, for the calls that follow."""
        self._whole = {key: _masked(*pair) for key, pair in given.items()}
        for key in sorted(self._by_rows):
            self._halve(key)
        agree = [self._agrees(call) for call in calls]
        is_last = calls[-1] is self._calls[-1]
        return agree, {} if is_last else {key: (value, get_mask(value)) for key, value in self._whole.items()}

    def _agrees(self, call: model_graph.Call) -> tf.Tensor:
        """Whether a call computes from the halves what it computes from the whole: results, losses and state."""
        whole = _run(call, self._whole, _WHOLE, 0)
        made = [tensor for tensor in call.outputs if sections.has_batch_axis(tensor)]
        is_known = all(id(tensor) in half for half in self._halves for tensor in call.inputs)
        found = [tf.constant(is_known and not any(map(layers.sees_whole_batch, call.layers)))]
        if tf.get_static_value(found[0]):
            halves = [_run(call, half, _HALVES, micro) for micro, half in enumerate(self._halves)]
            found += [self._is_equal(tensor) for tensor in made]
            found += [*_losses_agree(whole, halves), *_states_agree(whole, halves)]
        for tensor in made:
            self._halve(id(tensor))
        return tf.reduce_all(found)

    def _is_equal(self, tensor) -> tf.Tensor:
        whole = self._whole[id(tensor)]
        if whole is None:
            return tf.constant(True)
        return _is_close(whole, tf.concat([half[id(tensor)] for half in self._halves], 0))

    def _halve(self, key: int) -> None:
        """Takes the halves of a value from the whole, so that the next call is not blamed for mixing in this one."""
        self._by_rows.add(key)
        value = self._whole[key]
        rows = _ROWS if value is None else value.shape[0]
        if rows != _ROWS:
            self._other_rows.add(key)
        for at, half in enumerate(self._halves):
            half.pop(key, None)
            if rows is not None and rows % 2 == 0:
                half[key] = _rows_of(value, at * rows // 2, rows // 2)


def _variables(calls: list[model_graph.Call]) -> list[keras.Variable]:
    return [variable for call in calls for layer in call.layers for variable in layer.variables]


def _masked(value, mask):
    """A value with a mask of Keras's, or without one."""
    if mask is not None:
        set_mask(value, mask)
    return value


class _Scope(StatelessScope):
    """What a call adds to the loss, and what it assigns: by a variable's `id`, the variable with its last value."""

    def __init__(self):
        super().__init__(collect_losses=True)
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def add_update(self, update):
        super().add_update(update)
        self.assigned[id(update[0])] = update


def _run(call: model_graph.Call, values: dict, pieces: MicroBatches, micro: int) -> _Scope:
    with _Scope() as scope, pieces.row_scope(micro):
        call.run(values, model_graph.in_training)
    return scope


def _is_close(whole: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    if not whole.shape.is_compatible_with(other.shape):
        return tf.constant(False)
    if not whole.dtype.is_floating:
        return tf.reduce_all(tf.equal(whole, other))
    size = tf.reduce_max(tf.where(tf.math.is_finite(whole), tf.abs(whole), 0))
    is_close = tf.abs(whole - other) <= size * _TOLERANCES.get(whole.dtype.name, 1e-3)
    return tf.reduce_all(is_close | (whole == other) | (tf.math.is_nan(whole) & tf.math.is_nan(other)))


def _losses_agree(whole: _Scope, halves: list[_Scope]) -> list[tf.Tensor]:
    """Whether each added loss is the mean of the halves', as a pipeline takes it."""
    if any(len(half.losses) != len(whole.losses) for half in halves):
        return [tf.constant(False)]
    found = zip(whole.losses, *(half.losses for half in halves), strict=True)
    return [_is_close(loss, tf.add_n(parts) / len(parts)) for loss, *parts in found]


def _states_agree(whole: _Scope, halves: list[_Scope]) -> list[tf.Tensor]:
    """Whether each variable ends with what a pipeline makes of the halves' values (`ForwardPass.assign_state`)."""
    if any(half.assigned.keys() != whole.assigned.keys() for half in halves):
        return [tf.constant(False)]
    found = []
    for key, (variable, value) in whole.assigned.items():
        parts = [half.assigned[key][1] for half in halves]
        if variable.aggregation == "sum":
            before = tf.cast(tf.convert_to_tensor(variable), value.dtype)
            found.append(_is_close(value - before, tf.add_n([part - before for part in parts])))
        else:
            found.append(_is_close(value, tf.add_n(parts) / len(parts) if value.dtype.is_floating else parts[0]))
    return found


def _rows_of(value, begin: int, rows: int):
    return None if value is None else map_with_mask(value, lambda whole: whole[begin : begin + rows])


def _tensor(value, dtype: str):
    if value is None:
        return None
    value = tf.convert_to_tensor(value)
    return value if value.dtype == tf.string else tf.cast(value, dtype)

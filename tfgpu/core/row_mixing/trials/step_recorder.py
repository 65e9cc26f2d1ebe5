"""Records what a step of the user's own does on random rows; nothing that it does stays."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat.keras import get_stateless_scope
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.core.state.trial_scope import Apart, Assigned
from tfgpu.core.step_context import RowRange

if TYPE_CHECKING:
    from tfgpu.core.row_mixing.row_sums import Meetings
    from tfgpu.core.row_mixing.scalar_updates import Scalar

ROWS = 7
"""That are drawn in all."""


@dataclass
class Recorder:
    """What a step did on some rows of a few.

    Attributes:
        share: the rows as a fraction of all.
        start, stop: which rows.
        total: how many rows there are in all.
        parts: the rows of each replica, in a trial of a function that `strategy.run` runs; () in one of a `train_step`.
            Its gradients are summed as they are. Layers, losses and metrics within are tried by themselves: where it
            runs on all rows, they run on each part's.
        updates: for each call of an optimizer, the gradients as replicas would weigh them.
        logs: numbers of the logs that are no metric results.
        outputs: what a `predict_step` returned.
        assigned: variables by `id`, with the value that they would have; those that it has made by their number.
        has_made: it has made variables.
        changes: names of what it has changed in Python (`python_state.Kept.changes`).
        generators: those of them that hold a generator of random numbers.
        counts: those of them that hold a number, a text or a container.
        one_copy: keys of those that it has assigned and of which all replicas share one copy.
        derives_tensors: it took gradients with respect to something other than variables.
        draws: how often it drew numbers by `tf.random`.
        is_split: a piece runs on a part's rows, in a run on all rows.
        bytes_a_row: of each row, in the outputs of layers that the step itself calls.
        has_shares: a loss that is one number counted by its rows' share.
        shards: the `id`s of variables of which each replica holds a piece, in a model that trains no others. Replicas
            sum their gradients as a tape takes them: these are its updates then.
        applied: what reaches an optimizer of such a model.
        scalars: the numbers that a function of `strategy.run` gives to `Mean`s and `Sum`s.
        scalar_names: the names of those metrics, by their `id`s.
        scalar_states: the `id`s of the variables of those metrics.
        is_narrow: a layer that it calls computes in 16 bits.
        meetings: where the replicas of such a function would meet.
        of_optimizers: the `id`s of variables of the optimizers that were called, such as the learning rate.
        uses_results: it has read results of metrics that it does not return.
        own_reads: as of `Apart`.
        scale: makes larger or smaller gradients of those that a tape takes, before the step sees them.
    """

    share: float
    start: int
    stop: int
    total: int = ROWS
    parts: tuple[tuple[int, int], ...] = ()
    updates: list[list] = field(default_factory=list)
    logs: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    assigned: dict[object, Assigned] = field(default_factory=dict)
    has_made: bool = False
    changes: list[str] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    one_copy: list = field(default_factory=list)
    derives_tensors: bool = False
    draws: int = 0
    uses_results: bool = False
    own_reads: set[str] = field(default_factory=set)
    is_split: bool = False
    bytes_a_row: int = 0
    has_shares: bool = False
    shards: frozenset[int] = frozenset()
    applied: list[list] = field(default_factory=list)
    scalars: list["Scalar"] = field(default_factory=list)
    scalar_names: dict[int, str] = field(default_factory=dict)
    scalar_states: set[int] = field(default_factory=set)
    is_narrow: bool = False
    meetings: "Meetings | None" = None
    scale: Callable | None = None
    of_optimizers: set[int] = field(default_factory=set)
    _is_sum: bool = False
    _is_in_layer: bool = False

    def gradient(self, take: Callable, target: object, sources: object, *args, **kwargs) -> object:
        """A tape is asked for a gradient: that of a vector is a sum over rows."""
        flat = tf.nest.flatten(sources)
        is_vector = tf.is_tensor(target) and bool(target.shape.rank) and target.shape.num_elements() != 1
        are_variables = [isinstance(source, (keras.Variable, tf.Variable)) for source in flat]
        self._is_sum |= is_vector and any(are_variables)
        self.derives_tensors |= not all(are_variables)
        found = _taken(functools.partial(take, target), sources, flat, *args, **kwargs)
        scale = self.scale if tf.executing_eagerly() else None  # not one row's gradient, in a vectorized loop
        if scale is not None and all(are_variables):
            found = tf.nest.map_structure(lambda each: each if each is None else scale(each), found)
        pairs = zip(flat, tf.nest.flatten(found), strict=True)
        if of_shards := [gradient for source, gradient in pairs if id(source) in self.shards]:
            self.updates.append(_weighed(of_shards, 1.0 if is_vector else self.share))
        return found

    def drawn(self, shape, of: str) -> np.ndarray:
        """What `tf.random` would draw: for the rows of the batch, the numbers of those rows."""
        shape = [int(size) for size in np.asarray(shape).reshape(-1)]
        is_by_row = bool(shape) and shape[0] == self.stop - self.start
        draw = getattr(np.random.default_rng(self.draws), of)
        self.draws += 1
        return draw(size=[self.total, *shape[1:]])[self.start : self.stop] if is_by_row else draw(size=shape)

    def noting_outputs(self, call: Callable) -> object:
        """Calls a layer; of one that the step itself calls, the outputs would travel if the step saw all rows."""
        is_within, self._is_in_layer = self._is_in_layer, True
        try:
            outputs = call()
        finally:
            self._is_in_layer = is_within
        tensors = [leaf for leaf in keras.tree.flatten(outputs) if tf.is_tensor(leaf)]
        self.is_narrow |= any(leaf.dtype in (tf.float16, tf.bfloat16) for leaf in tensors)
        for leaf in () if is_within else tensors:
            size = leaf.shape.num_elements() * leaf.dtype.size if leaf.shape.rank else 0
            self.bytes_a_row += size // (self.stop - self.start)
        return outputs

    def _own_rows(self, leaf: object) -> object:
        """The rows of a tensor that has one or several for each row of the batch; anything else as it is."""
        if not tf.is_tensor(leaf) or not leaf.shape.rank or leaf.shape[0] % self.total:
            return leaf
        each = leaf.shape[0] // self.total
        return leaf[self.start * each : self.stop * each]

    def note_update(self, gradients: list, optimizer: keras.optimizers.Optimizer) -> None:
        """An optimizer is to apply gradients."""
        self.of_optimizers.update(map(id, optimizer.variables))
        weight = 1.0 if self._is_sum or self.parts else self.share
        self._is_sum = False
        if self.shards:
            self.applied.append(_weighed(gradients, 1.0))
        else:
            self.updates.append(_weighed(gradients, weight))

    def by_parts(self, call: Callable, args: tuple, kwargs: dict, *, is_sum: bool = False) -> object:
        """Calls a piece on each part's rows, as replicas would, and puts together what it returns and assigns.

        Args:
            call: the piece.
            args, kwargs: of all rows.
            is_sum: one number is a sum over the parts, as a loss's is; else a mean.
        """
        scope, whole, draws, found, states = get_stateless_scope(), (self.start, self.stop), self.draws, [], []
        before, self.is_split = dict(scope.state_mapping), True
        for start, stop in self.parts:
            scope.state_mapping.clear()
            scope.state_mapping.update(before)
            self.start, self.stop, self.draws = start, stop, draws
            rows = RowRange(*(tf.constant(number, tf.int32) for number in (stop - start, start, self.total)))
            own, options = keras.tree.map_structure(self._own_rows, (args, kwargs))
            with step_context.scope(trial_rows=rows):
                found.append(call(*own, **options))
            states.append(dict(scope.state_mapping))
        self.is_split = False
        (self.start, self.stop), shares = whole, [(stop - start) / self.total for start, stop in self.parts]
        scope.state_mapping.update(_average(states, before, shares))
        weights = [1.0] * len(shares) if is_sum else shares
        return keras.tree.map_structure(lambda *leaves: _together(leaves, weights), *found)


def _taken(take: Callable, sources: object, flat: list, *args, **kwargs) -> object:
    """The gradients of a tape; that of a variable that the step has assigned is the sum over the values that it had."""
    scope = get_stateless_scope()
    values = [scope.values_of(each) if isinstance(scope, Apart) else [each] for each in flat]
    if all(len(each) == 1 for each in values):
        return take(sources, *args, **kwargs)
    found = iter(take([value for each in values for value in each], *args, **kwargs))
    return tf.nest.pack_sequence_as(sources, [_total([next(found) for _ in each]) for each in values])


def _total(gradients: list) -> object:
    given = [each for each in gradients if each is not None]
    return tf.add_n([tf.convert_to_tensor(each) for each in given]) if len(given) > 1 else next(iter(given), None)


def _weighed(gradients: list, weight: float) -> list[np.ndarray | None]:
    return [None if each is None else weight * _array(each) for each in gradients]


def _array(gradient: object) -> np.ndarray:
    """In its own precision, but at least float32: a large model's gradients are many bytes."""
    dense = tf.convert_to_tensor(gradient)
    return np.asarray(tf.cast(dense, tf.float32) if dense.dtype.is_floating and dense.dtype.size < 4 else dense)


def _together(leaves: tuple, weights: list[float]) -> object:
    if not tf.is_tensor(leaves[0]):
        return leaves[0]
    if leaves[0].shape.rank:
        return tf.concat(leaves, 0)
    if not leaves[0].dtype.is_floating:
        return leaves[0]
    return tf.add_n([leaf * tf.cast(weight, leaf.dtype) for leaf, weight in zip(leaves, weights, strict=True)])


def _average(states: list[dict], before: dict, shares: list[float]) -> dict:
    """What replicas make of a variable that each has assigned: of floats, the average."""
    found = {}
    for key in {key for state in states for key, value in state.items() if before.get(key) is not value}:
        values = [state.get(key) for state in states]
        is_float = all(value is not None and tf.convert_to_tensor(value).dtype.is_floating for value in values)
        parts = [value * share for value, share in zip(values, shares, strict=True)] if is_float else []
        found[key] = tf.add_n(parts) if is_float else values[-1]
    return found


def is_by_hand() -> bool:
    """Whether a function is tried that `strategy.run` runs."""
    recorder = step_context.current().recorder
    return recorder is not None and bool(recorder.parts)


def splitting() -> "Recorder | None":
    """The recorder of such a trial where it runs on all rows, so that pieces within run on each part's."""
    recorder = step_context.current().recorder
    return recorder if is_by_hand() and recorder.stop - recorder.start == recorder.total else None


def isolate_trials() -> None:
    """While code is tried, it may make variables, and `tf.random` gives the same numbers for the same rows."""

    @wrap("KerasVariable.__init__")
    def initialize(stock, self, *args, **kwargs):
        scope = get_stateless_scope() if step_context.current().is_trying else None
        with private.replaced_attributes({"stateless_scope": None}) if scope is not None else nullcontext():
            stock(self, *args, **kwargs)
        if isinstance(scope, Apart):
            scope.made.append(self)

    @wrap("tf.random.normal")
    def normal(stock, shape, mean=0.0, stddev=1.0, dtype=tf.float32, *args, **kwargs):
        if (recorder := step_context.current().recorder) is None:
            return stock(shape, mean, stddev, dtype, *args, **kwargs)
        return tf.cast(recorder.drawn(shape, "normal"), dtype) * stddev + mean

    @wrap("tf.random.uniform")
    def uniform(stock, shape, minval=0, maxval=None, dtype=tf.float32, *args, **kwargs):
        recorder = step_context.current().recorder
        if recorder is None or not tf.as_dtype(dtype).is_floating:
            return stock(shape, minval, maxval, dtype, *args, **kwargs)
        return tf.cast(recorder.drawn(shape, "uniform"), dtype) * ((1 if maxval is None else maxval) - minval) + minval

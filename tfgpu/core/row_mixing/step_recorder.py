"""Records what a step of the user's own does on random rows; nothing that it does stays."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import variables
from tfgpu.compat.keras import StatelessScope, get_stateless_scope
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.core.state import layer_state
from tfgpu.core.step_context import RowRange

if TYPE_CHECKING:
    from tfgpu.core.row_mixing.row_sums import Meetings
    from tfgpu.core.row_mixing.scalar_updates import Scalar

_LATER, BETWEEN = 97, 0.7
"""What is added to counters, and what numbers are that are 0 or 1, as after many steps."""
ROWS = 7
"""That are drawn in all."""


@dataclass(frozen=True)
class Assigned:
    """A variable to which a step would assign, of Keras or of TensorFlow.

    Attributes:
        path: its name.
        aggregation: of what replicas assign to it, in Keras's words.
        before, after: its values.
        owner: what it belongs to, of a variable that the step has made itself.
        is_plain: it is one of TensorFlow's own.
        is_own: each replica keeps its value (`synchronization="on_read"`).
        is_added: something was added to it, in place of a value assigned.
        is_inside: it was assigned in a condition or a loop, where replicas cannot put their values together.
    """

    path: str
    aggregation: str
    before: np.ndarray
    after: np.ndarray
    owner: object = None
    is_plain: bool = False
    is_own: bool = False
    is_added: bool = False
    is_inside: bool = False


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
        scalar_states: the `id`s of the variables of those metrics.
        is_narrow: a layer that it calls computes in 16 bits.
        meetings: where the replicas of such a function would meet.
        times: by what gradients are multiplied before the step sees them.
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
    is_split: bool = False
    bytes_a_row: int = 0
    has_shares: bool = False
    shards: frozenset[int] = frozenset()
    applied: list[list] = field(default_factory=list)
    scalars: list["Scalar"] = field(default_factory=list)
    scalar_states: set[int] = field(default_factory=set)
    is_narrow: bool = False
    meetings: "Meetings | None" = None
    times: float = 1.0
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
        if self.times != 1 and all(are_variables) and tf.executing_eagerly():  # not one row's, in a vectorized loop
            found = tf.nest.map_structure(lambda g: g if g is None else tf.math.scalar_mul(self.times, g), found)
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
        if self._is_in_layer:
            return call()
        self._is_in_layer = True
        try:
            outputs = call()
        finally:
            self._is_in_layer = False
        for leaf in keras.tree.flatten(outputs):
            self.is_narrow |= tf.is_tensor(leaf) and leaf.dtype in (tf.float16, tf.bfloat16)
            size = leaf.shape.num_elements() * leaf.dtype.size if tf.is_tensor(leaf) and leaf.shape.rank else 0
            self.bytes_a_row += size // (self.stop - self.start)
        return outputs

    def _own_rows(self, leaf: object) -> object:
        """The rows of a tensor that has one or several for each row of the batch; anything else as it is."""
        if not tf.is_tensor(leaf) or not leaf.shape.rank or leaf.shape[0] % self.total:
            return leaf
        each = leaf.shape[0] // self.total
        return leaf[self.start * each : self.stop * each]

    def note_update(self, gradients: list) -> None:
        """An optimizer is to apply gradients."""
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
    dense = [None if each is None else np.asarray(tf.convert_to_tensor(each), "float64") for each in gradients]
    return [None if each is None else weight * each for each in dense]


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


class Apart(StatelessScope):
    """Nothing that a step assigns to Keras's variables stays.

    Args:
        plain: TensorFlow's own variables that the step can reach.
        is_later: counters are read as after many steps, and scalars that are 0 or 1 as another number: a loss that is
            warmed up has no weight in the first step, and a share of rows that falls begins with all. Of TensorFlow's
            own, until `restore`.

    Attributes:
        made: Keras variables that the step has made.
    """

    def __init__(self, plain: Sequence[tf.Variable] = (), *, is_later: bool = False):
        super().__init__(collect_losses=True)
        self._is_later = is_later
        self.made: list[keras.Variable] = []
        self._variables: dict = {}
        self._begun: dict = {}
        self._held: dict[int, list[tf.Variable]] = {}
        self._is_holding = False
        self._copies = [(copy, variables.local_value(copy)) for each in plain for copy in variables.copies(each)]
        for copy, value in self._copies if is_later else ():
            if _is_number(copy):
                copy.assign(_later(value))
        self._plain = [(each, variables.local_value(each)) for each in plain]
        self._made_plain: list[tuple[tf.Variable, tf.Tensor]] = []

    def begin_with(self, variable: keras.Variable, value: tf.Variable) -> None:
        """The step sees another value of a variable than the one that it has."""
        self.state_mapping[id(variable)] = value
        self._begun[id(variable)] = tf.identity(value)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes TensorFlow's own variables that are made in the block."""

        def create(make: Callable, **options) -> tf.Variable:
            variable = make(**options)
            if not self._is_holding:
                self._made_plain.append((variable, variables.local_value(variable)))
            return variable

        with tf.variable_creator_scope(create):
            yield

    def get_current_value(self, variable: keras.Variable) -> object | None:
        """The value that the step would see, also where nothing was assigned: Keras gives it to regularizers."""
        found = super().get_current_value(variable)
        if found is None and self._is_later and _is_counter(variable):
            self.begin_with(variable, self._as_variable(_later(variables.held(variable))))
            return super().get_current_value(variable)
        return variables.held(variable) if found is None else found

    def add_update(self, update: tuple) -> None:
        """Keeps what is assigned: to weights that train as a variable, of which a tape can take the gradient."""
        variable, value = update
        self._variables[id(variable)] = variable
        if variable.trainable and step_context.current().recorder is not None:
            value = self._as_variable(value)
            self._held.setdefault(id(variable), []).append(value)
        super().add_update((variable, value))

    def _as_variable(self, value: tf.Tensor) -> tf.Variable:
        self._is_holding = True
        try:
            return tf.Variable(value, trainable=value.dtype.is_floating)
        finally:
            self._is_holding = False

    def values_of(self, source: object) -> list:
        """What a tape may have read of a variable: its own value, then each that was assigned to it."""
        held = self._held.get(id(source))
        return [source] if held is None else [variables.held(source), *held]

    def made_variables(self) -> list[keras.Variable | tf.Variable]:
        """What the step has made: variables of Keras, then those of TensorFlow that are none of Keras's."""
        of_keras = {id(variables.held(each)) for each in self.made}
        return [*self.made, *(each for each, _ in self._made_plain if id(each) not in of_keras)]

    def assigned(self, noted: layer_state.Noted) -> dict[object, Assigned]:
        """Variables by `id`, or by the number of one that the step has made, with the values that they would have."""
        keys = {id(each): ("made", number) for number, each in enumerate(self.made_variables())}
        found = {}
        for key, each in self._variables.items():
            owner = ("made", each.path.rpartition("/")[0]) if key in keys else None
            before, after = self._begun.get(key, variables.held(each)), self.get_current_value(each)
            how = {"is_added": key in noted.added, "is_inside": key in noted.inside}
            how |= {"owner": owner, "is_own": each.synchronization == "on_read"}
            found[keys.get(key, key)] = Assigned(each.path, each.aggregation, _array(before), _array(after), **how)
        of_keras = {id(variables.held(each)) for each in self.made}
        for each, value in [*self._plain, *(pair for pair in self._made_plain if id(pair[0]) not in of_keras)]:
            before, after = _array(value), _array(variables.local_value(each))
            if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
                aggregation = each.aggregation.name.lower()
                found[keys.get(id(each), id(each))] = Assigned(each.name, aggregation, before, after, is_plain=True)
        return found

    def restore(self) -> None:
        """Gives TensorFlow's own variables the values that they had when this began."""
        for each, value in self._copies:
            each.assign(value)

    def with_one_copy(self) -> list[int]:
        """TensorFlow's own variables that the step has not made, and of which there is one copy, by `id`."""
        return [id(each) for each, _ in self._plain if not isinstance(each, tf.distribute.DistributedValues)]


def _is_counter(variable: keras.Variable) -> bool:
    """Whether it is a scalar that a step may count with, or that a callback raises; not one of a metric."""
    return _is_number(variable) and not (variable.trainable or variable.synchronization == "on_read")


def _is_number(variable: keras.Variable | tf.Variable) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return (dtype.is_integer or dtype.is_floating) and tf.TensorShape(variable.shape).rank == 0


def _later(value: tf.Variable | tf.Tensor) -> tf.Tensor:
    now = tf.convert_to_tensor(value)
    if now.dtype.is_integer:
        return now + tf.cast(_LATER, now.dtype)
    return tf.where((now == 0) | (now == 1), tf.cast(BETWEEN, now.dtype), now)


def _array(value: object) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(value))

"""Whether a layer gives each row its own number: it is run on drawn rows, whole and in two parts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import layers as private_layers
from tfgpu.compat import variables
from tfgpu.core import nested_graphs
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.randomness.draw_sizes import Sizes
from tfgpu.core.row_mixing import choices
from tfgpu.core.row_mixing.row_sums import Meets
from tfgpu.core.row_mixing.trials import captures, comparison, draws, isolation
from tfgpu.core.row_mixing.trials.drawn_inputs import Drawn, DrawnInputs
from tfgpu.core.row_mixing.trials.isolation import TrialShard
from tfgpu.core.row_mixing.trials.layer_calls import Needs, Recorder, recorder
from tfgpu.core.state import layer_state, python_state, sharded_variable, trial_scope


@dataclass(frozen=True)
class Verdict:
    """What was found: what the layer needs, and why, as the end of a sentence that begins with the layer."""

    needs: Needs
    why: str = ""
    have_rows: tuple[bool, ...] = ()  # of each output; empty where that is not known
    changes: tuple[str, ...] = ()  # names of what it changes in Python
    generators: tuple[str, ...] = ()  # those of them that hold a generator of random numbers
    counts: tuple[str, ...] = ()  # those of them that hold a number, a text or a container
    is_linear: bool = True  # its gradient is the sum of those of the rows' parts of a loss
    sizes: Sizes = Sizes()  # of its random draws


@dataclass
class Outcome:
    """What one run of a layer gives and does.

    Attributes:
        structure: of the outputs.
        outputs: how many there are.
        values: outputs, and tensors that it has left in attributes.
        losses: that it has added.
        state: Keras variables that it has assigned, with their values, by `id`.
        noted: how they were assigned.
        plain: values of TensorFlow's own variables.
        of_inputs: gradients with respect to the inputs.
        of_weights: gradients with respect to the weights.
    """

    structure: object
    outputs: int
    values: list[np.ndarray]
    losses: list[np.ndarray]
    state: dict[int, np.ndarray]
    noted: layer_state.Noted
    plain: list[np.ndarray]
    of_inputs: list[np.ndarray | None] = field(default_factory=list)
    of_weights: list[np.ndarray | None] = field(default_factory=list)


@dataclass(frozen=True)
class Sought:
    """What is looked at.

    Attributes:
        gradients: of the inputs and weights.
        of_losses: these are of added losses alone, which those of outputs may hide.
        both: the rows of both parts, not of the first alone.
    """

    gradients: bool = True
    of_losses: bool = False
    both: bool = True


_ALL, _NO_GRADIENTS = Sought(), Sought(gradients=False)


class LayerTrial:
    """Runs one layer on drawn rows.

    Args:
        layer: built, of the user's own.
        args, kwargs: what a step calls it with.
        verdict_of: what is known of a layer within, by the same arguments.
    """

    def __init__(self, layer: keras.layers.Layer, args: tuple, kwargs: dict, verdict_of: Callable[..., Verdict]):
        self._layer, self._verdict_of = layer, verdict_of
        self._captured = captures.of(layer)
        self._inputs = DrawnInputs((args, kwargs), self._captured.numbers)
        self._within = private_layers.layers_within(layer)
        # Of a variable of which each replica holds a piece the trial has the whole, as the layer has.
        weights = map(sharded_variable.read_variable, layer.variables)
        self._weights = list({id(each): each for each in weights}.values())
        self._close = comparison.close_for(getattr(each, "compute_dtype", None) for each in self._within)
        self._recorder, self._noted = Recorder(), draw_sizes.Noted()
        self._values: list[tf.Tensor] = []
        self._kept: python_state.Kept | None = None
        self._changes, self._runs, self._is_otherwise = set(), itertools.count(), False

    def run(self) -> Verdict:
        """Tries the layer."""
        if self._inputs.has_composites:
            return Verdict(Needs.UNKNOWN, "its inputs are ragged or sparse, which cannot be drawn at random")
        return isolation.run(self._tried)

    def _tried(self) -> Verdict:
        self._values = [draws.stand_in(at, variable) for at, variable in enumerate(self._weights)]
        with self._captured.used(), python_state.Kept([self._layer], self._within) as self._kept:
            try:
                found = draws.judged(self._inputs.drawn(self._inputs.kinds), self._judged)
            except Meets:
                return Verdict(Needs.ITS_ROWS, "it combines the replicas' rows itself")
        verdict = found.verdict or Verdict(Needs.UNKNOWN, found.why or draws.TOO_MANY)
        changes = tuple(sorted(self._changes))
        generators, counts = tuple(self._kept.draws(changes)), tuple(self._kept.counts(changes))
        found = {"changes": changes, "generators": generators, "counts": counts, "sizes": self._noted.sizes}
        return dataclasses.replace(verdict, **found)

    def _judged(self, draw: Drawn, sought: Sought = _ALL) -> Verdict | None:
        drawn, rows = draw.tensors, draw.rows
        whole_shard, *halves = isolation.shards_of(rows)
        self._recorder = Recorder()
        with nested_graphs.counting_decisions() as decided, nested_graphs.noting_conditions() as met:
            whole = self._outcome(drawn, whole_shard, sought)
        if not all(np.isfinite(each).all() for each in (*whole.values, *whole.losses) if each.dtype.kind == "f"):
            return None
        tried = halves if sought.both else halves[:1]
        difference = self._difference(draw, whole, tried, sought)
        if difference is None:
            other = self._judged_otherwise(draw, whole, decides=bool(decided), met=met)
            is_marked = any(choices.of(each) == choices.ON_ALL_ROWS for each in self._within)
            return other or Verdict(Needs.ITS_PARTS if is_marked else Needs.ITS_ROWS)
        self._recorder.is_on = False
        if draw.sizes is not None and self._is_rounding(draw, whole, sought):
            return None
        again = self._outcome(drawn, whole_shard, sought)
        if self._differing(whole, [again], [whole_shard]) is not None:
            return Verdict(Needs.ITS_ROWS, "random")
        self._recorder.is_on = True
        if self._judge_calls(whole_shard) and self._difference(draw, whole, tried, _NO_GRADIENTS) is None:
            return Verdict(Needs.ITS_PARTS)
        have_rows = tuple(comparison.has_rows(value, rows) for value in whole.values[: whole.outputs])
        self._recorder.is_on = False
        again = again if sought == _ALL else self._outcome(drawn, whole_shard)
        return Verdict(Needs.ALL, difference, have_rows, is_linear=self._is_linear(drawn, again, whole_shard, halves))

    def _judged_otherwise(self, draw: Drawn, whole: Outcome, *, decides: bool, met: dict) -> Verdict | None:
        """What is found with rows of other sizes and in later steps, and in branches not taken; None: nothing new."""
        if self._is_otherwise:
            return None
        self._is_otherwise = True
        try:
            found = self._judged_in_sizes(draw, whole, decides=decides)
            if found is None or found.needs is Needs.ITS_ROWS:
                marked = self._inputs.marked(draw)
                found = found if marked is None else draws.judged([marked], self._judged).verdict
            if met and (found is None or found.needs is Needs.ITS_ROWS):
                with nested_graphs.taking_other_branches(nested_graphs.Everywhere()):
                    found = draws.judged([draw], self._judged).verdict
        finally:
            self._is_otherwise = False
        return None if found is None or found.needs is Needs.ITS_ROWS else found

    def _judged_in_sizes(self, draw: Drawn, whole: Outcome, *, decides: bool) -> Verdict | None:
        """What is found where the rows of one part are small and those of the other large.

        A bound, as of a norm, may be met by some of the rows alone. Of outputs the small rows tell as much as all.
        First counters are as after many steps.
        """
        is_sum = decides or bool(whole.state)
        has_losses = bool(whole.losses)
        judge = functools.partial(self._judged, sought=Sought(decides or has_losses, has_losses, is_sum or has_losses))
        values, found = self._values, None
        for sizes in draws.SIZES if self._close == comparison.CLOSE else draws.SIZES[1:2]:
            beyond = self._captured.beyond if sizes == draws.SIZES[-1] else 0
            if sizes == draws.SIZES[0] or beyond:
                pairs = zip(self._weights, values, strict=True)
                self._values = [trial_scope.later(v, beyond) if trial_scope.is_counter(e) else v for e, v in pairs]
            sized = self._inputs.sized(draw, sizes)
            found = None if sized is None else draws.judged([sized], judge).verdict
            self._values = values
            if found is not None and (found.needs is not Needs.ITS_ROWS or not is_sum):
                break
        return found

    def _is_rounding(self, draw: Drawn, whole: Outcome, sought: Sought) -> bool:
        """Whether numbers that are as good as the drawn ones give others: rounding may be what differs."""
        shard, *halves = isolation.shards_of(draw.rows)
        nudged = self._outcome(self._inputs.nudged(draw, self._close / 16), shard, sought)
        pairs = zip([*whole.values, *whole.of_inputs], [*nudged.values, *nudged.of_inputs], strict=True)
        return not all(
            comparison.are_rows_of_their_size(one, [half.of(other) for half in halves], halves, self._close)
            for one, other in pairs
            if one is not None and other is not None and comparison.has_rows(one, shard.total)
        )

    def _is_linear(self, drawn: list, whole: Outcome, shard: TrialShard, halves: list[TrialShard]) -> bool:
        """Whether the gradients of two parts of a loss, each of some rows of the outputs, make that of the whole.

        On all rows each replica takes the gradient of its rows' part.
        """
        parts = [self._outcome(drawn, shard, within=half) for half in halves]
        for name in ("of_inputs", "of_weights"):
            largest = comparison.largest(getattr(whole, name))
            for value, *found in zip(getattr(whole, name), *(getattr(part, name) for part in parts), strict=True):
                found = [each for each in found if each is not None]
                if value is not None and not comparison.is_close(value, sum(found), 10 * self._close, largest):
                    return False
        return True

    def _judge_calls(self, whole: TrialShard) -> bool:
        """Tries the layers within on what they were called with; whether one mixes rows."""
        for call in self._recorder.calls.values():
            if call.layer is not self._layer:
                context = private.replaced_attributes({"current_call_ctx": call.context})
                with whole.held(), recorder.set_to(None), context:
                    call.needs = self._verdict_of(call.layer, *call.arguments).needs
        return any(call.needs is Needs.ALL for call in self._recorder.calls.values())

    def _difference(self, draw: Drawn, whole: Outcome, halves: list[TrialShard], sought: Sought) -> str | None:
        try:
            parts = [self._outcome(draw.tensors, shard, sought) for shard in halves]
        except Meets:
            raise
        except Exception as error:
            if draw.is_cut or draw.sizes is not None:
                raise
            return f"it takes all rows, but not some of them ({type(error).__name__})"
        return self._differing(whole, parts, halves, is_sized=draw.sizes is not None)

    def _outcome(
        self, drawn: list, shard: TrialShard, sought: Sought = _ALL, *, within: TrialShard | None = None
    ) -> Outcome:
        is_whole = shard.count == shard.total
        self._recorder.shard, self._recorder.counts = None if is_whole else shard, {}
        (args, kwargs), inputs = self._inputs.arguments(drawn, shard)
        self._captured.restore()
        floats = [each for each in (*inputs, *self._values) if each.dtype.is_floating]
        mapping = list(zip(self._weights, self._values, strict=True))
        scope = keras.StatelessScope(mapping, collect_losses=True, initialize_variables=False)
        self._recorder.scope, before = scope, isolation.tensors_in(self._within)
        start = dict(scope.state_mapping)
        self._kept.put_back()  # what Python holds is in each run the same; tf.random draws other numbers
        with (
            isolation.kept_draws(next(self._runs)),
            shard.held(),
            self._noted.run(shard.count),
            recorder.set_to(self._recorder),
            layer_state.noting_assignments() as noted,
        ):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(floats)
                with scope, self._kept.without_iterators():
                    outputs = self._layer(*args, **kwargs)
                left = isolation.tensors_in(self._within)
                kept = [value for key, value in left.items() if before.get(key) is not value]
                found = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(outputs) if leaf is not None]
                tensors = [*found, *(each for each in kept if hasattr(each, "numpy"))]
                seen = [] if sought.of_losses else tensors
                target = _target(seen, scope.losses, shard, within or shard) if sought.gradients else None
            self._changes |= set(self._kept.changes())
        gradients = [] if not sought.gradients else _gradients(tape, target, floats)
        count = sum(each.dtype.is_floating for each in inputs)
        state = {key: value for key, value in scope.state_mapping.items() if start.get(key) is not value}
        values, losses = ([comparison.array(each) for each in given] for given in (tensors, scope.losses))
        state = {key: comparison.array(value) for key, value in state.items()}
        plain = [comparison.array(variables.local_value(each)) for each in self._captured.variables]
        structure, of_inputs = keras.tree.map_structure(lambda leaf: 0, outputs), gradients[:count]
        return Outcome(structure, len(found), values, losses, state, noted, plain, of_inputs, gradients[count:])

    def _differing(
        self, whole: Outcome, parts: list[Outcome], places: list[TrialShard], *, is_sized: bool = False
    ) -> str | None:
        """In what the parts are not the whole, or None; `is_sized`: the rows of each part have a size of their own."""
        are_rows = comparison.are_rows_of_their_size if is_sized else comparison.are_rows
        shares = [shard.share for shard in places]
        if any(part.structure != whole.structure or len(part.values) != len(whole.values) for part in parts):
            return "its outputs change with the number of rows"
        if (named := self._differing_state(whole, parts, shares)) is not None:
            return named
        if any(len(part.losses) != len(whole.losses) for part in parts):
            return "its number of added losses changes with the number of rows"
        for at, value in enumerate(whole.losses):
            together = comparison.weighed([part.losses[at] for part in parts], shares)
            if not comparison.is_close(value, together, self._close):
                return "what it gives to `add_loss` is not a mean over rows"
        for at, value in enumerate(whole.values):
            if not are_rows(value, [part.values[at] for part in parts], places, self._close):
                return "a row of its outputs depends on other rows"
        if not all(each.of_inputs or each.of_weights for each in (whole, *parts)):
            return None
        return self._differing_gradients(whole, parts, places, is_sized=is_sized)

    def _differing_gradients(
        self, whole: Outcome, parts: list[Outcome], places: list[TrialShard], *, is_sized: bool
    ) -> str | None:
        floats = [spec for spec in self._inputs.specs if tf.as_dtype(spec.dtype).is_floating]
        close = 10 * self._close
        # What is 0 but for rounding, as the gradient of a key's bias, is as good as another such number.
        of_inputs, of_weights = (comparison.largest(each) for each in (whole.of_inputs, whole.of_weights))
        for spec, value, *found in zip(floats, whole.of_inputs, *(part.of_inputs for part in parts), strict=True):
            missing = [each is None for each in (value, *found)]
            if all(missing):
                continue
            if any(missing):
                are_same = False
            elif spec.rows_each is None:
                are_same = comparison.is_close(value, sum(found), close, of_inputs)
            elif is_sized:
                are_same = comparison.are_rows_of_their_size(value, found, places, close)
            else:
                are_same = comparison.are_rows(value, found, places, close, of_inputs)
            if not are_same:
                return "the gradient of a row depends on other rows"
        for at, value in enumerate(whole.of_weights):
            found = [each for part in parts if (each := part.of_weights[at]) is not None]
            if value is not None and found and not comparison.is_close(value, sum(found), close, of_weights):
                return "its gradient is not a sum over rows"
        return None

    def _differing_state(self, whole: Outcome, parts: list[Outcome], shares: list[float]) -> str | None:
        known = dict(zip(map(id, self._weights), zip(self._weights, self._values, strict=True), strict=True))
        for key in {key for each in (whole, *parts) for key in each.state}:
            if key not in known:
                continue  # a metric's, or a generator's, which is not the layer's
            variable, value = known[key]
            start = comparison.array(value)
            one, several = whole.state.get(key, start), [part.state.get(key, start) for part in parts]
            if not comparison.agrees(variable, start, one, several, shares, noted=whole.noted, close=self._close):
                return f"what it keeps in {variable.name!r} is not a mean over rows"
        for one, *several in zip(whole.plain, *(part.plain for part in parts), strict=True):
            if not all(comparison.is_close(one, each, self._close) for each in several):
                return "what it keeps in a tf.Variable depends on how many rows it sees"
        return None


def _target(
    tensors: list[tf.Tensor], losses: list[tf.Tensor], shard: TrialShard, within: TrialShard
) -> tf.Tensor | None:
    """A number of the shard of which the whole's is the sum: what is drawn for each row times its outputs.

    Args:
        tensors: outputs of the shard.
        losses: that were added.
        shard: the rows that there are.
        within: those of them that count.
    """
    found = [tf.reduce_sum(tf.cast(loss, tf.float32)) * within.share for loss in losses]
    for at, tensor in enumerate(tensors):
        if not tensor.dtype.is_floating or tensor.shape.rank is None:
            continue
        source = np.random.default_rng(at)
        rows = tensor.shape[0] if tensor.shape.rank else None
        if rows is not None and shard.count and rows == shard.count:
            drawn = source.normal(size=(shard.total, *tensor.shape[1:]))
            others = np.ones(shard.total, bool)
            others[within.first : within.first + within.count] = False
            drawn[others] = 0.0
            upstream = shard.of(drawn)
        elif rows is None or rows % shard.count:
            upstream = source.normal(size=tuple(tensor.shape)) * within.share
        else:
            continue  # several for each row, in an order that is not known
        found.append(tf.reduce_sum(tf.cast(tensor, tf.float32) * tf.constant(upstream, tf.float32)))
    return tf.add_n(found) if found else None


def _gradients(tape: tf.GradientTape, target: tf.Tensor | None, sources: list[tf.Tensor]) -> list[np.ndarray | None]:
    found = [None] * len(sources) if target is None else tape.gradient(target, sources)
    return [None if each is None else comparison.array(tf.convert_to_tensor(each)) for each in found]

"""Whether a metric keeps sums over rows: it is updated with drawn rows, whole and in two parts."""

from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.core import step_context
from tfgpu.core.row_mixing.row_sums import Meets
from tfgpu.core.row_mixing.trials import captures, comparison, draws, isolation
from tfgpu.core.row_mixing.trials.drawn_inputs import Drawn, DrawnInputs
from tfgpu.core.row_mixing.trials.isolation import TrialShard
from tfgpu.core.state import python_state


@dataclass(frozen=True)
class Needed:
    """What a metric needs.

    Attributes:
        all_rows: it keeps something else than sums over rows.
        changes: names of what it changes in Python.
    """

    all_rows: bool
    changes: tuple[str, ...] = ()


class MetricTrial:
    """Updates one metric with drawn rows, at once and in two parts.

    Args:
        update: the class's own `update_state`.
        metric: whose variables are left as they are.
        args, kwargs: what a step updates it with.

    Attributes:
        why: it could not be tried.
    """

    def __init__(self, update, metric: keras.metrics.Metric, args: tuple, kwargs: dict):
        self._update, self._metric, self.why = update, metric, ""
        self._captured = captures.of(metric)
        self._inputs = DrawnInputs((args, kwargs), self._captured.numbers)

    def run(self) -> Needed | None:
        """What the metric needs; None where it could not be tried."""
        return isolation.run(self._tried)

    def _tried(self) -> Needed | None:
        with self._captured.used(), python_state.Kept([self._metric], ()) as kept:
            try:
                with kept.locked_arrays():
                    found = draws.judged(self._inputs.drawn(["positive", *self._inputs.kinds]), self._judged)
            except Meets:
                return Needed(False)
            changes = tuple(kept.changes())
        self.why = found.why or draws.TOO_MANY
        return None if found.verdict is None else Needed(found.verdict or bool(changes), changes)

    def _judged(self, draw: Drawn) -> bool | None:
        drawn = draw.tensors
        whole_shard, *halves = isolation.shards_of(draw.rows)
        # Starts from the state after one batch: in later batches, each replica starts from its shard of the state.
        start = self._state_after(drawn, whole_shard, None)
        whole = self._state_after(drawn, whole_shard, start)
        if not all(comparison.is_finite(value) for value in whole):
            return None
        try:
            first = self._state_after(drawn, halves[0], start)
            second = self._state_after(drawn, halves[1], None)
        except Meets:
            raise
        except Exception:
            return True
        parts = zip(self._metric.variables, start, whole, first, second, self._initial(), strict=True)
        return not all(_is_sum(*each) for each in parts) or self._differs_in_sizes(draw)

    def _differs_in_sizes(self, draw: Drawn) -> bool:
        """Whether rows count otherwise where those of one part are small and those of the other large, as by a bound.

        Of a sum, which large numbers rule, the gradients of small ones still tell.
        """
        first, other, last = (self._inputs.sized(draw, sizes) for sizes in draws.SIZES)
        if first is None:
            return False
        found = draws.judged([first, other], self._counts_otherwise).verdict
        others = [each for each in (last, self._inputs.marked(draw)) if each is not None]
        return bool(found) or any(draws.judged([each], self._counts_otherwise).verdict for each in others)

    def _counts_otherwise(self, draw: Drawn) -> bool | None:
        shard, *halves = isolation.shards_of(draw.rows)
        whole, *parts = (_Counted(*self._counted(draw.tensors, each)) for each in (shard, *halves))
        if not all(comparison.is_finite(value) for value in (*whole.state, *whole.gradients)):
            return None
        initial = self._initial()
        of_parts = (each.state for each in parts)
        states = zip(self._metric.variables, initial, whole.state, *of_parts, initial, strict=True)
        if all(_is_sum(*each) for each in states) and whole.has_gradients_of(parts, halves):
            return False
        nudged = _Counted(*self._counted(self._inputs.nudged(draw, comparison.CLOSE / 16), shard))
        return True if whole.is_as_good_as(nudged, halves) else None

    def _initial(self) -> list:
        return [comparison.array(variables.local_value(variables.held(each))) for each in self._metric.variables]

    def _state_after(self, drawn: list, shard: TrialShard, start: list | None) -> list:
        (args, kwargs), _ = self._inputs.arguments(drawn, shard)
        return [comparison.array(value) for value in self._updated(args, kwargs, shard, start)]

    def _counted(self, drawn: list, shard: TrialShard) -> tuple[list, list]:
        """The state after one batch, and the gradients of a number that is made of it for the inputs with rows."""
        (args, kwargs), inputs = self._inputs.arguments(drawn, shard)
        pairs = zip(inputs, self._inputs.specs, strict=True)
        sources = [each for each, spec in pairs if each.dtype.is_floating and spec.rows_each is not None]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            state = self._updated(args, kwargs, shard, None)
            floats = [tf.cast(each, tf.float32) for each in state if each.dtype.is_floating]
            drawn = [tf.random.stateless_normal(each.shape, (at, 0)) for at, each in enumerate(floats)]
            weighed = [tf.reduce_sum(each * noise) for each, noise in zip(floats, drawn, strict=True)]
            target = tf.add_n(weighed) if weighed else tf.constant(0.0)
        found = [each for each in tape.gradient(target, sources) if each is not None]
        return [comparison.array(each) for each in state], [comparison.array(tf.convert_to_tensor(g)) for g in found]

    def _updated(self, args: tuple, kwargs: dict, shard: TrialShard, start: list | None) -> list[tf.Tensor]:
        self._captured.restore()
        held = self._metric.variables
        values = [variables.local_value(variables.held(each)) for each in held] if start is None else start
        scope = keras.StatelessScope(list(zip(held, values, strict=True)), initialize_variables=False)
        with shard.held(), step_context.scope(losses_are_plain=True), scope:
            self._update(self._metric, *args, **kwargs)
            return [tf.convert_to_tensor(each.value) for each in held]


@dataclass(frozen=True)
class _Counted:
    """What a metric makes of rows in one update: its state, and gradients by rows."""

    state: list
    gradients: list

    def has_gradients_of(self, parts: list["_Counted"], halves: list[TrialShard]) -> bool:
        """Whether those of the parts' rows are its own, each compared by the size of its part's numbers."""
        close = 10 * comparison.CLOSE
        return all(len(each.gradients) == len(self.gradients) for each in parts) and all(
            comparison.are_rows_of_their_size(one, others, halves, close)
            for one, *others in zip(self.gradients, *(each.gradients for each in parts), strict=True)
        )

    def is_as_good_as(self, nudged: "_Counted", halves: list[TrialShard]) -> bool:
        """Whether numbers that rounding may make of the rows give the same."""
        parts = [_Counted(nudged.state, [half.of(each) for each in nudged.gradients]) for half in halves]
        same = (comparison.is_close(*each, comparison.CLOSE) for each in zip(self.state, nudged.state, strict=True))
        return all(same) and self.has_gradients_of(parts, halves)


def _is_sum(variable: keras.Variable, start, whole, first, second, initial) -> bool:
    """Whether what replicas have kept, put together as the variable says, is what one device keeps."""
    if whole.dtype.kind not in "fiub":
        return True
    if variable.aggregation == "sum":
        return comparison.is_close(whole, first + (second - initial), comparison.CLOSE, first, second)
    if variable.aggregation == "mean":
        moved = first - start, second - initial
        is_whole = comparison.is_close(whole, first, comparison.CLOSE)
        return is_whole and comparison.is_close(*moved, comparison.CLOSE, first, second)
    return comparison.is_close(whole, first, comparison.CLOSE)

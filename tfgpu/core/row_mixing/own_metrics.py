"""Metrics of the user's own: their state is a sum over replicas, or they are computed on all rows.

What a metric keeps is summed over replicas when it is read. That is one device's state where each batch adds to it what
its rows add, as counts and sums do. A metric class that keeps something else (a running maximum, a ratio, a loss's
mean) is found by a trial, as layers are; its `update_state` then gets all rows on every replica, and counts once.
So does that of a metric whose state is in Python.
"""

import contextlib
import logging
from dataclasses import asdict, dataclass, replace

import keras
import tensorflow as tf

from tfgpu.compat import slots, variables
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, replica_attributes, step_context
from tfgpu.core.row_mixing import choices, fingerprints, gathering, verdicts
from tfgpu.core.row_mixing.row_sums import Meets
from tfgpu.core.row_mixing.trials import captures, comparison, draws, isolation, step_recorder
from tfgpu.core.row_mixing.trials.drawn_inputs import Drawn, DrawnInputs
from tfgpu.core.row_mixing.trials.isolation import TrialShard
from tfgpu.core.trial_cache import code_digest, store
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_LIBRARIES = ("keras", "tfgpu", "builtins")


def give_own_metrics_all_rows() -> None:
    """Tries metric classes of the user's own, and gives all rows to those that need them.

    Stock Keras, like `tf.distribute`, sums what each replica has kept.
    """

    @wrap("keras.metrics.Metric.__init__")
    def initialize(stock, self, *args, **kwargs):
        _take_hold_of(type(self))
        stock(self, *args, **kwargs)

    @extensions.compilations.register
    @contextlib.contextmanager
    def around_compile(model, arguments):
        for each in keras.tree.flatten([arguments.get("metrics"), arguments.get("weighted_metrics")]):
            if isinstance(each, keras.metrics.Metric):
                _take_hold_of(type(each))  # it may be older than this repair
        yield


def _take_hold_of(cls: type) -> None:
    for each in cls.__mro__:
        if each.__module__.split(".")[0] in _LIBRARIES:
            return
        update = each.__dict__.get("update_state")
        if update is not None and not slots.get(update, "gets_all_rows"):

            @wrap(each, "update_state")
            def update_state(stock, self, *args, **kwargs):
                return _updated(stock, self, args, kwargs)

            slots.of(each.__dict__["update_state"]).gets_all_rows = True


def _updated(stock, metric: keras.metrics.Metric, args: tuple, kwargs: dict):
    if step_recorder.is_by_hand():
        return None  # it is tried by itself
    if step_context.current().is_trying or not gathering.may_meet():
        return stock(metric, *args, **kwargs)
    args, kwargs = keras.tree.map_structure(_as_tensor, (args, kwargs))
    needed = _needed(stock, metric, args, kwargs) if gathering.with_rows((args, kwargs)) else Needed(False)
    replica_attributes.note([metric], needed.changes, ())
    if not needed.all_rows:
        with step_context.scope(losses_are_plain=True):
            return stock(metric, *args, **kwargs)
    args, kwargs = gathering.of_all_replicas((args, kwargs), _named(metric))
    with gathering.as_whole_batch(metric.variables):
        return stock(metric, *args, **kwargs)


def _as_tensor(leaf: object) -> object:
    is_array = hasattr(leaf, "shape") and not tf.is_tensor(leaf) and not isinstance(leaf, keras.Variable)
    return tf.convert_to_tensor(leaf) if is_array else leaf


def _named(metric: keras.metrics.Metric) -> str:
    return f"The metric {metric.name!r} ({type(metric).__name__})"


@dataclass(frozen=True)
class Needed:
    """What a metric needs.

    Attributes:
        all_rows: it keeps something else than sums over rows.
        changes: names of what it changes in Python.
    """

    all_rows: bool
    changes: tuple[str, ...] = ()


def _needed(stock, metric: keras.metrics.Metric, args: tuple, kwargs: dict) -> Needed:
    choice = choices.of(metric)
    if choice is not None:
        _note(metric, choice == choices.ON_ALL_ROWS, "", verdicts.MARKED, args, kwargs)
        return Needed(choice == choices.ON_ALL_ROWS)
    known = vars(slots.of(metric)).setdefault("needs_all", {})
    key = fingerprints.of_arguments(args, kwargs)
    if key not in known:
        known[key] = _found(MetricTrial(stock, metric, args, kwargs), metric, args, kwargs)
    return known[key]


def _note(metric: keras.metrics.Metric, needs_all: bool, why: str, source: str, args, kwargs) -> verdicts.Piece:
    name = f"metric {metric.name!r} ({type(metric).__name__})"
    size = verdicts.bytes_a_row(gathering.with_rows((args, kwargs))) if needs_all else 0
    becomes = verdicts.ON_ALL_ROWS if needs_all else verdicts.BY_ROWS
    return verdicts.note(verdicts.Piece(name, becomes, why, source, size, verdicts.rows_of_batch()))


def _found(trial: "MetricTrial", metric: keras.metrics.Metric, args: tuple, kwargs: dict) -> Needed:
    found = store.found(
        "metric",
        (metric, code_digest.rows_of((args, kwargs))),
        trial.run,
        lambda found: None if found is None else asdict(found),
        lambda all_rows, changes: Needed(bool(all_rows), tuple(changes)),
    )
    if found is None:
        return Needed(_of_unproven(metric, trial.why, args, kwargs))
    why = "it keeps something other than a sum over rows" if found.all_rows else ""
    piece = _note(metric, found.all_rows, why, verdicts.TRIED, args, kwargs)
    if found.all_rows:
        _log.warning(
            "%s keeps something other than a sum over rows. To match one device, its update gets the rows of all "
            "replicas, which are sent in every step (%s). A metric that keeps sums and counts, and divides in "
            "`result`, sends nothing.",
            _named(metric),
            piece.traffic,
        )
    return found


def _of_unproven(metric: keras.metrics.Metric, why: str, args: tuple, kwargs: dict) -> bool:
    """Whether a metric that could not be tried gets all rows, by the strategy's `unproven`."""
    way = choices.unproven()
    if way == "gather" and not gathering.can_travel((args, kwargs)):
        way = "warn"
    piece = _note(metric, way == "gather", why, verdicts.UNPROVEN, args, kwargs)
    if way == "refuse":
        verdicts.note(replace(piece, verdict=verdicts.REFUSED))
        raise InputError(
            f"{_named(metric)} could not be tried ({why}), so it is unknown whether it keeps sums over rows, and "
            "the strategy's `unproven` is 'refuse'. Mark its class with `tfgpu.by_rows` if it does, else with "
            "`tfgpu.on_all_rows`."
        )
    _log.warning(
        "%s could not be tried (%s), so it is unknown whether it keeps sums over rows. Its update gets %s. Mark its "
        "class with `tfgpu.by_rows` if it does, else with `tfgpu.on_all_rows`.",
        _named(metric),
        why,
        "each replica's own rows" if way == "warn" else "the rows of all replicas",
    )
    return way != "warn"


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
        with self._captured.preserving_variables(), isolation.unchanged(self._metric, layers=()) as kept:
            try:
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
        initial = [comparison.array(variables.local_value(variables.held(each))) for each in self._metric.variables]
        parts = zip(self._metric.variables, start, whole, first, second, initial, strict=True)
        return not all(_is_sum(*each) for each in parts)

    def _state_after(self, drawn: list, shard: TrialShard, start: list | None) -> list:
        (args, kwargs), _ = self._inputs.arguments(drawn, shard)
        self._captured.restore()
        held = self._metric.variables
        values = [variables.local_value(variables.held(each)) for each in held] if start is None else start
        scope = keras.StatelessScope(list(zip(held, values, strict=True)), initialize_variables=False)
        with shard.held(), step_context.scope(losses_are_plain=True), scope:
            self._update(self._metric, *args, **kwargs)
            return [comparison.array(tf.convert_to_tensor(each.value)) for each in held]


def _is_sum(variable: keras.Variable, start, whole, first, second, initial) -> bool:
    """Whether what replicas have kept, put together as the variable says, is what one device keeps."""
    if whole.dtype.kind not in "fiub":
        return True
    if variable.aggregation == "sum":
        return comparison.is_close(whole, first + (second - initial), comparison.CLOSE, first, second)
    if variable.aggregation == "mean":
        return all(comparison.is_close(whole, each, comparison.CLOSE) for each in (first,)) and comparison.is_close(
            first - start, second - initial, comparison.CLOSE, first, second
        )
    return comparison.is_close(whole, first, comparison.CLOSE)

"""Metrics of the user's own: their state is a sum over replicas, or they are computed on all rows.

What a metric keeps is summed over replicas when it is read. That is one device's state where each batch adds to it what
its rows add, as counts and sums do. A metric class that keeps something else (a running maximum, a ratio, a loss's
mean) is found by a trial, as layers are; its `update_state` then gets all rows on every replica, and counts once.
So does that of a metric whose state is in Python.
"""

import contextlib
import logging
from dataclasses import asdict, replace

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, replica_attributes, step_context
from tfgpu.core.row_mixing import choices, fingerprints, gathering, verdicts
from tfgpu.core.row_mixing.trials import step_recorder
from tfgpu.core.row_mixing.trials.metric_trial import MetricTrial, Needed
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

    @wrap("IoUBase.update_state")
    def update_iou(stock, self, y_true, y_pred, *args, **kwargs):
        """Of Keras's metrics, these alone may look for the largest number along the rows."""
        is_along_rows = self.axis in (0, -len(y_pred.shape)) and not (self.sparse_y_true and self.sparse_y_pred)
        if not is_along_rows:
            return stock(self, y_true, y_pred, *args, **kwargs)
        return _updated(stock, self, (y_true, y_pred, *args), kwargs)

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


def _needed(stock, metric: keras.metrics.Metric, args: tuple, kwargs: dict) -> Needed:
    choice = choices.of(metric)
    if choice is not None:
        _note(metric, choice == choices.ON_ALL_ROWS, "", verdicts.MARKED, args, kwargs)
        return Needed(choice == choices.ON_ALL_ROWS)
    known = vars(slots.of(metric)).setdefault("needs_all", {})
    changing = vars(slots.of(metric)).setdefault("changing", [])
    given = fingerprints.of_arguments(args, kwargs)
    key = given, fingerprints.of_owner(metric, changing)
    if key not in known:
        found = _found(MetricTrial(stock, metric, args, kwargs), metric, args, kwargs)
        changing += sorted(set(found.changes).difference(changing))
        key = given, fingerprints.of_owner(metric, changing)
        known[key] = found
    return known[key]


def _note(metric: keras.metrics.Metric, needs_all: bool, why: str, source: str, args, kwargs) -> verdicts.Piece:
    name = f"metric {metric.name!r} ({type(metric).__name__})"
    return verdicts.note_rows(name, needs_all, why, source, gathering.with_rows((args, kwargs)))


def _found(trial: MetricTrial, metric: keras.metrics.Metric, args: tuple, kwargs: dict) -> Needed:
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

"""Custom losses and metric functions that need all rows of a batch: a Dice written by hand, a masked mean, a sum.

One that is a mean over rows, or gives a number a row, is right on each replica's rows. Which kind a function is, nobody
says; so each is tried on a few drawn rows, whole and in two parts, the first time that a step meets it. One whose
result for the whole is not what the parts say is computed from the rows of all replicas, as on one device. All
workers must find the same, since they meet where it needs all rows: nothing in a try depends on time or on the data.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace

import keras
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import slots, training
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, extensions, logits, replica_attributes, step_context
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.randomness.draw_sizes import Sizes
from tfgpu.core.row_mixing import choices, coupled_losses, fingerprints, gathering, row_sums, verdicts
from tfgpu.core.row_mixing.trials import step_recorder
from tfgpu.core.row_mixing.trials.loss_trial import LossTrial, Needs
from tfgpu.core.state import layer_state
from tfgpu.core.trial_cache import code_digest, store
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)


def give_own_losses_all_rows() -> None:
    """Gives losses and metrics that are written by hand the rows of all replicas, where they need them.

    Stock Keras, like `tf.distribute`, takes each for a mean over rows.
    """
    logits.attach_delayed()
    _hold_loss_classes()
    _note_meetings()

    @wrap("LossFunctionWrapper.call")
    def call_function(stock, self, y_true, y_pred):
        if not _is_tried(self.fn, training.loss_arguments(self), y_true, y_pred):
            return stock(self, y_true, y_pred)
        return _of_batch(self, lambda *rows: stock(self, *rows), _name(self.fn), y_true, y_pred)

    @wrap("loss_module.reduce_weighted_values")
    def reduce_weighted_values(stock, values, sample_weight=None, mask=None, *args, **kwargs):
        """A number of the batch is multiplied by weights of rows: each replica multiplies the whole batch's."""
        if gathering.may_meet() and batch_rows.can_communicate() and (sample_weight is not None or mask is not None):
            values = keras.ops.convert_to_tensor(values, dtype=kwargs.get("dtype"))
            if values.shape.rank == 0:
                share = tf.cast(batch_rows.known_share(), values.dtype)
                (values,) = row_sums.over_replicas([tf.math.multiply_no_nan(values, share)])
        return stock(values, sample_weight, mask, *args, **kwargs)

    @wrap("MeanMetricWrapper.update_state")
    def update_state(stock, self, y_true, y_pred, sample_weight=None):
        function, arguments = training.metric_function(self)
        is_tried = _is_tried(function, arguments, y_true, y_pred, squeezes=_squeezes(function))
        if step_recorder.is_by_hand() and is_tried:
            return None  # it is tried by itself
        if not is_tried or not gathering.may_meet():
            return stock(self, y_true, y_pred, sample_weight)
        y_true, y_pred = keras.tree.map_structure(keras.ops.convert_to_tensor, (y_true, y_pred))

        def of_rows(*rows):
            return keras.ops.convert_to_tensor(function(*rows, **arguments))

        needs, sizes = _needs(self, of_rows, f"metric {_name(function)!r}", y_true, y_pred)
        values = _computed(needs, sizes, of_rows, y_true, y_pred)
        if not _gives_rows(needs) and values.shape.rank:  # numbers of the batch: over all replicas they count once
            weight = tf.fill(tf.shape(values), tf.cast(batch_rows.known_share(), values.dtype))
            sample_weight = weight if sample_weight is None else sample_weight * weight
        # Nothing meets from here on, so that no other replica's thread sees the stand-in.
        with training.metric_values(self, values):
            return stock(self, y_true, y_pred, sample_weight)


def _note_meetings() -> None:
    """A trial has one replica, which meets no other; and `all_gather` in a step gives the rows of the batch."""

    @wrap("tf.distribute.ReplicaContext.merge_call")
    def meet(stock, self, *args, **kwargs):
        if step_context.current().is_trying:
            raise row_sums.Meets("it calls `merge_call`")
        return stock(self, *args, **kwargs)

    @wrap("tf.distribute.ReplicaContext.all_reduce")
    def all_reduce(stock, self, reduce_op, value, *args, **kwargs):
        if step_context.current().is_trying:
            return row_sums.meetings().reduced(reduce_op, value)
        return stock(self, reduce_op, value, *args, **kwargs)

    @wrap("tf.distribute.ReplicaContext.all_gather")
    def all_gather(stock, self, value, axis, *args, **kwargs):
        if step_context.current().is_trying:
            meetings = row_sums.meetings()
            if tf.get_static_value(axis) != 0:
                raise row_sums.Meets("it gathers along an axis other than the batch's")
            return tf.nest.map_structure(lambda v: meetings.gathered(tf.convert_to_tensor(v)), value)
        if step_context.step() is None or not gathering.are_rows(value, axis):
            return stock(self, value, axis, *args, **kwargs)
        return tf.nest.map_structure(gathering.by_replica, value)


def _hold_loss_classes() -> None:
    """Takes hold of each loss class before its first call."""

    @wrap("keras.losses.Loss.__init__")
    def initialize(stock, self, *args, **kwargs):
        _take_hold_of(type(self))
        stock(self, *args, **kwargs)

    @extensions.compilations.register
    @contextlib.contextmanager
    def around_compile(model, arguments):
        for each in keras.tree.flatten(arguments.get("loss")):
            if isinstance(each, keras.losses.Loss):
                _take_hold_of(type(each))  # it may be older than this repair
        yield

    @wrap("Loss.__call__")
    def call_loss(stock, self, *args, **kwargs):
        _take_hold_of(type(self))
        if (recorder := step_recorder.splitting()) is not None:
            return recorder.by_parts(functools.partial(stock, self), args, kwargs, is_sum=True)
        return stock(self, *args, **kwargs)


def _take_hold_of(cls: type) -> None:
    """Wraps the `call` and the `__call__` of a custom loss class."""
    for each in cls.__mro__:
        if each.__module__.split(".")[0] in ("keras", "tfgpu", "builtins"):
            return
        if "call" in each.__dict__ and not slots.get(each.__dict__["call"], "gets_all_rows"):

            @wrap(each, "call")
            def call(stock, self, *tensors, **more):
                if len(tensors) != 2:
                    return stock(self, *tensors, **more)
                return _of_batch(self, lambda *rows: stock(self, *rows, **more), type(self).__name__, *tensors)

            slots.of(each.__dict__["call"]).gets_all_rows = True
        if "__call__" in each.__dict__ and not slots.get(each.__dict__["__call__"], "gets_all_rows"):

            @wrap(each, "__call__")
            def reduce(stock, self, y_true, y_pred, sample_weight=None, **more):
                if (recorder := step_recorder.splitting()) is not None:
                    call = functools.partial(type(self).__call__, self)
                    return recorder.by_parts(call, (y_true, y_pred, sample_weight), more, is_sum=True)
                return _reduced(self, lambda *rows: stock(self, *rows, **more), y_true, y_pred, sample_weight)

            slots.of(each.__dict__["__call__"]).gets_all_rows = True


def _reduced(loss: keras.losses.Loss, function: Callable, y_true, y_pred, sample_weight):
    """What a loss with a `__call__` of its own says; weights of rows are rows, like labels."""
    has_weights = sample_weight is not None
    if not gathering.may_meet():
        return function(y_true, y_pred, *[sample_weight] * has_weights)
    rows = (y_true, *[sample_weight] * has_weights), y_pred
    labels, outputs = keras.tree.map_structure(keras.ops.convert_to_tensor, rows)

    def weighed(given, found):
        return function(given[0], found, *given[1:])

    return _of_batch(loss, weighed, type(loss).__name__, labels, outputs)


def _gives_rows(needs: Needs) -> bool:
    return needs in (Needs.ITS_ROWS, Needs.ALL_GIVES_ROWS)


def _is_tried(function: Callable, arguments: dict, y_true: object, y_pred: object, *, squeezes: bool = True) -> bool:
    """Whether a function must be tried.

    It is the user's code, or a Keras function whose `axis` is the batch axis, or whose labels are broadcast along it.

    Args:
        function: of labels and outputs.
        arguments: its others.
        y_true: labels.
        y_pred: outputs.
        squeezes: Keras gives labels and outputs the same rank where one of them has a last axis of 1.
    """
    module = getattr(function, "__module__", None) or type(function).__module__
    if module.split(".")[0] not in ("keras", "tfgpu"):
        return True
    if _is_broadcast(_name(function), y_true, y_pred, squeezes):
        return True
    if "axis" not in arguments or _name(function) in coupled_losses.NAMES:
        return False
    ranks = {len(leaf.shape) for leaf in keras.tree.flatten(y_pred) if getattr(leaf, "shape", None) is not None}
    axes = [axis for axis in keras.tree.flatten(arguments["axis"]) if isinstance(axis, int)]
    return any(axis == 0 or -axis in ranks for axis in axes)


def _squeezes(function: Callable) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or "squeeze_or_expand_to_same_rank" in code.co_names


def _is_broadcast(name: str, y_true: object, y_pred: object, squeezes: bool) -> bool:
    """Whether a function of Keras's pairs the labels of each row with the outputs of all rows, by their ranks."""
    shapes = getattr(y_true, "shape", None), getattr(y_pred, "shape", None)
    takes_classes = name.startswith("sparse_") or name == "circle"  # a number per row beside a vector
    if takes_classes or any(shape is None or shape == tf.TensorShape(None) for shape in shapes):
        return False
    low, high = sorted(shapes, key=len)
    if name == "categorical_generalized_cross_entropy":  # it makes numbers of classes one-hot
        return len(shapes[0]) != len(shapes[1]) - 1 or shapes[1][-1] == 1
    return len(low) < len(high) and not (squeezes and len(high) == len(low) + 1 and high[-1] == 1)


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _of_batch(loss: keras.losses.Loss, function: Callable, name: str, y_true, y_pred):
    """What a loss says of a replica's rows, or of the whole batch where it needs that."""
    if not gathering.may_meet():
        return gathering.part_by_hand(tf.convert_to_tensor(function(y_true, y_pred)), loss.reduction)
    needs, sizes = _needs(loss, function, f"loss {name!r}", y_true, y_pred)
    values = _computed(needs, sizes, function, y_true, y_pred)
    if step_context.step() is None:
        values = gathering.part_by_hand(tf.convert_to_tensor(values), loss.reduction)
    if _gives_rows(needs) or loss.reduction not in ("sum", "none", None) or not tf.convert_to_tensor(values).shape.rank:
        return values
    # Several numbers of the batch, which the replicas add up: each has its share of the gradient.
    part = values * tf.cast(batch_rows.known_share(), values.dtype)
    return part if loss.reduction == "sum" else part + tf.stop_gradient(values - part)


def _computed(needs: Needs, sizes: Sizes, function: Callable, y_true, y_pred):
    if needs in (Needs.ITS_ROWS, Needs.ITS_MEAN):
        with draw_sizes.known(sizes):
            return function(y_true, y_pred)
    gathering.check_can_meet("A loss or metric of your own")
    rows = keras.tree.map_structure(gathering.with_mask, (y_true, y_pred))
    # What is within needs nothing of others.
    with step_context.as_one_device(batch_rows.known_rows().total), layer_state.assigning_alike():
        values = function(*rows)
    outputs = keras.tree.flatten(y_pred)[0]
    gives_rows = needs is Needs.ALL_GIVES_ROWS
    if needs is Needs.ALL_BY_SHAPE:
        values, whole = tf.convert_to_tensor(values), keras.tree.flatten(rows[1])[0]
        gives_rows = bool(values.shape.rank) and values.shape[0] == whole.shape[0]
    if not gives_rows:
        return values

    def cut(table):
        return row_sums.own_rows(table, outputs)

    return private.carry_mask(values, cut(values), cut)


def _needs(owner, function: Callable, what: str, y_true, y_pred) -> tuple[Needs, Sizes]:
    """What a function needs, and draws: `owner`, the loss or metric that has it, keeps what was found."""
    choice = choices.of(owner)
    if choice is not None:
        _note(what, choice == choices.ON_ALL_ROWS, "", verdicts.MARKED, (y_true, y_pred))
        return Needs.ITS_ROWS if choice == choices.BY_ROWS else Needs.ALL_BY_SHAPE, Sizes()
    known = vars(slots.of(owner)).setdefault("needs", {})  # of plain values: a copy may go where no tfgpu is
    rows = y_true, y_pred
    tensors = keras.tree.flatten(rows)
    if not all(isinstance(each, tf.Tensor) and each.shape.rank and _is_number(each) for each in tensors):
        return Needs.ITS_ROWS, Sizes()
    specs = tuple((each.dtype.name, tuple(each.shape[1:])) for each in tensors)
    changing = vars(slots.of(owner)).setdefault("changing", [])
    key = what, specs, fingerprints.of_owner(owner, changing)
    if key not in known:
        trial = LossTrial(function, rows, owner)
        found = store.found(
            what.split()[0],
            (owner, code_digest.rows_of(rows)),
            trial.run,
            lambda found: None if found is None or trial.changes or trial.draws.sizes.fixed else {"needs": found.name},
            lambda needs: Needs[needs],
        )
        changing += sorted(trial.changes.difference(changing))
        key = what, specs, fingerprints.of_owner(owner, changing)
        draw_sizes.keep(owner, key, trial.draws.sizes)
        known[key] = (_of_unproven(what, trial, rows) if found is None else _told(what, found, rows)).name
        if trial.changes:
            vars(slots.of(owner)).setdefault("changes", {})[key] = sorted(trial.changes)
            strategy, is_eager = tf.distribute.get_strategy(), tf.executing_eagerly()
            replica_attributes.tell(f"The {what}", trial, strategy, is_eager=is_eager)
    replica_attributes.note([owner], slots.get(owner, "changes", {}).get(key, ()), ())
    return Needs[known[key]], draw_sizes.kept(owner, key)


def _note(what: str, needs_all: bool, why: str, source: str, rows: tuple) -> verdicts.Piece:
    return verdicts.note_rows(what, needs_all, why, source, keras.tree.flatten(rows))


def _told(what: str, found: Needs, rows: tuple) -> Needs:
    """Notes what was found, and says so where something travels."""
    needs_all = found in (Needs.ALL, Needs.ALL_GIVES_ROWS)
    piece = _note(what, needs_all, "it is not a mean over rows" if needs_all else "", verdicts.TRIED, rows)
    if needs_all:
        _log.warning(
            "The %s is not a mean over the rows of a batch. To match one device, each replica gets the labels and "
            "outputs of all replicas in every step (%s). If each row has its own loss, return one number per row: then "
            "nothing is sent.",
            what,
            piece.traffic,
        )
    return found


def _of_unproven(what: str, trial: LossTrial, rows: tuple) -> Needs:
    """What becomes of a function that could not be tried, by the strategy's `unproven`."""
    way = choices.unproven()
    piece = _note(what, way == "gather", trial.why, verdicts.UNPROVEN, rows)
    if way == "refuse":
        verdicts.note(replace(piece, verdict=verdicts.REFUSED))
        raise InputError(
            f"The {what} could not be tried ({trial.why}), so it is unknown whether it is a mean over the rows of the "
            "batch, and the strategy's `unproven` is 'refuse'. Return one number per row and mark it with "
            "`tfgpu.by_rows`, or mark it with `tfgpu.on_all_rows`."
        )
    _log.warning(
        "The %s could not be tried (%s), so it is unknown whether it is a mean over the rows of the batch. Each "
        "replica computes it from %s. Mark it with `tfgpu.by_rows` or `tfgpu.on_all_rows`.",
        what,
        trial.why,
        "its own rows" if way == "warn" else "the labels and outputs of all replicas",
    )
    return Needs.ITS_MEAN if way == "warn" else Needs.ALL_BY_SHAPE


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool

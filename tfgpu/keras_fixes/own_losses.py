"""Losses and metric functions of one's own that need all rows of a batch: a Dice written by hand, a masked mean, a sum.

One that is a mean over rows, or gives a number a row, is right on each replica's rows. Which kind a function is, nobody
says; so each is tried on a few drawn rows, whole and in two parts, the first time that a step meets it. One whose
result for the whole is not what the parts say is computed from the rows of all replicas, as on one device. All
workers must find the same, since they meet where it needs all rows: nothing in a try depends on time or on the data.
"""

import enum
import logging
import math
import threading
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.losses.loss import Loss
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.metrics.reduction_metrics import MeanMetricWrapper

from tfgpu.keras_fixes import replica, sums
from tfgpu.keras_fixes.seam import wrap

_log = logging.getLogger(__name__)
_ROWS, _PART = 6, 2
_UNKNOWN, _SHORT = 8, 8
_LARGEST = 1 << 24  # numbers that are drawn for one tensor
_CLOSE = 1e-4
_here = threading.local()
_NOT_CLASSES = (-1, -100, 255)  # labels that stand for "none"


class Needs(enum.Enum):
    """What a function of labels and outputs needs, and gives."""

    ITS_ROWS = "a mean over rows, or a number a row: each replica's own rows do"
    ALL_GIVES_ROWS = "all rows; it gives a number a row"
    ALL = "all rows; it gives something of the whole batch"


def give_own_losses_all_rows() -> None:
    """Gives losses and metrics that are written by hand the rows of all replicas, where they need them.

    Stock Keras, like `tf.distribute`, takes each for a mean over rows.
    """

    for name in ("merge_call", "all_reduce", "all_gather"):

        @wrap(tf.distribute.ReplicaContext, name)
        def meet(stock, self, *args, **kwargs):
            if getattr(_here, "is_trying", False):
                raise _Meets
            return stock(self, *args, **kwargs)

    @wrap(Loss, "__call__")
    def call_loss(stock, self, *args, **kwargs):
        _take_hold_of(type(self))
        return stock(self, *args, **kwargs)

    @wrap(LossFunctionWrapper, "call")
    def call_function(stock, self, y_true, y_pred):
        if not _is_own(self.fn):
            return stock(self, y_true, y_pred)
        return _of_batch(self, lambda *rows: stock(self, *rows), _name(self.fn), y_true, y_pred)

    @wrap(MeanMetricWrapper, "update_state")
    def update_state(stock, self, y_true, y_pred, sample_weight=None):
        function = self._fn
        if not _is_own(function) or not _may_meet():
            return stock(self, y_true, y_pred, sample_weight)
        y_true, y_pred = keras.tree.map_structure(keras.ops.convert_to_tensor, (y_true, y_pred))

        def of_rows(*rows):
            return keras.ops.convert_to_tensor(function(*rows, **self._fn_kwargs))

        needs = _needs(self, of_rows, f"metric {_name(function)!r}", y_true, y_pred)
        values = _computed(needs, of_rows, y_true, y_pred)
        if needs is Needs.ALL and values.shape.rank:  # the same numbers on each replica: they count once
            weight = tf.fill(tf.shape(values), tf.cast(replica.share(), values.dtype))
            sample_weight = weight if sample_weight is None else sample_weight * weight
        # Nothing meets from here on, so that no other replica's thread sees the stand-in.
        self._fn = lambda *_, **__: values
        try:
            return stock(self, y_true, y_pred, sample_weight)
        finally:
            self._fn = function


def _take_hold_of(cls: type) -> None:
    """Wraps the `call` of a loss class of one's own."""
    for each in cls.__mro__:
        if each.__module__.split(".")[0] in ("keras", "tfgpu", "builtins"):
            return
        if "call" in each.__dict__ and not hasattr(each.__dict__["call"], "_has_all_rows"):

            @wrap(each, "call")
            def call(stock, self, *tensors, **more):
                if len(tensors) != 2:
                    return stock(self, *tensors, **more)
                return _of_batch(self, lambda *rows: stock(self, *rows, **more), type(self).__name__, *tensors)

            each.__dict__["call"]._has_all_rows = True


def _is_own(function: Callable) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.split(".")[0] not in ("keras", "tfgpu")


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _may_meet() -> bool:
    return replica.step() is not None and not replica.is_alone() and replica.context().num_replicas_in_sync > 1


def _of_batch(loss: Loss, function: Callable, name: str, y_true, y_pred):
    """What a loss says of a replica's rows, or of the whole batch where it needs that."""
    if not _may_meet():
        return function(y_true, y_pred)
    return _computed(_needs(loss, function, f"loss {name!r}", y_true, y_pred), function, y_true, y_pred)


def _computed(needs: Needs, function: Callable, y_true, y_pred):
    if needs is Needs.ITS_ROWS:
        return function(y_true, y_pred)
    rows = [_all_rows(y_true), _all_rows(y_pred)]
    with replica.stepping(None):  # as on one device: what is within must not look for all rows again
        values = function(*rows)
    return sums.own_rows(values, y_pred) if needs is Needs.ALL_GIVES_ROWS else values


def _all_rows(rows: tf.Tensor) -> tf.Tensor:
    found, mask = sums.all_rows(rows), backend.get_keras_mask(rows)
    if mask is not None:
        backend.set_keras_mask(found, sums.all_rows(mask))
    return found


def _needs(owner, function: Callable, what: str, y_true, y_pred) -> Needs:
    """What a function needs: `owner`, the loss or metric that has it, keeps what was found."""
    known = owner.__dict__.setdefault("_tfgpu_needs", {})
    tensors = y_true, y_pred
    if not all(isinstance(each, tf.Tensor) and each.shape.rank and _is_number(each) for each in tensors):
        return Needs.ITS_ROWS
    key = what, *((each.dtype.name, tuple(each.shape[1:])) for each in tensors)
    if key not in known:
        known[key] = _Trial(function, tensors).run(what)
    return known[key]


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool


class _Meets(Exception):
    """A function brings the replicas' rows together by itself."""


class _Trial:
    """A function is run on drawn rows, all at once and in two parts, outside the step that is traced."""

    def __init__(self, function: Callable, tensors: tuple[tf.Tensor, tf.Tensor]):
        self._function, self._tensors = function, tensors
        self._why: Exception | None = None
        self._gives_one_number = True

    def run(self, what: str) -> Needs:
        found = self._found()
        if found is None and self._gives_one_number and self._why is not None:
            _log.warning(
                "Whether the %s is a mean over the rows of a batch could not be tried (%s: %s). It is taken for one: "
                "each replica computes it from its own rows. Where it is not, let it return a number for each row.",
                what,
                type(self._why).__name__,
                " ".join(str(self._why).split())[:200],
            )
        if found in (Needs.ALL, Needs.ALL_GIVES_ROWS):
            _log.warning(
                "The %s is not a mean over the rows of a batch. So that it is what one device computes, each replica "
                "gets the labels and outputs of all, in every step. If you can, let it return a number for each row.",
                what,
            )
        return found or Needs.ITS_ROWS

    def _found(self) -> Needs | None:
        """None: nothing could be told."""
        found, _here.is_trying = None, True
        try:
            with tf.init_scope(), replica.stepping(None), keras.StatelessScope():
                for rows in self._draws(shorter=True):
                    judged = self._judged(rows)
                    if judged in (Needs.ALL, Needs.ALL_GIVES_ROWS):
                        return judged
                    found = found or judged
                # A function may ask for the very sizes.
                return found or next(filter(None, map(self._judged, self._draws(shorter=False))), None)
        except _Meets:
            return Needs.ITS_ROWS
        finally:
            _here.is_trying = False

    def _judged(self, rows: list[tf.Tensor]) -> Needs | None:
        try:
            whole, again, first, second = (
                np.asarray(keras.ops.convert_to_numpy(self._function(*each)), "float64")  # truths are numbers, too
                for each in (rows, rows, *_parts(rows))
            )
        except _Meets:
            raise
        except Exception as error:  # of the user's code, on numbers that are none of its own
            self._why = self._why or error
            return None
        self._gives_one_number = whole.ndim == 0
        if not _close(whole, again):  # NaN, or drawn anew
            return None
        if whole.shape[:1] == (_ROWS,) and first.shape[:1] == (_PART,):
            return Needs.ITS_ROWS if _close(whole, np.concatenate([first, second])) else Needs.ALL_GIVES_ROWS
        if whole.shape == first.shape == second.shape:
            return Needs.ITS_ROWS if _close(whole, (first * _PART + second * (_ROWS - _PART)) / _ROWS) else Needs.ALL
        return Needs.ALL

    def _draws(self, *, shorter: bool) -> Iterator[list[tf.Tensor]]:
        """Labels of several kinds with probabilities and with logits."""
        draw = np.random.default_rng(0)
        shapes = self._shapes(shorter)
        if shapes is None:
            return
        true, found = shapes
        classes = max(2, min(self._tensors[1].shape[-1] or _UNKNOWN, _UNKNOWN))
        labels = [draw.integers(0, 2, true), draw.integers(0, classes, true), draw.normal(size=true)]
        labels += [np.where(draw.random(true) < 0.3, none, draw.integers(0, 2, true)) for none in _NOT_CLASSES]
        for label in labels:
            for output in (draw.uniform(0.05, 0.95, found), 2 * draw.normal(size=found)):
                yield [_cast(v, t.dtype) for v, t in zip((label, output), self._tensors, strict=True)]

    def _shapes(self, shorter: bool) -> list[tuple[int, ...]] | None:
        """Of labels and outputs, where both are small enough; long axes that they share are cut."""
        known = [each.shape[1:].as_list() for each in self._tensors]
        if shorter:
            for at, sizes in enumerate(zip(*known, strict=False)):
                if sizes[0] == sizes[1]:
                    for each in known:
                        each[at] = min(each[at] or _UNKNOWN, _SHORT)
        shapes = [(_ROWS, *(size or _UNKNOWN for size in each)) for each in known]
        return shapes if max(map(math.prod, shapes)) <= _LARGEST else None


def _parts(rows: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    return [each[:_PART] for each in rows], [each[_PART:] for each in rows]


def _cast(values: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(values), dtype)


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether both are numbers, and as good as equal."""
    size = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
    return one.shape == other.shape and bool(np.all(np.abs(one - other) <= _CLOSE * size)) and math.isfinite(size)

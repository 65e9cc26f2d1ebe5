"""Losses and metric functions of one's own that need all rows of a batch: a Dice written by hand, a masked mean, a sum.

One that is a mean over rows, or gives a number a row, is right on each replica's rows. Which kind a function is, nobody
says; so each is tried on a few drawn rows, whole and in two parts, the first time that a step meets it. One whose
result for the whole is not what the parts say is computed from the rows of all replicas, as on one device. All
workers must find the same, since they meet where it needs all rows: nothing in a try depends on time or on the data.
"""

import contextlib
import enum
import logging
import math
import random
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import slots, training, variables
from tfgpu.compat import tensorflow as private_tf
from tfgpu.compat.patch import wrap
from tfgpu.core import replication, step_context
from tfgpu.core.row_mixing import captures, row_sums
from tfgpu.core.state import layer_state

_log = logging.getLogger(__name__)
_ROWS = 6  # in parts of a third and two
_UNKNOWN, _SHORT = 8, 8
_LARGEST = 1 << 24  # numbers that are drawn for one tensor
_SMALL = 1 << 18  # up to which no axis is cut
_MANY, _MOST = 64, 2048  # rows of the try with many, which has up to `_SMALL` numbers
_CLOSE = 2e-5
_SEED = 7_340_033
_NOT_CLASSES = (-1, -100, 255, math.nan)  # labels that stand for "none"


class Needs(enum.Enum):
    """What a function of labels and outputs needs, and gives."""

    ITS_ROWS = "each replica's own rows; it gives a number a row"
    ITS_MEAN = "each replica's own rows; it gives a mean over them"
    ALL_GIVES_ROWS = "all rows; it gives a number a row"
    ALL = "all rows; it gives something of the whole batch"


def give_own_losses_all_rows() -> None:
    """Gives losses and metrics that are written by hand the rows of all replicas, where they need them.

    Stock Keras, like `tf.distribute`, takes each for a mean over rows.
    """

    for name in ("merge_call", "all_reduce", "all_gather"):

        @wrap(f"tf.distribute.ReplicaContext.{name}")
        def meet(stock, self, *args, **kwargs):
            if step_context.current().is_trying:
                raise row_sums.Meets
            return stock(self, *args, **kwargs)

    @wrap("Loss.__call__")
    def call_loss(stock, self, *args, **kwargs):
        _take_hold_of(type(self))
        return stock(self, *args, **kwargs)

    @wrap("LossFunctionWrapper.call")
    def call_function(stock, self, y_true, y_pred):
        if not _is_own(self.fn):
            return stock(self, y_true, y_pred)
        return _of_batch(self, lambda *rows: stock(self, *rows), _name(self.fn), y_true, y_pred)

    @wrap("loss_module.reduce_weighted_values")
    def reduce_weighted_values(stock, values, sample_weight=None, mask=None, *args, **kwargs):
        """A number of the batch is multiplied by weights of rows: each replica multiplies the whole batch's."""
        if _may_meet() and (sample_weight is not None or mask is not None):
            values = keras.ops.convert_to_tensor(values, dtype=kwargs.get("dtype"))
            if values.shape.rank == 0:
                (values,) = row_sums.over_replicas([step_context.times_share(values)])
        return stock(values, sample_weight, mask, *args, **kwargs)

    @wrap("MeanMetricWrapper.update_state")
    def update_state(stock, self, y_true, y_pred, sample_weight=None):
        function, arguments = training.metric_function(self)
        if not _is_own(function) or not _may_meet():
            return stock(self, y_true, y_pred, sample_weight)
        y_true, y_pred = keras.tree.map_structure(keras.ops.convert_to_tensor, (y_true, y_pred))

        def of_rows(*rows):
            return keras.ops.convert_to_tensor(function(*rows, **arguments))

        needs = _needs(self, of_rows, f"metric {_name(function)!r}", y_true, y_pred)
        values = _computed(needs, of_rows, y_true, y_pred)
        if not _gives_rows(needs) and values.shape.rank:  # numbers of the batch: over all replicas they count once
            weight = tf.fill(tf.shape(values), tf.cast(step_context.share(), values.dtype))
            sample_weight = weight if sample_weight is None else sample_weight * weight
        # Nothing meets from here on, so that no other replica's thread sees the stand-in.
        with training.metric_values(self, values):
            return stock(self, y_true, y_pred, sample_weight)


def _take_hold_of(cls: type) -> None:
    """Wraps the `call` of a loss class of one's own."""
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


def _gives_rows(needs: Needs) -> bool:
    return needs in (Needs.ITS_ROWS, Needs.ALL_GIVES_ROWS)


def _is_own(function: Callable) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.split(".")[0] not in ("keras", "tfgpu")


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _may_meet() -> bool:
    return (
        step_context.step() is not None
        and not step_context.has_local_forward()
        and replication.replica_context().num_replicas_in_sync > 1
    )


def _of_batch(loss: keras.losses.Loss, function: Callable, name: str, y_true, y_pred):
    """What a loss says of a replica's rows, or of the whole batch where it needs that."""
    if not _may_meet():
        return function(y_true, y_pred)
    needs = _needs(loss, function, f"loss {name!r}", y_true, y_pred)
    values = _computed(needs, function, y_true, y_pred)
    if _gives_rows(needs) or loss.reduction not in ("sum", "none", None) or not tf.convert_to_tensor(values).shape.rank:
        return values
    # Several numbers of the batch, which the replicas add up: each has its share of the gradient.
    part = values * tf.cast(step_context.share(), values.dtype)
    return part if loss.reduction == "sum" else part + tf.stop_gradient(values - part)


def _computed(needs: Needs, function: Callable, y_true, y_pred):
    if needs in (Needs.ITS_ROWS, Needs.ITS_MEAN):
        return function(y_true, y_pred)
    rows = keras.tree.map_structure(_all_rows, (y_true, y_pred))
    with (
        step_context.as_one_device(step_context.rows().total),
        layer_state.assigning_alike(),
    ):  # what is within needs nothing of others
        values = function(*rows)
    return row_sums.own_rows(values, keras.tree.flatten(y_pred)[0]) if needs is Needs.ALL_GIVES_ROWS else values


def _all_rows(rows: tf.Tensor) -> tf.Tensor:
    found, mask = row_sums.all_rows(rows), private.get_mask(rows)
    if mask is not None:
        private.set_mask(found, row_sums.all_rows(mask))
    return found


def _needs(owner, function: Callable, what: str, y_true, y_pred) -> Needs:
    """What a function needs: `owner`, the loss or metric that has it, keeps what was found."""
    known = vars(slots.of(owner)).setdefault("needs", {})  # of plain values: a copy may go where no tfgpu is
    rows = y_true, y_pred
    tensors = keras.tree.flatten(rows)
    if not all(isinstance(each, tf.Tensor) and each.shape.rank and _is_number(each) for each in tensors):
        return Needs.ITS_ROWS
    key = what, *((each.dtype.name, tuple(each.shape[1:])) for each in tensors)
    if key not in known:
        known[key] = _Trial(function, rows, captures.of(owner)).run(what).name
    return Needs[known[key]]


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool


class _Apart(keras.StatelessScope):
    """Nothing that a function assigns stays, and a single number that waits at 0, as a weight that grows, is 0.5."""

    def get_current_value(self, variable):
        found = super().get_current_value(variable)
        if found is None and variable.shape == () and tf.as_dtype(variable.dtype).is_floating:
            held = variables.held(variable)
            if held is not None and float(tf.convert_to_tensor(held)) == 0.0:
                return tf.constant(0.5, variable.dtype)
        return found


class _Trial:
    """A function is run on drawn rows, all at once and in two parts, outside the step that is traced."""

    def __init__(self, function: Callable, rows: tuple, captured: captures.Captures):
        self._function, self._captured = function, captured
        self._structure, self._tensors = rows, keras.tree.flatten(rows)
        self._count_true = len(keras.tree.flatten(rows[0]))
        self._why: Exception | str | None = None
        self._gives_one_number = True

    def run(self, what: str) -> Needs:
        found = self._found()
        if found is None and self._gives_one_number and self._why is not None:
            kind = "" if isinstance(self._why, str) else f"{type(self._why).__name__}: "
            _log.warning(
                "Whether the %s is a mean over the rows of a batch could not be tried (%s%s). It is taken for one: "
                "each replica computes it from its own rows. Where it is not, let it return a number for each row.",
                what,
                kind,
                " ".join(str(self._why).split())[:200],
            )
        if found in (Needs.ALL, Needs.ALL_GIVES_ROWS):
            _log.warning(
                "The %s is not a mean over the rows of a batch. So that it is what one device computes, each replica "
                "gets the labels and outputs of all, in every step. Where each row has a number of its own, let it "
                "return those: nothing needs to travel then.",
                what,
            )
        return found or (Needs.ITS_MEAN if self._gives_one_number else Needs.ITS_ROWS)

    def _found(self) -> Needs | None:
        """None: nothing could be told."""
        try:
            unchanged = self._captured.preserving_variables()
            with step_context.scope(is_trying=True), tf.init_scope(), kept_draws(), unchanged:
                with tf.device("CPU:0"):  # the same on every worker
                    found = self._judged_all()
                return found or self._judged_all()  # not every function runs on a CPU
        except row_sums.Meets:
            return Needs.ITS_ROWS

    def _judged_all(self) -> Needs | None:
        whole, cut = self._sizes(shorter=False), self._sizes(shorter=True)
        found = self._judged_by(self._draws(cut, _ROWS), is_cut=cut != whole)
        if found is None and cut != whole:
            found = self._judged_by(self._draws(whole, _ROWS, outputs=1))  # a function may ask for the very sizes
        if found not in (Needs.ITS_ROWS, Needs.ITS_MEAN):
            return found
        # One that takes the worst so many, or that sees long axes: with many rows of the very sizes.
        numbers = max(1, *(math.prod(each) for each in whole))
        rows = max(_ROWS, min(max(_MANY, 2 * self._captured.largest(_MOST // 2)), _SMALL // numbers))
        if rows > _ROWS or cut != whole:
            return self._judged_by(self._draws(whole, rows, outputs=1, labels=1)) or found
        return found

    def _judged_by(self, draws: Iterator[list[tf.Tensor]], *, is_cut: bool = False) -> Needs | None:
        found = None
        for rows in draws:
            judged = self._judged(rows, is_cut=is_cut)
            if judged in (Needs.ALL, Needs.ALL_GIVES_ROWS):
                return judged
            found = found or judged
        return found

    def _computed(self, rows: list[tf.Tensor]) -> np.ndarray:
        count = int(rows[0].shape[0])
        random.seed(0)
        np.random.seed(0)
        with step_context.as_one_device(count), _Apart():
            values = self._function(*keras.tree.pack_sequence_as(self._structure, rows))
            return np.asarray(keras.ops.convert_to_numpy(values), "float64")  # truths are numbers, too

    def _judged(self, rows: list[tf.Tensor], *, is_cut: bool) -> Needs | None:
        count = int(rows[0].shape[0])
        part = count // 3
        try:
            whole, again = self._computed(rows), self._computed(rows)
        except row_sums.Meets:
            raise
        except Exception as error:  # of the user's code, on numbers that are none of its own
            self._why = self._why or error
            return None
        self._gives_one_number = whole.ndim == 0
        if not np.isfinite(whole).all():
            self._why = self._why or "it gives no finite number for drawn ones"
            return None
        try:
            first, second = (self._computed(each) for each in _parts(rows, part))
        except row_sums.Meets:
            raise
        except Exception as error:
            self._why = self._why or error
            return None if is_cut else Needs.ALL_GIVES_ROWS if whole.shape[:1] == (count,) else Needs.ALL
        if whole.shape[:1] == (count,) and first.shape[:1] == (part,):
            if not _close(whole, again):  # drawn anew, for each row
                return Needs.ITS_ROWS
            is_alike = first.shape[1:] == second.shape[1:]  # not of each row with each other one
            its_rows = is_alike and _close(whole, np.concatenate([first, second]))
            return Needs.ITS_ROWS if its_rows else Needs.ALL_GIVES_ROWS
        if whole.shape == first.shape == second.shape and _close(whole, again):
            mean = (first * part + second * (count - part)) / count
            return Needs.ITS_MEAN if _close(whole, mean, first, second) else Needs.ALL
        return Needs.ALL

    def _draws(
        self, sizes: list[tuple[int, ...]], rows: int, *, labels: int | None = None, outputs: int = 2
    ) -> Iterator[list[tf.Tensor]]:
        """Labels of several kinds with probabilities and with logits, where all are small enough."""
        shapes = [(rows, *each) for each in sizes]
        if max(map(math.prod, shapes)) > _LARGEST:
            return
        draw = np.random.default_rng(0)
        width = self._tensors[-1].shape[-1] if self._tensors[-1].shape.rank > 1 else None
        classes = max(2, min(width or _UNKNOWN, _UNKNOWN))
        kinds = [
            lambda shape: draw.integers(0, 2, shape),
            lambda shape: draw.integers(0, classes, shape),
            lambda shape: draw.normal(size=shape),
        ]
        nones = [*_NOT_CLASSES, *(each for each in self._captured.numbers if each not in _NOT_CLASSES)]
        kinds += [
            lambda shape, none=none: np.where(draw.random(shape) < 0.3, none, draw.integers(0, 2, shape))
            for none in nones
        ]
        found = [lambda shape: draw.uniform(0.05, 0.95, shape), lambda shape: 2 * draw.normal(size=shape)]
        for label in kinds[:labels]:
            for output in found[:outputs]:
                drawn = [(label if at < self._count_true else output)(shape) for at, shape in enumerate(shapes)]
                if all(_fits(v, t.dtype) for v, t in zip(drawn, self._tensors, strict=True)):
                    yield [_cast(v, t.dtype) for v, t in zip(drawn, self._tensors, strict=True)]

    def _sizes(self, *, shorter: bool) -> list[tuple[int, ...]]:
        """Of a row of each tensor; long axes that all share are cut, where there are many numbers."""
        known = [each.shape[1:].as_list() for each in self._tensors]
        numbers = max(math.prod(size or _UNKNOWN for size in each) for each in known)
        if shorter and _ROWS * numbers > _SMALL:
            for at, sizes in enumerate(zip(*known, strict=False)):
                if len(set(sizes)) == 1:
                    for each in known:
                        each[at] = min(each[at] or _UNKNOWN, _SHORT)
        return [tuple(size or _UNKNOWN for size in each) for each in known]


@contextlib.contextmanager
def kept_draws(seed: int = 0) -> Iterator[None]:
    """What draws random numbers within leaves those that come afterwards as they would be."""
    python, numpy, tensorflow = random.getstate(), np.random.get_state(), private_tf.eager_random()
    before = tensorflow.getstate() if tensorflow is not None else None
    if tensorflow is not None:
        tensorflow.seed(_SEED + seed)  # TensorFlow goes on where an operation has the seed of an earlier one
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if tensorflow is not None:
            tensorflow.setstate(before)


def _parts(rows: list[tf.Tensor], part: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    return [each[:part] for each in rows], [each[part:] for each in rows]


def _fits(values: np.ndarray, dtype: tf.DType) -> bool:
    """Whether a label that stands for "none" is one in that dtype."""
    return dtype.is_floating or not np.isnan(values).any()


def _cast(values: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(values), dtype)


def _close(one: np.ndarray, other: np.ndarray, *besides: np.ndarray) -> bool:
    """Whether both are numbers, and as good as equal; `besides` are numbers that they come from."""
    size = max(np.abs(each).max(initial=0.0) for each in (one, other, *besides))
    return one.shape == other.shape and bool(np.all(np.abs(one - other) <= _CLOSE * size)) and math.isfinite(size)

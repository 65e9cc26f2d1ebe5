"""Losses that mix the rows of a batch: `dice`, `tversky` and `circle`, as functions and as classes.

Each replica computes them from all replicas' rows, in one collective. A row that stands in where a replica has none
counts as nothing.
"""

import sys

import keras
import tensorflow as tf
from keras import ops

from tfgpu.compat import targets, training
from tfgpu.compat.keras import set_mask
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, step_context
from tfgpu.core.row_mixing import gathering, row_sums, verdicts

NAMES = ("dice", "tversky", "circle")
_SUMS, _COMPARES = "it divides sums over the batch", "it compares rows"


def mix_rows_of_all_replicas() -> None:
    """Gives the losses that mix rows the rows of the whole batch.

    Stock Keras computes each replica's loss from its own rows, and averages the losses.
    """
    keras_losses = targets.owner("losses")
    whole = {"dice": _dice, "tversky": _tversky, "circle": _circle}
    by_stock = {id(getattr(keras_losses, name)): name for name in NAMES}
    public = [m for n, m in list(sys.modules.items()) if n.endswith("keras.losses") and hasattr(m, "dice")]
    for name in NAMES:
        wrap(f"losses.{name}")(_in_a_step(whole[name]))
        for owner in public:
            wrap(owner, name, listed="*keras.losses.*")(_in_a_step(whole[name]))

    @wrap("losses.convert_binary_labels_to_hinge")
    def convert(stock, y_true):
        """Labels of 0 and 1 become -1 and 1, unless a row of the batch has another label."""
        if not gathering.may_meet():
            return stock(y_true)
        if not gathering.can_meet():
            batch_rows.warn_once(
                "A hinge loss or metric is called in a condition, a loop or a tf.function, where replicas cannot "
                "communicate: each replica reads from its own labels whether they are 0 and 1. Call it outside, or "
                "give it labels of -1 and 1."
            )
            return stock(y_true)
        is_other = ops.any(ops.logical_and(ops.not_equal(y_true, 0), ops.not_equal(y_true, 1)))
        (has_other,) = row_sums.most([ops.cast(is_other, "float32")])
        return tf.where(has_other > 0, y_true, 2.0 * y_true - 1.0)

    coupled = [getattr(keras_losses, name) for name in NAMES]

    @wrap("LossFunctionWrapper.call")
    def call(stock, self, y_true, y_pred):
        if id(self.fn) in by_stock:  # made before the repair, or found by its name
            self.fn = getattr(keras_losses, by_stock[id(self.fn)])
        found = stock(self, y_true, y_pred)
        return gathering.part_by_hand(found, self.reduction) if self.fn in coupled else found

    @wrap("MeanMetricWrapper.update_state")
    def update_state(stock, self, *args, **kwargs):
        if name := by_stock.get(id(training.metric_function(self)[0])):
            training.set_metric_function(self, getattr(keras_losses, name))
        return stock(self, *args, **kwargs)


def _in_a_step(whole):
    def loss(stock, y_true, y_pred, *args, **kwargs):
        if step_context.step() is None and not gathering.may_meet():
            return stock(y_true, y_pred, *args, **kwargs)
        gathering.check_can_meet("A loss that mixes rows")
        y_pred = ops.convert_to_tensor(y_pred)
        return whole(stock, y_true, y_pred, *args, **kwargs)

    return loss


def _dice(stock, y_true, y_pred, axis=None):
    if not _crosses_rows(axis, y_pred):
        return stock(y_true, y_pred, axis)
    y_true = ops.cast(y_true, y_pred.dtype)
    both, true, found = _sums("dice", axis, y_true * y_pred, y_true, y_pred)
    return 1 - 2.0 * both / (true + found + keras.config.epsilon())


def _tversky(stock, y_true, y_pred, alpha=0.5, beta=0.5, axis=None):
    if not _crosses_rows(axis, y_pred):
        return stock(y_true, y_pred, alpha, beta, axis)
    y_true = ops.cast(y_true, y_pred.dtype)
    # Keras 3.15 names these the other way round; alpha belongs to what is true and was not found.
    both, missed, wrong = _sums("tversky", axis, y_true * y_pred, (1 - y_pred) * y_true, y_pred * (1 - y_true))
    return 1 - both / (both + missed * alpha + wrong * beta + keras.config.epsilon())


def _circle(stock, y_true, y_pred, ref_labels=None, ref_embeddings=None, **options):
    if ref_labels is not None or ref_embeddings is not None:
        return stock(y_true, y_pred, ref_labels, ref_embeddings, **options)
    labels = tf.convert_to_tensor(y_true)
    labels = tf.reshape(tf.cast(labels, tf.int64) if labels.dtype == tf.int32 else labels, [-1])  # int32: on the host
    verdicts.note_rows("loss 'circle'", True, _COMPARES, verdicts.KNOWN, [labels, y_pred])
    loss = row_sums.own_rows(stock(row_sums.all_rows(labels), row_sums.all_rows(y_pred), **options), y_pred)
    set_mask(loss, loss > 0)
    return loss


def _crosses_rows(axis, value: tf.Tensor) -> bool:
    axes = range(value.shape.rank) if axis is None else [axis] if isinstance(axis, int) else axis
    return any(a % value.shape.rank == 0 for a in axes)


def _sums(name: str, axis, *values) -> list[tf.Tensor]:
    sums = [ops.sum(value, axis=axis) for value in values]  # labels of one class are broadcast, so shapes may differ
    packed = tf.concat([tf.reshape(each, [-1]) for each in sums], 0)
    size = (packed.shape.num_elements() or 0) * packed.dtype.size
    verdicts.note(verdicts.Piece(f"loss {name!r}", verdicts.ON_ALL_ROWS, _SUMS, verdicts.KNOWN, fixed_bytes=size))
    parts = tf.split(row_sums.of_batch(packed), [tf.size(each) for each in sums])
    return [tf.reshape(part, tf.shape(each)) for part, each in zip(parts, sums, strict=True)]

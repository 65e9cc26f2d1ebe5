"""Mixes pairs of examples and their labels: mixup and CutMix.

The partner is another example of the same global batch, so a mixed image depends on the batch as well as on
`(seed, epoch)`. Labels become float32 [batch, classes], each class's share, for `CategoricalCrossentropy` (and
`BinaryCrossentropy`), not the sparse losses.

Sources: H. Zhang, M. Cisse, Y. Dauphin and D. Lopez-Paz, "mixup: beyond empirical risk minimization", 2018,
arXiv:1710.09412; S. Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
features", 2019, arXiv:1905.04899.
"""

import numpy as np
import tensorflow as tf

from tfgpu.data.augmentation import geometry
from tfgpu.data.position import of_rows

_STEPS = 4096  # of the quantile table


def apply(name: str, images: tf.Tensor, labels: tf.Tensor, options: dict, numbers, stream: int, rows=None):
    """Mixes each example with a partner.

    Args:
        name: `"mixup"` or `"cutmix"`.
        images: float32 [batch, height, width, channels].
        labels: float32 [batch, classes], each row the shares of the classes.
        options: `alpha` of the Beta distribution of the kept share, and the `probability` of mixing.
        numbers: the random numbers of the whole batch.
        stream: which stream of them to use.
        rows: `(given, wanted)`, int64: which rows of the batch the images are, increasing, and which of them to mix,
            whose partners are given too; None: all.

    Returns:
        Images and labels of the rows that were wanted.
    """
    draw = numbers.uniform(5, stream=stream)
    partner = partners(draw[:, 0])
    kept = tf.where(draw[:, 2] < options["probability"], _beta(draw[:, 1], options["alpha"]), 1.0)
    side = tf.sqrt(1.0 - kept)
    if rows is not None:
        given, wanted = rows
        draw, kept, side = (of_rows(values, wanted) for values in (draw, kept, side))
        partner = tf.searchsorted(given, tf.cast(of_rows(partner, wanted), given.dtype))
        own = tf.searchsorted(given, wanted)
        images, other = tf.gather(images, own), tf.gather(images, partner)
        labels, others = tf.gather(labels, own), tf.gather(labels, partner)
    else:
        other, others = tf.gather(images, partner), tf.gather(labels, partner)
    if name == "mixup":
        mixed = _between(other, images, kept)
    else:
        height, width = images.shape[1:3]
        inside = geometry.boxes((height, width), draw[:, 3:5], (tf.floor(height * side), tf.floor(width * side)))
        mixed = tf.where(inside[..., None], other, images)
        kept = 1.0 - tf.reduce_mean(tf.cast(inside, tf.float32), axis=[1, 2])  # of the clipped box
    return mixed, _between(others, labels, kept)


def with_partners(rows: tf.Tensor, numbers, stream: int) -> tf.Tensor:
    """The rows of a batch that `apply` needs to mix `rows`: they and their partners, int64, increasing, each once."""
    partner = tf.cast(partners(numbers.uniform(5, stream=stream)[:, 0]), tf.int64)
    return tf.sort(tf.unique(tf.concat([rows, tf.gather(partner, rows)], 0)).y)


def partners(u: tf.Tensor) -> tf.Tensor:
    """Assigns each example of a batch another one, by `u` [batch]: a single random cycle through all of them.

    Example:
        >>> partners(tf.constant([0.5, 0.1, 0.9])).numpy().tolist()
        [2, 0, 1]
    """
    order = tf.argsort(u, stable=True)
    return tf.scatter_nd(order[:, None], tf.roll(order, -1, axis=0), tf.shape(order))


def _between(other, own, kept):
    share = tf.reshape(kept, tf.concat([tf.shape(kept), tf.ones([tf.rank(own) - 1], tf.int32)], axis=0))
    return tf.ensure_shape(other + (own - other) * share, own.shape)


def _beta(u: tf.Tensor, alpha: float) -> tf.Tensor:
    """Transforms uniform numbers to Beta(alpha, alpha) by a table, so each example uses exactly one number.

    The table has the quantiles at `_STEPS` + 1 points, by bisection.
    """
    wanted = np.linspace(0.0, 1.0, _STEPS + 1)
    low, high = np.zeros_like(wanted), np.ones_like(wanted)
    with tf.init_scope(), tf.device("CPU:0"):
        alpha = tf.constant(float(alpha), tf.float64)
        for _ in range(50):
            middle = (low + high) / 2.0
            below = tf.math.betainc(alpha, alpha, middle).numpy() < wanted
            low, high = np.where(below, middle, low), np.where(below, high, middle)
    table = tf.constant(np.concatenate([[0.0], high[1:-1], [1.0]]), tf.float32)
    place = u * _STEPS
    low = tf.minimum(tf.cast(place, tf.int32), _STEPS - 1)
    share = place - tf.cast(low, tf.float32)
    return tf.gather(table, low) * (1.0 - share) + tf.gather(table, low + 1) * share

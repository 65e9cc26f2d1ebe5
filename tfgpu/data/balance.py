"""Class balancing: which examples an epoch holds when the classes are imbalanced, or what each one weighs.

| `balance` | an epoch | its length |
|---|---|---|
| `"oversample"` | every class as often as the most frequent one, whose examples occur once each | longer |
| `"undersample"` | every class as often as the least frequent one; the others are resampled each epoch | shorter |
| `"weights"` | every example once, with the weight n / (classes * n of its class) | the same |
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfgpu.data import position
from tfgpu.errors import InputError, unknown

CHOICES = ("oversample", "undersample", "weights")


def check(balance: str | None, *, shuffle: bool) -> None:
    """Raises `InputError` for an unknown choice, or one that needs shuffling without it."""
    if balance is None:
        return
    if balance not in CHOICES:
        raise unknown("balance", balance, CHOICES)
    if balance != "weights" and not shuffle:
        raise InputError(
            f"balance={balance!r} samples the examples of each epoch, so it cannot keep the source's order. Received: "
            "shuffle=False. Remove that, or use balance='weights'."
        )


def resample(
    indices: np.ndarray, labels: np.ndarray, *, choice: str, seed: int
) -> tuple[int, Callable[[tf.Tensor], tf.Tensor]]:
    """Makes the order of balanced epochs.

    Within a class, how often examples occur differs by at most one; `(seed, epoch)` determines which occur more often.

    Args:
        indices: int64 [n], the examples.
        labels: int [n], the class of each.
        choice: `"oversample"` or `"undersample"`.
        seed: the run's seed.

    Returns:
        The number of examples in an epoch, and a function from the epoch (int64 scalar) to its indices in order.

    Example:
        >>> count, order = resample(np.arange(5), np.array([0, 0, 0, 0, 1]), choice="oversample", seed=1)
        >>> count, sorted(order(tf.constant(0, tf.int64)).numpy().tolist())
        (8, [0, 1, 2, 3, 4, 4, 4, 4])
    """
    _, class_of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    each = int(counts.max() if choice == "oversample" else counts.min())
    starts = np.cumsum(counts) - counts
    slots = (starts[:, None] + np.arange(each)[None, :] % counts[:, None]).ravel()
    with tf.device("CPU:0"):
        indices, class_of = tf.constant(indices, tf.int64), tf.constant(class_of, tf.int64)
        slots = tf.constant(slots, tf.int64)

    def order(epoch: tf.Tensor) -> tf.Tensor:
        drawn = position.order(tf.range(len(class_of), dtype=tf.int64), seed=seed, epoch=epoch, of="balance")
        by_class = tf.gather(drawn, tf.argsort(tf.gather(class_of, drawn), stable=True))
        return position.order(tf.gather(indices, tf.gather(by_class, slots)), seed=seed, epoch=epoch)

    return len(slots), order


def weights(labels: np.ndarray, classes: int) -> np.ndarray:
    """Computes class weights that give each class the same total weight, with a mean of 1.

    Args:
        labels: int [n], the class of each training example.
        classes: the number of classes; one without training examples gets 0.

    Returns:
        float32 [classes].

    Example:
        >>> weights(np.array([0, 0, 0, 1]), 2).tolist()
        [0.6666666865348816, 2.0]
    """
    counts = np.bincount(labels, minlength=classes)
    present = np.count_nonzero(counts)
    return np.where(counts > 0, len(labels) / (present * np.maximum(counts, 1)), 0.0).astype(np.float32)


def weights_of(labels: tf.Tensor, weights: np.ndarray) -> tf.Tensor:
    """The weight of each example: of its class, or by its shares of the classes, float32 [batch].

    Args:
        labels: int [batch], or float32 [batch, classes]. Each row's sum is the same to the bit whatever rows are beside
            it: a product of matrices would not be, nor the sum of a row that is alone.
        weights: float32 [classes].
    """
    if labels.dtype.is_integer:
        return tf.gather(weights, labels)
    two = tf.cond(tf.shape(labels)[0] == 1, lambda: tf.concat([labels, labels], 0), lambda: labels)
    return tf.reduce_sum(two * weights, axis=1)[: tf.shape(labels)[0]]

"""Random draws of `keras.random` and of layers."""

import keras
import tensorflow as tf

from tfgpu.core.randomness import alike_draws, rng
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def dropout_masks_repeat() -> bool:
    """Whether two replicas drop the same positions of different rows."""
    masks = probing.mirrored().run(lambda: keras.random.dropout(tf.ones([8, 16]), 0.5, seed=1))
    first, second = masks.values
    return bool(tf.reduce_all(first == second))


def draws_by_tensorflow_differ() -> bool:
    """Whether replicas that compute the same draw different numbers by `tf.random`."""
    strategy = probing.mirrored()
    first, second = tf.function(lambda: strategy.run(lambda: tf.random.normal([4])))().values
    return bool(tf.reduce_any(first != second))


REPAIRS = (
    Repair(
        name="draws-by-example",
        fault="every replica draws the same dropout masks and noise",
        issue="",
        probe=dropout_masks_repeat,
        apply=rng.wrap_random_functions,
    ),
    Repair(
        name="draws-alike",
        fault="an optimizer that draws by tf.random makes the replicas' weights differ",
        issue="",
        probe=draws_by_tensorflow_differ,
        apply=alike_draws.draw_alike,
    ),
)

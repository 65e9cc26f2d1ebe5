"""`keras.remat`, and flash attention in KerasHub's layers."""

import keras
import tensorflow as tf

from tfgpu.attention import asked
from tfgpu.parallel import hub_attention
from tfgpu.parallel.rematerialization import remat
from tfgpu.repairs import Repair


def second_run_draws_differently() -> bool:
    """Whether a recomputed dropout drops other numbers in the backward pass."""
    x = tf.ones((64,))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = keras.remat(keras.layers.Dropout(0.5, seed=1))(x, training=True)
    return bool(tf.reduce_any(tape.gradient(y, x) != y))


asked.takers.register(hub_attention.install)

REPAIRS = (
    Repair(
        name="second-run",
        fault=("keras.remat draws other dropout masks and counts a batch twice; keras.RematScope crashes in fit"),
        issue="",
        probe=second_run_draws_differently,
        apply=remat.repair_remat,
    ),
)

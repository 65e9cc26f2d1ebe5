"""Losses and metrics that look at several rows of a batch."""

import keras
import tensorflow as tf

from tfgpu.core.row_mixing import all_rows, coupled_losses, whole_batch
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def dice_differs() -> bool:
    """Whether a loss that mixes rows is computed on each replica separately."""
    return probing.differs(rows=2, loss="dice")


def own_dice_differs() -> bool:
    """Whether a custom loss that is not a mean over rows is computed on each replica separately."""
    return probing.differs(rows=2, loss=lambda y, p: 1 - tf.reduce_sum(y * p) / tf.reduce_sum(y + p))


def own_step_differs() -> bool:
    """Whether a step of the user's own, whose loss is no mean over rows, learns other weights on two replicas."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            return self.dense(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, **kwargs):
            return keras.ops.sum(keras.ops.square(y - y_pred)) / (1.0 + keras.ops.sum(keras.ops.square(y)))

    return probing.differs(rows=2, model_class=Model)


REPAIRS = (
    Repair(
        name="coupled-losses",
        fault="Dice, Tversky and Circle mix the rows of one replica only",
        issue="",
        probe=dice_differs,
        apply=coupled_losses.mix_rows_of_all_replicas,
    ),
    Repair(
        name="own-losses",
        fault=("a hand-written loss or metric that is not a mean over rows sees one replica's rows"),
        issue="",
        probe=own_dice_differs,
        apply=all_rows.give_own_losses_all_rows,
    ),
    Repair(
        name="whole-batches",
        fault="a train_step that mixes rows, or works on gradients, sees one replica's",
        issue="",
        probe=own_step_differs,
        apply=whole_batch.show_whole_batch,
    ),
)

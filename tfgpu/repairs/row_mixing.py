"""Losses and metrics that look at several rows of a batch."""

import tensorflow as tf

from tfgpu.core.row_mixing import all_rows, coupled_losses
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def dice_differs() -> bool:
    """Whether a loss that mixes rows is computed on each replica separately."""
    return probing.differs(rows=2, loss="dice")


def own_dice_differs() -> bool:
    """Whether a custom loss that is not a mean over rows is computed on each replica separately."""
    return probing.differs(rows=2, loss=lambda y, p: 1 - tf.reduce_sum(y * p) / tf.reduce_sum(y + p))


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
)

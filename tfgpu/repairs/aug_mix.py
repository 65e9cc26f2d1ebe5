"""AugMix: all traces of a step, on all replicas, pick the same operations."""

import random

import keras
import tensorflow as tf

from tfgpu.compat.patch import replace
from tfgpu.core.randomness import data_order, trace_choices
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def pick_same_operations() -> None:
    """Makes AugMix pick the same operations on all replicas.

    Stock Keras picks with Python's `random` while tracing, so each replica's graph has other operations. Workers agree
    if the script seeds Python's `random` on all of them, as `keras.utils.set_random_seed` does, or on none.
    """

    replace("aug_mix.py_random", _Random(), by=__name__)


class _Random:
    """The part of the module `random` that AugMix uses."""

    def choice(self, options: list):
        return trace_choices.choose(lambda: (data_order.agreed_random() or random).choice(options))


def picks_differ() -> bool:
    """Whether two replicas pick different operations for the same images."""
    augment = keras.layers.AugMix(num_chains=4, chain_depth=4)
    pictures = tf.ones([1, 2, 2, 3])
    picked = []

    def step():
        chains = augment.get_random_transformation(pictures)["chain_transforms"]
        picked.append([[one["layer_name"] for one in chain] for chain in chains])

    probing.mirrored().run(step)
    return picked[0] != picked[1]


REPAIRS = (
    Repair(
        name="same-picks",
        fault="AugMix picks different operations on each replica",
        issue="",
        probe=picks_differ,
        apply=pick_same_operations,
    ),
)

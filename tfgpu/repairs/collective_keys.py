"""Collective keys: each strategy of a process gets its own."""

import itertools

from tfgpu.compat import distribute
from tfgpu.compat.patch import wrap
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair

KEYS_A_STRATEGY = 100_000
"""The distance between two strategies' keys in TensorFlow's own tests."""


def separate_collective_keys() -> None:
    """Gives each strategy of a process its own range of collective keys.

    TensorFlow names a collective by a group key and an instance key, and never forgets one. Every new strategy starts
    at the same numbers, so a second MirroredStrategy meets the first one's leftovers: "Shape mismatch in the collective
    instance", a wrong sum, or the death of the process. Notebooks, tests and searches make many strategies. Those of
    several workers share the collectives that the first one has started.
    """
    for kind in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
        numbers = itertools.count(1)  # 0 belongs to strategies made before this repair

        @wrap(f"tf.distribute.{kind}.__init__")
        def init(stock, self, *args, numbers=numbers, **kwargs):
            distribute.set_collective_key_base(self, KEYS_A_STRATEGY * next(numbers))
            with distribute.started_collectives_kept():
                stock(self, *args, **kwargs)


def second_strategy_reuses_keys() -> bool:
    """Whether two strategies of one process use the same collective keys."""
    first, second = probing.mirrored(), probing.mirrored()
    return distribute.first_group_key(first) == distribute.first_group_key(second)


REPAIRS = (
    Repair(
        name="collective-keys",
        fault="a second MirroredStrategy in one process reuses the first one's collective keys",
        issue="https://github.com/tensorflow/tensorflow/issues/62790",
        probe=second_strategy_reuses_keys,
        apply=separate_collective_keys,
    ),
)

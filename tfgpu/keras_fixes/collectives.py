"""TensorFlow's collectives: each strategy of a process gets keys of its own."""

import itertools

import tensorflow as tf

from tfgpu.keras_fixes.seam import wrap

KEYS_A_STRATEGY = 100_000
"""TensorFlow's own tests leave this many keys between two strategies."""


def give_each_strategy_its_own_keys() -> None:
    """Numbers the collectives of a process's second strategy on from the first's.

    TensorFlow names a collective by a group key and an instance key, and never forgets one. Every new strategy starts
    at the same numbers, so a second MirroredStrategy meets the first one's leftovers: "Shape mismatch in the collective
    instance", a wrong sum, or the death of the process. Notebooks, tests and searches make many strategies.
    """
    for cls in (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy):
        numbers = itertools.count(1)  # 0 is what a strategy has that was made before this

        @wrap(cls, "__init__")
        def init(stock, self, *args, numbers=numbers, **kwargs):
            self._collective_key_base = KEYS_A_STRATEGY * next(numbers)
            stock(self, *args, **kwargs)

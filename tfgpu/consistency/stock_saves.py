"""When Keras's own callbacks save, so that the replicas are compared before.

`ModelCheckpoint` and `BackupAndRestore` write what the chief holds, and the other workers need not have them. So all
workers go by the chief's callbacks, and compare where all of them come: at an epoch's end before any callback, or after
the steps at which a callback with `save_freq=N` saves. It counts as Keras does, except where a `fit` resumes within an
epoch: there a new `ModelCheckpoint` counts the epoch's earlier batches too, and the comparison comes up to N - 1 steps
away from its save.
"""

import json
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfgpu.compat.callbacks import batches_since_save
from tfgpu.core.state import broadcast


class StockSaves:
    """When the callbacks of one `fit` save, of those that have Keras's `save_freq`.

    Args:
        callbacks: of this worker.

    Attributes:
        at_epoch_end: a callback may save at the end of an epoch.

    Example:
        >>> saves = StockSaves([keras.callbacks.ModelCheckpoint("at_{batch}.keras", save_freq=3)])
        >>> saves.agree(None)
        >>> [saves.come_after(1) for _ in range(4)]
        [False, False, True, False]
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]):
        self._callbacks = [each for each in callbacks if _saves(getattr(each, "save_freq", None))]
        self._counts: list[list[int]] = []
        self.at_epoch_end = False

    def agree(self, strategy: tf.distribute.Strategy | None) -> None:
        """Goes by the chief's callbacks from here on. Every worker must call it.

        Args:
            strategy: of several workers; None for one process.
        """
        mine = [[each.save_freq, batches_since_save(each)] for each in self._callbacks]
        found = mine if strategy is None else json.loads(broadcast.texts_of_all_workers(strategy, json.dumps(mine))[0])
        self.at_epoch_end = any(every == "epoch" for every, _ in found)
        self._counts = [each for each in found if isinstance(each[0], int)]

    def come_after(self, steps: int) -> bool:
        """Counts steps; returns whether a callback saves after them."""
        saves = False
        for count in self._counts:
            count[1] += steps
            if count[1] >= count[0]:
                count[1], saves = 0, True
        return saves


def _saves(every: object) -> bool:
    return every == "epoch" or isinstance(every, int) and every > 0

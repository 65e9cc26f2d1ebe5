"""What to do where a loss is no number: end the training before that is saved, or leave such steps out."""

import logging
import math
from typing import Any

import keras

from tfgpu.checkpoint import data_position
from tfgpu.errors import InputError
from tfgpu.optim import nonfinite_steps

_log = logging.getLogger(__name__)


class StopOnNaN(keras.callbacks.Callback):
    """Ends the training with an error when the loss is NaN or infinite.

    It looks at each block's end: the loss in the logs is the epoch's mean, in which a NaN stays. So blocks are as long
    as without it, and up to a block's steps are lost. A `Checkpoint` saves after all callbacks have had their turn:
    what it has saved is from before. Keras's `TerminateOnNaN` looks at every batch, and ends `fit` as if all were well.

    To leave bad steps out instead, take `SkipNaN`.

    Raises:
        InputError: by `fit`, where the loss is no number: another start would come to the same.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = keras.ops.ones((2, 1))
        >>> model.fit(x, x * float("nan"), verbose=0, callbacks=[StopOnNaN()])
        Traceback (most recent call last):
        ...
        tfgpu.errors.InputError: The loss became nan in epoch 1, step 1. ...
    """

    every_batch = False

    def __init__(self):
        super().__init__()
        self._epoch = self._first = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._first = epoch, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        loss = float((logs or {}).get("loss", 0.0))
        if not math.isfinite(loss):
            raise InputError(
                f"The loss became {loss} in epoch {self._epoch + 1}, {_steps(self._first, batch)}. Lower the learning "
                "rate, set `global_clipnorm=1.0` in the optimizer, or take SkipNaN, which leaves such steps out."
            )
        self._first = batch + 1


class SkipNaN(keras.callbacks.Callback):
    """Leaves out steps that bring NaN or infinities, as if their batches were not in the data, and says so.

    A step is undone whole on all replicas where one of them finds a weight, a state of the optimizer, a moving average
    or a metric that is not finite any more. Weights, optimizer, iterations, metrics and random draws are then those of
    a training without that batch. Each step costs a copy of them and a look at each number; on several workers one
    more small sum. Overflows of float16, which the loss scale heals, are not meant: a step that it skips itself counts
    only where a metric or a layer's state is hurt too.

    Not undone: numbers in the logs that a train step of your own computes without a metric, a plain `tf.Variable` of a
    layer, and draws of `keras.random` without a seed generator of the layer's. On several workers all of them need it.

    Args:
        limit: steps that may be left out in the whole training, which a `Checkpoint` remembers (Keras's
            BackupAndRestore does not); one more ends it.

    Attributes:
        skipped: steps left out so far.

    Raises:
        InputError: by `fit`: more than `limit` steps, or all of an epoch, or a strategy whose replicas train apart
            from each other.

    Example:
        >>> import tfgpu
        >>> names = tfgpu.repair_keras()  # `tfgpu.strategy()` does so too
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = keras.ops.convert_to_tensor([[1.0], [float("nan")], [2.0]])
        >>> bad = SkipNaN(limit=1)
        >>> history = model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[bad])
        >>> bad.skipped, math.isfinite(history.history["loss"][0])
        (1, True)
    """

    every_batch = False
    on_all_workers = True

    def __init__(self, limit: int = 10):
        super().__init__()
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise InputError(f"`limit` must be a whole number of steps from 0. Received: {limit!r}.")
        self.limit: int = limit
        self.skipped: int = 0
        self._epoch = self._first = self._before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        data_position.build(self.model)
        self._guard = nonfinite_steps.begin(self.model)
        self._guard.take()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._first, self._before = epoch, 0, self.skipped

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        found = self._guard.take()
        if found:
            self.skipped += found
            where = f"{_steps(self._first, batch)} of epoch {self._epoch + 1}"
            if self.skipped > self.limit:
                raise InputError(
                    f"{self.skipped} steps had NaN or infinities, the last of them in {where}; SkipNaN leaves out "
                    f"limit={self.limit}. Look at the data, lower the learning rate, set `global_clipnorm=1.0` in the "
                    "optimizer, or raise the limit."
                )
            _log.warning(
                "Left out %d step(s), in %s: NaN or infinities. %d of at most %d so far.",
                *(found, where, self.skipped, self.limit),
            )
        self._first = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._first and self.skipped - self._before == self._first:
            raise InputError(
                f"All {self._first} steps of epoch {epoch + 1} had NaN or infinities, which is no loss to report. "
                "Look at the data, lower the learning rate, or set `global_clipnorm=1.0` in the optimizer."
            )


def _steps(first: int, last: int) -> str:
    return f"step {last + 1}" if last <= first else f"steps {first + 1} to {last + 1}"

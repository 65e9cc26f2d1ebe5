"""Ends a training whose loss is no number, before that is saved."""

import math
from typing import Any

import keras

from tfgpu.errors import InputError


class StopOnNaN(keras.callbacks.Callback):
    """Ends the training with an error when the loss is NaN or infinite.

    It looks at each block's end: the loss in the logs is the epoch's mean, in which a NaN stays. So blocks are as long
    as without it, and up to a block's steps are lost. A `Checkpoint` saves after all callbacks have had their turn:
    what it has saved is from before. Keras's `TerminateOnNaN` looks at every batch, and ends `fit` as if all were well.

    To skip bad steps instead, wrap the optimizer:
    `keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0, dynamic_growth_steps=10**9)` makes no update
    where a gradient is not finite, and halves its scale each time.

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
            steps = f"step {batch + 1}" if batch <= self._first else f"steps {self._first + 1} to {batch + 1}"
            raise InputError(
                f"The loss became {loss} in epoch {self._epoch + 1}, {steps}. Lower the learning rate, set "
                "`global_clipnorm=1.0` in the optimizer, or use a LossScaleOptimizer, which leaves such steps out."
            )
        self._first = batch + 1

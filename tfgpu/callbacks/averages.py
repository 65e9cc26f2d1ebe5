"""Averages of weights: evaluating those that the optimizer keeps (EMA), and stochastic weight averaging (SWA)."""

import logging
from typing import Any

import keras
import numpy as np

from tfgpu import repairs
from tfgpu.compat import slots
from tfgpu.core.state import sharded_variable, training_state
from tfgpu.errors import InputError, whole_number
from tfgpu.optim import batch_norm_statistics

_log = logging.getLogger(__name__)


class EvaluateAverages(keras.callbacks.Callback):
    """Validates with the moving averages (`use_ema=True`), as Keras's `SwapEMAWeights`, without rounding the weights.

    The averages replace the weights at the beginning of a validation, and the weights return bit for bit at its end
    (`SwapEMAWeights` swaps by sums and differences, which rounds the weights at each validation). The optimizer
    does not average the running statistics of BatchNormalization: they stay those of the training. At the end of `fit`
    Keras leaves the averages in the model. A `Checkpoint` keeps both the weights and the averages.

    Raises:
        InputError: by `fit`: the optimizer keeps no averages.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse")
        >>> x = np.ones((4, 1))
        >>> history = model.fit(x, x, validation_data=(x, x), epochs=2, verbose=0, callbacks=[EvaluateAverages()])
        >>> bool(np.isclose(history.history["val_loss"][-1], model.evaluate(x, x, verbose=0)))
        True
    """

    every_batch = False

    def __init__(self):
        super().__init__()
        self._weights: list[np.ndarray] | None = None  # while the averages replace them

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if not optimizer.use_ema:
            raise InputError(
                f"EvaluateAverages needs an optimizer that keeps averages. Received: {type(optimizer).__name__} with "
                "use_ema=False. Create it with use_ema=True."
            )
        self._weights = None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # A run that was preempted in its validation resumes with the averages in place.
        if self._weights is None:
            self._weights = self.model.get_weights()
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._weights is not None:
            self.model.set_weights(self._weights)
            self._weights = None

    def averaged(self) -> list[np.ndarray]:
        """The averaged weights, as `model.get_weights` would return them."""
        self.on_test_begin()
        try:
            return self.model.get_weights()
        finally:
            self.on_test_end()


class StochasticWeightAverage(keras.callbacks.Callback):
    """Ends the training with the mean of the weights at the ends of its last epochs (SWA).

    During training nothing changes: validation, checkpoints and other callbacks see the weights themselves. At the end
    the mean replaces them, and one pass over the training data recomputes the running statistics of
    BatchNormalization, which belong to other weights (averages over the batches, weighted by rows). The method is made
    for a learning rate that stays high in those epochs ("constant", or a late step).

    A `Checkpoint` keeps the mean. Put this callback after an `EarlyStopping`, which would otherwise restore the best
    weights over the mean.

    Args:
        start_epoch: the first epoch, from 0, whose weights count.
        every: average every so many epochs from there on. Default 1.
        data: the training data, as `evaluate` takes it, or a `tfgpu.data` dataset, of which it reads epoch 0. Required
            if the model has a trainable BatchNormalization.

    Attributes:
        averaged: the number of epochs in the mean.

    Raises:
        InputError: a number is out of range; by `fit`: the model has BatchNormalization, but no data was given.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, mean = np.ones((4, 1)), StochasticWeightAverage(start_epoch=1)
        >>> history = model.fit(x, x, epochs=3, verbose=0, callbacks=[mean])
        >>> mean.averaged
        2

    Source: P. Izmailov and others, "Averaging Weights Leads to Wider Optima and Better Generalization", 2018,
        arXiv:1803.05407.
    """

    every_batch = False
    on_all_workers = True

    def __init__(self, start_epoch: int, *, every: int = 1, data: Any = None):
        super().__init__()
        for name, value, least in (("start_epoch", start_epoch, 0), ("every", every, 1)):
            whole_number(name, value, minimum=least)
        if not repairs.repair_keras():
            raise InputError("StochasticWeightAverage needs the Keras repairs. Unset TFGPU_REPAIR.")
        self.averaged: int = 0
        self._start, self._every, self._data = start_epoch, every, data
        self._mean: list[np.ndarray] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.averaged, self._mean = 0, []
        layers = batch_norm_statistics.layers_of(self.model)
        if layers and self._data is None:
            raise InputError(
                f"Averaged weights need new running statistics in {layers[0].name!r}. Give StochasticWeightAverage the "
                "training data: data=..."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch < self._start or (epoch - self._start) % self._every:
            return
        training_state.settle(self.model)
        found = [np.asarray(variable.numpy(), np.float32) for variable in self._variables()]
        self.averaged += 1
        self._mean = [m + (w - m) / self.averaged for m, w in zip(self._mean or found, found, strict=True)]

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self.averaged:
            _log.warning("The training ended before epoch %d: no weights were averaged.", self._start + 1)
            return
        for variable, value in zip(self._variables(), self._mean, strict=True):
            variable.assign(value)
        self._renew()

    def _variables(self) -> list:
        return sharded_variable.merged(self.model.trainable_variables)

    def _renew(self) -> None:
        if self._data is None:
            return
        counter = slots.get(getattr(self._data, "train", self._data), "epochs")
        before = None if counter is None else counter.next
        if counter is not None:
            counter.next = 0  # whichever epoch the training ended with
        try:
            batch_norm_statistics.recompute(self.model, getattr(self._data, "train", self._data))
        finally:
            if counter is not None:
                counter.next = before

"""Moving averages of weights that the optimizer keeps, at validation."""

import logging
from typing import Any

import keras
import numpy as np

from tfgpu.errors import InputError

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

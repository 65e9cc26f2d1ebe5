"""`Trainer(model)`: `model.fit` with a fixed number of steps per compiled call."""

from typing import Any

import keras

from tfgpu import repairs
from tfgpu.core import step_blocks
from tfgpu.errors import InputError, whole_number


class Trainer:
    """Alias of `model.fit`, `model.evaluate` and `model.predict`, with a fixed number of steps per compiled call.

    `model.fit` runs blocks of steps itself; use it unless you need to fix the length of a block.

    Args:
        model: a compiled model, created under the strategy's scope.
        steps_per_call: steps per call; `on_train_batch_begin` and `on_train_batch_end` run once per call. `None`
            (default) leaves the number to `fit`.

    Raises:
        InputError: `steps_per_call` is not a positive integer; the model is not compiled, or overrides `fit` or
            `make_train_function`; or `TFGPU_REPAIR=0` is set.

    Example:
        >>> import keras, numpy as np, tfgpu
        >>> with tfgpu.strategy().scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = tfgpu.Trainer(model).fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """

    def __init__(self, model: keras.Model, *, steps_per_call: int | None = None):
        if not isinstance(model, keras.Model):
            raise InputError(f"`model` must be a Keras model. Received: {type(model).__name__}.")
        for name in ("make_train_function", "make_test_function", "fit"):
            if getattr(type(model), name) is not getattr(keras.Model, name):
                raise InputError(
                    f"Trainer runs `train_step`, but {type(model).__name__} overrides `{name}`. Use model.fit."
                )
        if steps_per_call is not None:
            steps_per_call = whole_number("steps_per_call", steps_per_call)
        if not repairs.repair_keras():
            raise InputError("Trainer needs the Keras repairs. Unset TFGPU_REPAIR.")
        self.model = model
        self._steps_per_call = steps_per_call

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains; takes the arguments of `keras.Model.fit` and returns its `History`."""
        return self._run("fit", args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates; takes the arguments of `keras.Model.evaluate` and returns what it returns."""
        return self._run("evaluate", args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts; takes the arguments of `keras.Model.predict` and returns what it returns."""
        return self.model.predict(*args, **kwargs)

    def _run(self, what: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.model.compiled:
            raise InputError(f"The model must be compiled before `{what}`. Call model.compile(optimizer, loss, ...).")
        with step_blocks.fixed_steps_per_call(self._steps_per_call):
            return getattr(self.model, what)(*args, **kwargs)

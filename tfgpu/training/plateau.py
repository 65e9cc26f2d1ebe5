"""Warmup followed by reduction on a plateau, which Keras's ReduceLROnPlateau does not support."""

from types import SimpleNamespace
from typing import Any

import keras

from tfgpu.errors import InputError
from tfgpu.optim import parameter_groups


@keras.saving.register_keras_serializable(package="tfgpu")
class Adjusted(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that a callback sets between epochs, for use within other schedules.

    Args:
        rate: the initial rate.

    Example:
        >>> rate = Adjusted(0.5)
        >>> rate.put(0.25)
        >>> float(rate(0))
        0.25
    """

    def __init__(self, rate: float):
        self._variable: keras.Variable | None = None
        self._rate = float(rate)

    @property
    def rate(self) -> float:
        """The current rate."""
        return self._rate

    @property
    def is_built(self) -> bool:
        """Whether traced steps see changes by `put`."""
        return self._variable is not None

    def build(self) -> None:
        """Creates the variable that steps read; under the strategy's scope, before tracing."""
        self._variable = keras.Variable(self._rate, trainable=False, dtype="float32", autocast=False, name="peak_rate")

    def put(self, rate: float) -> None:
        """Sets the rate."""
        self._rate = float(rate)
        if self._variable is not None:
            self._variable.assign(self._rate)

    def __call__(self, step: Any) -> Any:
        return keras.ops.convert_to_tensor(self._rate if self._variable is None else self._variable, "float32")

    def get_config(self) -> dict[str, Any]:
        return {"rate": self._rate}


class ReduceAfterWarmup(keras.callbacks.ReduceLROnPlateau):
    """Keras's ReduceLROnPlateau for an optimizer with warmup.

    Epochs that end during warmup are ignored. The optimizer's rate must be a `Warmup` to an `Adjusted`, as returned by
    `schedules.build("plateau", ..., warmup_steps=...)`.

    Args:
        warmup_steps: number of warmup updates.

    The other arguments are Keras's.
    """

    def __init__(self, warmup_steps: int, **settings: Any):
        super().__init__(**settings)
        self._warmup_steps = warmup_steps
        self.peak: float = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        adjusted = self._adjusted()
        if not adjusted.is_built:
            with self.model.distribute_strategy.scope():
                adjusted.build()
            if self.model.train_function is not None:  # it may have been traced without the variable
                self.model.make_train_function(force=True)
        self.peak = adjusted.rate

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._adjusted().put(self.peak)  # a checkpoint may have restored it

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        optimizer = self.model.optimizer
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        if int(keras.ops.convert_to_numpy(optimizer.iterations)) >= self._warmup_steps:
            # Keras sets a number on the optimizer; with a schedule it would refuse, so it gets a stand-in.
            model, stands_in = self.model, SimpleNamespace(learning_rate=self.peak)
            self.set_model(SimpleNamespace(optimizer=stands_in, metrics=model.metrics))
            try:
                super().on_epoch_end(epoch, logs)
            finally:
                self.set_model(model)
            self.peak = float(stands_in.learning_rate)
            self._adjusted().put(self.peak)
        logs["learning_rate"] = rate

    def _adjusted(self) -> Adjusted:
        schedule = parameter_groups.schedule_of(self.model.optimizer)
        while schedule is not None and not isinstance(schedule, Adjusted):
            schedule = getattr(schedule, "then", None)
        if schedule is None:
            raise InputError(
                "The plateau callback does not support the optimizer's learning rate. Create both with one "
                "`schedules.build('plateau', ..., warmup_steps=...)`, and pass its `learning_rate` to the optimizer."
            )
        return schedule

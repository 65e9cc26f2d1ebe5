"""Continuing with new data: what is kept of the optimizer, and how its rate warms up again."""

import os
import zipfile
from pathlib import Path
from typing import Any

import keras

from tfgpu.errors import InputError, is_number, unknown, whole_number
from tfgpu.optim import parameter_groups
from tfgpu.training.incremental import names
from tfgpu.training.schedules import PerUpdate, Rate, Warmup

OPTIMIZERS = ("keep", "reset")


def warm_start(source: Any, model: keras.Model | None = None, *, optimizer: str) -> keras.Model:
    """Loads a trained model for training on other data with a new `fit`, whose epochs count from 0.

    Args:
        source: a `.keras` file; or an object with `restore(model)`, such as `tfgpu.callbacks.Checkpoint(folder)`. The
            new `fit` needs a new checkpoint folder: the old one's run is done.
        model: for a checkpoint: the compiled model, created as for the run that wrote it. A `.keras` file has its own,
            and is loaded under the current strategy scope.
        optimizer: `"keep"` keeps its slots, iterations and rate (a schedule continues too, see `rewarm`); `"reset"`
            recreates it from its configuration.

    Returns:
        The compiled model.

    Raises:
        InputError: the file or checkpoint is missing, damaged or another model's, or `optimizer` is invalid.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> model.save("first.keras")
        >>> again = warm_start("first.keras", optimizer="reset")
    """
    if optimizer not in OPTIMIZERS:
        raise unknown("choice of `optimizer`", optimizer, OPTIMIZERS)
    if hasattr(source, "restore"):
        if model is None:
            raise InputError("A checkpoint does not contain the model. Pass the compiled model as `model`.")
        fresh = _config(model.optimizer)
        if source.restore(model) is None:
            raise InputError("There is no checkpoint in that folder. Check its path.")
    else:
        path = Path(source) if isinstance(source, str | os.PathLike) else None
        if path is None or path.suffix != ".keras" or not path.is_file():
            raise InputError(
                f"`source` must be an existing .keras file, or a tfgpu.callbacks.Checkpoint(folder). "
                f"Received: {str(source)!r}."
            )
        if model is not None:
            raise InputError("A .keras file contains the model. Remove `model`.")
        if not zipfile.is_zipfile(path):
            raise InputError(f"{path} is damaged or not a .keras file. Use the output of `model.save`.")
        model = keras.models.load_model(path)
        if not model.compiled:
            raise InputError(f"{path} has no optimizer. Load it with `keras.models.load_model` and compile it.")
        fresh = _config(model.optimizer)
    if optimizer == "reset":
        with model.distribute_strategy.scope():
            new = type(model.optimizer).from_config(fresh)
            if trained := parameter_groups.built_like(model.optimizer, new):
                new.build(trained)
        model.optimizer = new
    names.retrace(model)
    return model


def _config(optimizer) -> dict:
    if optimizer is None:
        raise InputError("The model has no optimizer. Compile it.")
    return optimizer.get_config()


def rewarm(model: keras.Model, steps: int, then: Rate | None = None) -> None:
    """Warms up the learning rate again over the next updates, and follows `then` from there.

    Optimizer slots that were kept fit the old data, so the first updates on other data should be small. The optimizer's
    iterations continue; the warmup counts from their current value.

    Args:
        model: a compiled model.
        steps: number of warmup updates, at least 1.
        then: the rate afterward, or a Keras schedule that starts there; None keeps the optimizer's current rate.

    Raises:
        InputError: the model is not compiled, or an argument is invalid.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile(keras.optimizers.Adam(0.3), "mse")
        >>> rewarm(model, steps=2)
        >>> round(float(model.optimizer.learning_rate), 3)
        0.1
    """
    if not model.compiled or model.optimizer is None:
        raise InputError("The model has no optimizer. Compile it first.")
    steps = whole_number("steps", steps)
    is_rate = is_number(then) and then > 0
    if not (then is None or is_rate or isinstance(then, keras.optimizers.schedules.LearningRateSchedule)):
        raise InputError(f"`then` must be None, a rate above 0, or a Keras schedule. Received: {then!r}.")
    inner = parameter_groups.inner_of(model.optimizer)
    accumulate = inner.gradient_accumulation_steps or 1
    begun = int(inner.variables[0].numpy())  # batches
    rate = float(inner.learning_rate.numpy()) if then is None else then
    schedule = Warmup(rate, steps)
    if accumulate > 1:
        schedule = PerUpdate(schedule, accumulate)
    model.optimizer.learning_rate = From(schedule, begun) if begun else schedule
    names.retrace(model)


@keras.saving.register_keras_serializable(package="tfgpu")
class From(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that starts at a later step.

    Args:
        then: the schedule.
        step: the step that counts as its step 0.

    Example:
        >>> [round(float(From(Warmup(0.3, 2), 5)(step)), 3) for step in (5, 6, 7)]
        [0.1, 0.2, 0.3]
    """

    def __init__(self, then: keras.optimizers.schedules.LearningRateSchedule, step: int):
        self.then, self.step = then, step

    def __call__(self, step):
        return self.then(keras.ops.maximum(keras.ops.cast(step, "int64") - self.step, 0))

    def get_config(self):
        return {"then": keras.optimizers.schedules.serialize(self.then), "step": self.step}

    @classmethod
    def from_config(cls, config):
        return cls(keras.optimizers.schedules.deserialize(config["then"]), config["step"])

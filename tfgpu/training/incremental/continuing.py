"""Continuing with new data: what is kept of the optimizer, and how its rate warms up again."""

import os
import zipfile
from pathlib import Path
from typing import Any

import keras

from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.optim import parameter_groups
from tfgpu.training.incremental import tracing
from tfgpu.training.schedules import PerUpdate, Rate, Warmup

OPTIMIZERS = ("keep", "reset")


def take_up(source: Any, model: keras.Model | None = None, *, optimizer: str) -> keras.Model:
    """Takes up what was trained, to go on with other data in a new `fit`, whose epochs count from 0.

    Args:
        source: a `.keras` file; or what has a `restore(model)`, as `tfgpu.callbacks.Checkpoint(folder)` has. Give the
            new `fit` a checkpoint folder of its own: the old one's run is over.
        model: for a checkpoint: the compiled model, made as for the run that wrote it. A `.keras` file has its own,
            and is loaded under the strategy in whose scope this is called.
        optimizer: `"keep"` goes on with its slots, iterations and rate (a schedule goes on too, see `rewarm`);
            `"reset"` begins them anew, with the rate of its configuration.

    Returns:
        The compiled model.

    Raises:
        InputError: there is no such file or checkpoint, it is not whole or another model's, `optimizer` is no choice.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> model.save("first.keras")
        >>> again = take_up("first.keras", optimizer="reset")
    """
    if optimizer not in OPTIMIZERS:
        raise unknown("choice of `optimizer`", optimizer, OPTIMIZERS)
    if hasattr(source, "restore"):
        if model is None:
            raise InputError("A checkpoint holds no model: give the compiled model that it is of as `model`.")
        fresh = _config(model.optimizer)
        if source.restore(model) is None:
            raise InputError("There is no checkpoint in that folder. Look at its path.")
    else:
        path = Path(source) if isinstance(source, str | os.PathLike) else None
        if path is None or path.suffix != ".keras" or not path.is_file():
            raise InputError(
                f"`source` must be a .keras file, or a Checkpoint such as tfgpu.callbacks.Checkpoint(folder). "
                f"Received: {str(source)!r}."
            )
        if model is not None:
            raise InputError("A .keras file has its model. Leave `model` out.")
        if not zipfile.is_zipfile(path):
            raise InputError(f"{path} is no whole .keras file. Give one as `model.save` has written it.")
        model = keras.models.load_model(path)
        if not model.compiled:
            raise InputError(f"{path} was saved without its optimizer. Compile what `keras.models.load_model` gives.")
        fresh = _config(model.optimizer)
    if optimizer == "reset":
        _begin_anew(model, fresh)
    tracing.trace_anew(model)
    return model


def _config(optimizer) -> dict:
    if optimizer is None:
        raise InputError("The model has no optimizer. Compile it.")
    return optimizer.get_config()


def _begin_anew(model: keras.Model, config: dict) -> None:
    old = model.optimizer
    trained = parameter_groups.built_on(old)
    with model.distribute_strategy.scope():
        new = type(old).from_config(config)
        parameter_groups.copy_exclusions(old, new, list(zip(trained, trained, strict=True)))
        if trained:
            new.build(trained)
    model.optimizer = new


def rewarm(model: keras.Model, steps: int, then: Rate | None = None) -> None:
    """Warms up the learning rate again over the next updates, and follows `then` from there.

    Optimizer slots that were kept fit the old data, so the first updates on other data should be small. The optimizer's
    iterations continue; the warmup counts from their current value.

    Args:
        model: a compiled model.
        steps: number of warmup updates, at least 1.
        then: the rate afterwards, or a Keras schedule that starts there; None keeps the optimizer's current rate.

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
    is_rate = isinstance(then, (int, float)) and not isinstance(then, bool) and 0 < then < float("inf")
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
    tracing.trace_anew(model)


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

"""The learning rate range test: the learning rate rises at each step, and the loss shows the useful range.

Sources: L. Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, arXiv:1506.01186; the logarithmic plot
and the suggestion in the middle of the valley are as in fastai.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpu import strategies
from tfgpu.checkpoint import data_position
from tfgpu.compat import slots
from tfgpu.core.state import training_state
from tfgpu.errors import InputError, is_number, whole_number
from tfgpu.optim import parameter_groups
from tfgpu.recipes import building, runner
from tfgpu.recipes.recipe import Recipe
from tfgpu.training.incremental import names
from tfgpu.training.incremental.continuing import From
from tfgpu.tune.scaling import rate_text

_DIVERGED = 4.0  # the sweep ends when the loss is this many times its minimum, and above its first value
_LEAST_DROP = 0.02  # the least fall of the loss, as a share of its first value
_LEAST_STEPS = 20


@dataclass(frozen=True)
class RangeTest:
    """The result of a learning rate range test.

    Attributes:
        rates: the learning rate of each step.
        losses: the loss of each step's batch; the last one may be infinite.
        smoothed: the smoothed losses.
        suggestion: a learning rate to train with: the geometric mean of the rate where the loss begins to fall (after a
            tenth of its fall) and the rate where it is lowest; None if the loss does not fall.
        lowest: the rate at the lowest smoothed loss, where training is about to become unstable.
        reason: why this rate is suggested, or why no rate is.
    """

    rates: tuple[float, ...] = field(repr=False)
    losses: tuple[float, ...] = field(repr=False)
    smoothed: tuple[float, ...] = field(repr=False)
    suggestion: float | None
    lowest: float | None
    reason: str

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws the losses over the rates.

        Args:
            path: a file to write, `.png` or `.svg`; None writes none.

        Returns:
            A Matplotlib figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, color="0.8", linewidth=0.8, label="batches")
        axes.plot(self.rates, self.smoothed, color="tab:blue", label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="tab:orange", label=f"suggestion {rate_text(self.suggestion)}")
        if self.lowest is not None:
            axes.axvline(self.lowest, color="0.5", linestyle=":", label=f"lowest loss {rate_text(self.lowest)}")
        finite = [value for value in self.smoothed if math.isfinite(value)]
        if finite:
            span = max(finite[0] - min(finite), 1e-9)
            axes.set_ylim(min(finite) - 0.1 * span, finite[0] + 0.5 * span)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def learning_rate(
    model: keras.Model, data: Any, *, lowest: float = 1e-6, highest: float = 1.0, steps: int = 200
) -> RangeTest:
    """Trains for some steps with an exponentially rising learning rate, and restores the model.

    Weights, optimizer state, random states and the position in data of `tfgpu.data` are restored bit for bit, also
    after an interrupt or an error; metrics are reset. Under a strategy the losses equal those of one device.

    Args:
        model: compiled and built, under any strategy except parameter servers and averaging.
        data: the result of `tfgpu.data.load`, or a `tf.data.Dataset` of batches `(x, y)` or
            `(x, y, sample_weight)`; it is repeated if it ends.
        lowest, highest: the learning rates of the first and the last step.
        steps: the number of steps, at least 20; the test ends early if the loss is four times its minimum, or not
            finite.

    Returns:
        The losses and a suggestion.

    Raises:
        InputError: an argument is out of range, the model is not compiled or built, or the data has too few batches and
            cannot be repeated.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
        >>> found = learning_rate(model, tf.data.Dataset.from_tensor_slices((x, 3 * x)).batch(16), highest=100)
        >>> 0.01 < found.suggestion < 1
        True
    """
    _check(model, lowest, highest, steps)
    batches = _batches(data)
    data_position.build(model)
    state, random = training_state.copy_state(model), training_state.random_states()
    counter = slots.get(batches, "epochs")
    epoch = None if counter is None else counter.next
    optimizer = parameter_groups.inner_of(model.optimizer)
    schedule = parameter_groups.schedule_of(optimizer)
    sweep = _Sweep(lowest, highest, steps)
    try:
        if schedule is not None:
            model.optimizer.learning_rate = From(_Rising(lowest, highest, steps), int(optimizer.variables[0].numpy()))
            names.retrace(model)
            sweep.assigns = False
        ran_out = _run(model, batches, sweep, steps)
    finally:
        if schedule is not None:
            model.optimizer.learning_rate = schedule
            names.retrace(model)
        training_state.restore_state(model, state, "the state before the range test")
        training_state.restore_random_states(random)
        model.reset_metrics()
        model.stop_training = False
        if epoch is not None:
            counter.next = epoch
    if not sweep.losses:
        raise InputError("The dataset is empty. Give one with at least one batch.")
    if ran_out:
        raise InputError(
            f"The data ended after {len(sweep.losses)} of {steps} steps, and cannot be repeated. Give a dataset that "
            f"can be iterated again, or steps={len(sweep.losses)}."
        )
    return judged(sweep.rates, sweep.losses, complete=len(sweep.losses) >= steps)


def of_recipe(what: Recipe, *, lowest: float = 1e-6, highest: float = 1.0, steps: int = 200) -> RangeTest:
    """Builds a recipe's model and data, and runs the range test.

    Args:
        what: the recipe.
        lowest, highest, steps: see `learning_rate`.

    Raises:
        InputError: the recipe or an argument is invalid, or the process belongs to a cluster.
    """
    cluster = runner.check_alone(what, "The range test runs")
    with building.prepare(what):
        job = building.build(what, cluster)
        return learning_rate(job.model, job.data, lowest=lowest, highest=highest, steps=steps)


def judged(tried: list[float], losses: list[float], *, complete: bool) -> RangeTest:
    """Finds the range in which the loss falls.

    Args:
        tried: the learning rates, rising.
        losses: the loss at each rate; the last may be NaN or infinite.
        complete: whether the sweep reached its last rate.

    Example:
        >>> tried = [10 ** (k / 10 - 6) for k in range(61)]
        >>> bend = [1.0 if r < 1e-4 else max(0.1, 1 - 0.45 * math.log10(r / 1e-4)) for r in tried]
        >>> found = judged(tried, bend, complete=True)
        >>> found.lowest > 1e-3, 1e-4 < found.suggestion < found.lowest
        (True, True)
    """
    smoothed = _smoothed(losses)
    known = [at for at, value in enumerate(smoothed) if math.isfinite(value)]
    result = {"rates": tuple(tried), "losses": tuple(losses), "smoothed": tuple(smoothed)}
    if not known:
        reason = "The loss of the first batch is not finite. Check the model, the data and the loss."
        return RangeTest(**result, suggestion=None, lowest=None, reason=reason)
    if len(known) < _LEAST_STEPS:
        reason = f"The loss was not finite, or four times its minimum, after {len(known)} steps. Lower `lowest`."
        return RangeTest(**result, suggestion=None, lowest=None, reason=reason)
    first = float(np.median([smoothed[at] for at in known[: max(3, len(known) // 10)]]))
    best = min(known, key=smoothed.__getitem__)
    drop = first - smoothed[best]
    if drop <= _LEAST_DROP * abs(first):
        reason = "The loss did not fall. Raise `highest`, or check the model, the data and the loss."
        return RangeTest(**result, suggestion=None, lowest=None, reason=reason)
    begin = max(at for at in range(best + 1) if smoothed[at] >= first - 0.1 * drop)
    suggestion = math.sqrt(tried[begin] * tried[best])
    reason = f"The loss falls from {rate_text(tried[begin])}, and is lowest at {rate_text(tried[best])}."
    if complete and best >= known[-1] - len(known) // 50:
        at = rate_text(tried[best])
        reason = f"The loss was still falling at {at}: a higher rate may be better. Raise `highest`."
    return RangeTest(**result, suggestion=suggestion, lowest=tried[best], reason=reason)


@keras.saving.register_keras_serializable(package="tfgpu")
class _Rising(keras.optimizers.schedules.LearningRateSchedule):
    """From `lowest` to `highest` in `steps`, exponentially."""

    def __init__(self, lowest: float, highest: float, steps: int):
        self.lowest, self.highest, self.steps = lowest, highest, steps

    def __call__(self, step: Any) -> Any:
        part = tf.cast(step, tf.float32) / (self.steps - 1)
        return self.lowest * tf.pow(self.highest / self.lowest, part)

    def get_config(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "highest": self.highest, "steps": self.steps}


class _Over(Exception):
    """Ends the sweep."""


class _Sweep(keras.callbacks.Callback):
    """Sets the learning rate of each step, and records the loss of each batch."""

    on_all_workers = True
    has_memory = False

    def __init__(self, lowest: float, highest: float, steps: int):
        super().__init__()
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.assigns = True
        self._plan = np.geomspace(lowest, highest, steps)
        self._low, self._first = math.inf, math.nan

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.model.reset_metrics()
        if self.assigns:
            parameter_groups.inner_of(self.model.optimizer).learning_rate = float(self._plan[len(self.losses)])

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        logs = logs or {}
        if "loss" not in logs:
            raise InputError(
                "The range test reads `loss` from the logs of each step. Received: "
                f"{', '.join(sorted(logs)) or 'no logs'}. Return it from your `train_step`."
            )
        loss = float(logs["loss"])
        self.rates.append(float(self._plan[len(self.losses)]))
        self.losses.append(loss if math.isfinite(loss) else math.inf)
        self._low = min(self._low, loss)
        if len(self.losses) == 1:
            self._first = loss
        diverged = loss > self._first and loss > _DIVERGED * abs(self._low)
        if len(self.losses) >= len(self._plan) or not math.isfinite(loss) or (diverged and len(self.losses) > 5):
            raise _Over


def _run(model: keras.Model, batches: tf.data.Dataset, sweep: _Sweep, steps: int) -> bool:
    """Runs the steps; returns whether the data ended before the sweep."""
    before = -1
    try:
        while before < len(sweep.losses) < steps:
            before = len(sweep.losses)
            model.fit(batches, epochs=1, shuffle=False, verbose=0, callbacks=[sweep])
    except _Over:
        return False
    return True


def _check(model: keras.Model, lowest: float, highest: float, steps: int) -> None:
    steps = whole_number("steps", steps, minimum=_LEAST_STEPS)
    if not is_number(lowest) or not is_number(highest) or not 0 < lowest < highest:
        raise InputError(f"`lowest` must be above 0 and below `highest`. Received: {lowest!r} and {highest!r}.")
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise InputError("The model has no optimizer. Compile it first.")
    if not model.built:
        raise InputError("The model is not built. Give it an Input, or call it on a batch first.")
    if not model.trainable_variables:
        raise InputError("All layers of the model are frozen. Set `trainable = True` on some.")
    if model.steps_per_execution != 1:
        raise InputError(
            "The range test sets the learning rate of each step. Received: steps_per_execution="
            f"{model.steps_per_execution}. Compile with steps_per_execution=1."
        )
    kind = strategies.describe(model.distribute_strategy)["kind"] if model.distribute_strategy else "one_device"
    if kind in ("parameter_server", "averaging"):
        raise InputError(f"Workers of `{kind}` do not step together. Run the range test on one device.")


def _batches(data: Any) -> tf.data.Dataset:
    found = getattr(data, "train", data)
    if not isinstance(found, tf.data.Dataset):
        raise InputError(f"`data` must be a tf.data.Dataset, or data of tfgpu.data. Received: {type(data).__name__}.")
    return found


def _smoothed(losses: list[float]) -> list[float]:
    """Smooths with a Gaussian whose width is a fortieth of the sweep; non-finite losses are excluded."""
    values = np.array(losses, float)
    known = np.isfinite(values)
    width = max(1.0, len(values) / 40)
    at = np.arange(len(values))
    weights = np.exp(-0.5 * ((at[:, None] - at[None]) / width) ** 2) * known[None]
    means = weights @ np.where(known, values, 0) / np.maximum(weights.sum(1), 1e-300)
    return [float(mean) if is_known else math.inf for mean, is_known in zip(means, known, strict=True)]

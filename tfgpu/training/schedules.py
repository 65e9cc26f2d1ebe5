"""Learning-rate schedules by name: Keras's, with warmup, which Keras has only for the cosine.

All steps here are weight updates. Keras counts its schedules in batches: with `gradient_accumulation_steps=k` a plain
Keras schedule runs k times too fast (measured in Keras 3.15). With `accumulate=k` the schedule advances once per
update, as with k times the batch size.

    from tfgpu.training import schedules
    schedule = schedules.build("cosine", 1e-3, total_steps=1000, warmup_steps=100)
    model.compile(optimizer=keras.optimizers.AdamW(schedule.learning_rate), loss="mse")
    model.fit(x, y, callbacks=list(schedule.callbacks))
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import keras

from tfgpu import errors
from tfgpu.errors import InputError, is_number, is_whole, whole_number

Rate = float | keras.optimizers.schedules.LearningRateSchedule


@dataclass(frozen=True)
class Schedule:
    """A schedule's parts.

    Attributes:
        learning_rate: for the optimizer: a number, or a Keras schedule over updates.
        callbacks: for `fit`; only "plateau" has one.
    """

    learning_rate: Any  # a `Rate`, which type checkers would not accept for Keras's unannotated argument
    callbacks: tuple[keras.callbacks.Callback, ...] = ()


@keras.saving.register_keras_serializable(package="tfgpu")
class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly for `steps` updates to the start of `then`, and follows `then` from there.

    Update s of the warmup (from 0) gets (s + 1) / (steps + 1) of it, so that no update has a rate of zero.

    Args:
        then: the rate, or the schedule, after the warmup; it counts from the end of the warmup.
        steps: number of warmup updates, at least 1.

    Example:
        >>> [round(float(Warmup(0.4, 3)(step)), 3) for step in range(5)]
        [0.1, 0.2, 0.3, 0.4, 0.4]
    """

    def __init__(self, then: Rate, steps: int):
        self.then = then
        self.steps = steps

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        after = keras.ops.maximum(step - self.steps, 0.0)
        rate = self.then(after) if callable(self.then) else self.then
        return rate * keras.ops.minimum((step + 1.0) / (self.steps + 1.0), 1.0)

    def get_config(self):
        then = keras.optimizers.schedules.serialize(self.then) if callable(self.then) else self.then
        return {"then": then, "steps": self.steps}

    @classmethod
    def from_config(cls, config):
        then = config["then"]
        if isinstance(then, Mapping):
            then = keras.optimizers.schedules.deserialize(then)
        return cls(then, config["steps"])


@keras.saving.register_keras_serializable(package="tfgpu")
class PerUpdate(keras.optimizers.schedules.LearningRateSchedule):
    """Advances `then` once every `accumulate` batches, because Keras calls schedules with the number of batches.

    Args:
        then: a schedule over updates.
        accumulate: batches per update.

    Example:
        >>> [round(float(PerUpdate(Warmup(0.3, 2), 2)(batch)), 3) for batch in range(6)]
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    """

    def __init__(self, then: keras.optimizers.schedules.LearningRateSchedule, accumulate: int):
        self.then = then
        self.accumulate = accumulate

    def __call__(self, step):
        return self.then(keras.ops.floor_divide(keras.ops.cast(step, "int64"), self.accumulate))

    def get_config(self):
        return {"then": keras.optimizers.schedules.serialize(self.then), "accumulate": self.accumulate}

    @classmethod
    def from_config(cls, config):
        return cls(keras.optimizers.schedules.deserialize(config["then"]), config["accumulate"])


def build(
    name: str,
    learning_rate: float,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    accumulate: int = 1,
    options: Mapping[str, object] | None = None,
) -> Schedule:
    """Builds a schedule by name.

    Args:
        name: "constant"; "cosine" (half a cosine down; Loshchilov and Hutter, 2016); "exponential" (the same factor at
            every update); "polynomial" (a power of the remaining share of updates); "step" (a factor at each
            milestone); or "plateau" (a factor whenever a metric has stopped improving).
        learning_rate: the peak rate: after the warmup, or from the start.
        total_steps: weight updates in the whole training job, including warmup: epochs * steps_per_epoch / accumulate.
            "constant" and "plateau" check it, but do not depend on it.
        warmup_steps: updates in which the rate rises linearly from learning_rate / (warmup_steps + 1); fewer than
            `total_steps`, and none for "plateau".
        accumulate: batches per update: the optimizer's `gradient_accumulation_steps`.
        options: further settings of the schedule, by name. "cosine": `final` (0.0), and "exponential": `final` (0.01),
            the share of `learning_rate` at `total_steps`. "polynomial": `power` (1.0) and `final` (0.0). "step":
            `milestones` (increasing whole numbers: the first updates, counted from 0 and including warmup, with a new
            rate; required) and `factor` (0.1). "plateau": `monitor` ("val_loss"), `mode`
            ("auto"), `factor` (0.5), `patience` (5 epochs), `min_delta` (1e-4), `cooldown` (0 epochs),
            `min_learning_rate` (0.0).

    Returns:
        A `Schedule`: the learning rate for the optimizer, and callbacks.

    Raises:
        InputError: an unknown name or option, or a number out of range.

    Example:
        >>> schedule = build("cosine", 0.1, total_steps=100)
        >>> round(float(schedule.learning_rate(50)), 3)
        0.05
    """
    if name not in _SCHEDULES:
        raise errors.unknown("schedule", name, _SCHEDULES)
    _check_number("learning_rate", learning_rate, above=0.0)
    whole_number("total_steps", total_steps)
    whole_number("warmup_steps", warmup_steps, minimum=0)
    whole_number("accumulate", accumulate)
    if warmup_steps >= total_steps:
        raise InputError(
            f"`warmup_steps` must be less than the updates of the whole training job. Received: "
            f"warmup_steps={warmup_steps}, total_steps={total_steps}. Shorten the warmup, or train longer."
        )
    options = dict(options or {})
    schedule = _SCHEDULES[name]
    kinds = inspect.signature(schedule).parameters.values()
    allowed = [p.name for p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for option in options:
        if not allowed:
            raise InputError(f"Schedule {name!r} has no options. Received: {option}={options[option]!r}. Remove it.")
        if option not in allowed:
            raise errors.unknown(f"option of schedule {name}", option, allowed)
    built = schedule(float(learning_rate), total_steps, warmup_steps, **options)
    if accumulate > 1 and callable(built.learning_rate):
        return replace(built, learning_rate=PerUpdate(built.learning_rate, accumulate))
    return built


def _warmed(then: Rate, warmup_steps: int) -> Schedule:
    return Schedule(Warmup(then, warmup_steps) if warmup_steps else then)


def _constant(learning_rate: float, total_steps: int, warmup_steps: int) -> Schedule:
    return _warmed(learning_rate, warmup_steps)


def _cosine(learning_rate: float, total_steps: int, warmup_steps: int, *, final: float = 0.0) -> Schedule:
    _check_number("final", final, at_least=0.0, at_most=1.0)
    # Keras starts at the first rate; zero would waste the first update.
    first = learning_rate / (warmup_steps + 1)
    warmup = {"warmup_target": learning_rate, "warmup_steps": warmup_steps} if warmup_steps else {}
    decay_steps = total_steps - warmup_steps
    return Schedule(keras.optimizers.schedules.CosineDecay(first, decay_steps, alpha=float(final), **warmup))


def _exponential(learning_rate: float, total_steps: int, warmup_steps: int, *, final: float = 0.01) -> Schedule:
    _check_number("final", final, above=0.0, at_most=1.0)
    steps = total_steps - warmup_steps
    return _warmed(keras.optimizers.schedules.ExponentialDecay(learning_rate, steps, float(final)), warmup_steps)


def _polynomial(
    learning_rate: float, total_steps: int, warmup_steps: int, *, power: float = 1.0, final: float = 0.0
) -> Schedule:
    _check_number("power", power, above=0.0)
    _check_number("final", final, at_least=0.0, at_most=1.0)
    steps, last = total_steps - warmup_steps, learning_rate * final
    decay = keras.optimizers.schedules.PolynomialDecay(learning_rate, steps, last, float(power))
    return _warmed(decay, warmup_steps)


def _step(
    learning_rate: float, total_steps: int, warmup_steps: int, *, milestones: Sequence[int] = (), factor: float = 0.1
) -> Schedule:
    _check_number("factor", factor, above=0.0, below=1.0)
    listed = list(milestones) if isinstance(milestones, Sequence) and not isinstance(milestones, str) else []
    are_whole = listed and all(map(is_whole, listed))
    if not are_whole or listed != sorted(set(listed)) or not warmup_steps < listed[0] <= listed[-1] < total_steps:
        raise InputError(
            f"Schedule 'step' needs `milestones`: increasing whole numbers of updates, above warmup_steps="
            f"{warmup_steps} and below total_steps={total_steps}. Received: milestones={milestones!r}."
        )
    rates = [learning_rate * factor**passed for passed in range(len(milestones) + 1)]
    # Keras keeps the rate up to and including a boundary.
    bounds = [int(milestone) - warmup_steps - 1 for milestone in milestones]
    return _warmed(keras.optimizers.schedules.PiecewiseConstantDecay(bounds, rates), warmup_steps)


def _plateau(
    learning_rate: float,
    total_steps: int,
    warmup_steps: int,
    *,
    monitor: str = "val_loss",
    mode: str = "auto",
    factor: float = 0.5,
    patience: int = 5,
    min_delta: float = 1e-4,
    cooldown: int = 0,
    min_learning_rate: float = 0.0,
) -> Schedule:
    if warmup_steps:
        raise InputError(
            f"Schedule 'plateau' has no warmup. Received: warmup_steps={warmup_steps}. Remove it, or use 'cosine'."
        )
    if not isinstance(monitor, str) or not monitor:
        raise InputError(f"`monitor` must be a metric's name such as 'val_loss'. Received: monitor={monitor!r}.")
    if mode not in ("auto", "min", "max"):
        raise errors.unknown("mode", mode, ("auto", "min", "max"))
    _check_number("factor", factor, above=0.0, below=1.0)
    whole_number("patience", patience)
    _check_number("min_delta", min_delta, at_least=0.0)
    whole_number("cooldown", cooldown, minimum=0)
    _check_number("min_learning_rate", min_learning_rate, at_least=0.0, below=learning_rate)
    settings = {"mode": mode, "min_delta": min_delta, "cooldown": cooldown, "min_lr": min_learning_rate}
    return Schedule(learning_rate, (keras.callbacks.ReduceLROnPlateau(monitor, factor, patience, **settings),))


_BUILDERS = (_constant, _cosine, _exponential, _plateau, _polynomial, _step)
_SCHEDULES = MappingProxyType({builder.__name__[1:]: builder for builder in _BUILDERS})


_WORDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def _check_number(name: str, value: object, **limits: float) -> None:
    """Checks a number's `limits`, by the names in `_WORDS`."""
    if not is_number(value) or not all(_WORDS[word](value, limit) for word, limit in limits.items()):
        said = " and ".join(f"{word.replace('_', ' ')} {limit:g}" for word, limit in limits.items())
        raise InputError(f"`{name}` must be a number {said}. Received: {name}={value!r}.")

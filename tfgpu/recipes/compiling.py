"""From a recipe's settings to the arguments of `compile`, and to the callbacks that end a run.

The optimizer with its schedule, the loss and the metrics; early stopping, and the average of weights.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras

from tfgpu.callbacks.averages import EvaluateAverages
from tfgpu.errors import InputError, is_number, unknown
from tfgpu.recipes import agreement
from tfgpu.recipes.heads import CLASSES, Head, metric_names
from tfgpu.recipes.recipe import OWN_SETTINGS, Recipe
from tfgpu.training import schedules
from tfgpu.training.optimizers import OPTIMIZERS

# Further names for Keras optimizers with preset options.
NAMED = MappingProxyType({"momentum": ("sgd", MappingProxyType({"momentum": 0.9}))})
BEGINNING = 0.1
"""A moving average with a larger share of the first step's weights has seen too few steps."""


def optimizers() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Returns Keras's and tfgpu's optimizers by lower-case name, without wrappers, which have no learning rate."""
    found = inspect.getmembers(keras.optimizers, inspect.isclass)
    kinds = {
        name.lower(): kind
        for name, kind in found
        if issubclass(kind, keras.optimizers.Optimizer) and "learning_rate" in inspect.signature(kind).parameters
    }
    return kinds | dict(OPTIMIZERS) | {name: kinds[kind] for name, (kind, _) in NAMED.items()}


def check_optimizer(recipe: Recipe) -> type[keras.optimizers.Optimizer]:
    """Finds the optimizer's class and checks its options without creating it.

    Raises:
        InputError: no such optimizer or option, or a value of the wrong type.
    """
    known = optimizers()
    name = recipe.optimizer.lower()
    if name not in known:
        raise unknown("optimizer", recipe.optimizer, known)
    parameters = inspect.signature(known[name]).parameters
    options = [p for p in parameters if p not in ("self", "kwargs", "name", *OWN_SETTINGS)]
    for option, value in recipe.optimizer_options.items():
        if option not in options:
            raise unknown(f"option of optimizer {name}", option, options)
        _check_option(option, value, parameters[option].default)
    return known[name]


def _check_option(name: str, value: Any, default: Any) -> None:
    """Rejects values of another type than the default: Keras accepts them and fails in the first step."""
    if isinstance(default, bool) and not isinstance(value, bool):
        wanted = "true or false"
    elif is_number(default) and not is_number(value):
        wanted = "a number"
    else:
        return
    raise InputError(
        f"`optimizer_options`: {name!r} must be {wanted}, such as {str(default).lower()}. Received: {value!r}."
    )


def schedule(recipe: Recipe, *, steps_per_epoch: int) -> schedules.Schedule:
    """Builds the learning-rate schedule; it counts updates, one per `accumulate` steps.

    Raises:
        InputError: the schedule has no such option, or the numbers contradict each other.
    """
    updates_per_epoch = steps_per_epoch / recipe.accumulate
    total = int(recipe.epochs * updates_per_epoch)
    if total < 1:
        raise InputError(
            f"`accumulate` must be at most the steps of the run, or no update happens. Received: "
            f"accumulate={recipe.accumulate}, epochs={recipe.epochs} of {steps_per_epoch} steps. Use a smaller one."
        )
    warmup = recipe.warmup_epochs
    if warmup is None:
        warmup = min(1.0, recipe.epochs / 4) if recipe.schedule == "cosine" else 0.0
    return schedules.build(
        recipe.schedule,
        recipe.learning_rate,
        total_steps=total,
        warmup_steps=min(round(warmup * updates_per_epoch), total - 1),
        accumulate=recipe.accumulate,
        options=_schedule_options(recipe, updates_per_epoch),
    )


def _schedule_options(recipe: Recipe, updates_per_epoch: float) -> Mapping[str, Any]:
    """Returns the schedule's options, with a recipe's milestones converted from epochs to updates."""
    options = dict(recipe.schedule_options)
    if recipe.schedule != "step":
        return options
    given = options.get("milestones")
    listed = given if isinstance(given, list | tuple) else []
    if (
        not listed
        or not all(map(is_number, listed))
        or sorted(set(listed)) != list(listed)
        or not 0 < listed[0] <= listed[-1] < recipe.epochs
    ):
        raise InputError(
            f"Schedule 'step' needs `milestones`: increasing epochs above 0 and below epochs={recipe.epochs}. "
            f"Received: milestones={given!r}. Add for example --schedule-option milestones=[{recipe.epochs / 2:g}]."
        )
    options["milestones"] = [math.ceil(m * updates_per_epoch) for m in listed]
    return options


def optimizer(recipe: Recipe, *, learning_rate: schedules.Rate) -> keras.optimizers.Optimizer:
    """Creates the optimizer; under the strategy's scope, because it may create variables.

    Raises:
        InputError: Keras rejects the value of an option.
    """
    kind = check_optimizer(recipe)
    _, preset = NAMED.get(recipe.optimizer.lower(), ("", {}))
    settings = {**preset, **recipe.optimizer_options}
    if recipe.weight_decay is not None:
        settings["weight_decay"] = recipe.weight_decay
    if recipe.clip_norm is not None:
        settings["global_clipnorm"] = recipe.clip_norm
    if recipe.accumulate > 1:
        settings["gradient_accumulation_steps"] = recipe.accumulate
    average = agreement.weight_average(recipe)
    if average is not None:
        # Keras updates its averages at every step, `accumulate` times per update.
        settings |= {"use_ema": True, "ema_momentum": average.momentum ** (1 / recipe.accumulate)}
    try:
        return kind(learning_rate=learning_rate, **settings)
    except (TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"Keras's {kind.__name__} rejects the options {settings}: {reason}") from None


def check_monitors(recipe: Recipe, *, heads: Sequence[Head] = CLASSES, has_validation: bool = True) -> None:
    """Rejects monitoring a metric that the run does not report.

    Args:
        recipe: the recipe.
        heads: the model's outputs.
        has_validation: whether there are examples to validate on.

    Raises:
        InputError: names the setting and the metrics.
    """
    losses = [f"{head.name}_loss" for head in heads if len(heads) > 1]
    names = ["loss", *losses, *metric_names(heads)]
    names = [f"{part}{name}" for part in ("val_", "") for name in names]
    stopping = agreement.early_stopping(recipe)
    asked = {"early_stopping": stopping.monitor} if stopping else {}
    if recipe.schedule == "plateau":
        asked["schedule plateau"] = recipe.schedule_options.get("monitor", "val_loss")
    for where, monitor in asked.items():
        if monitor not in names:
            raise unknown(f"monitor of {where}", monitor, names)
        if not has_validation and monitor.startswith("val_"):
            raise InputError(
                f"{where} monitors {monitor}, but nothing is held back for validation. Received: validation="
                f"{recipe.validation:g}. Use --validation 0.1, or another monitor, such as {monitor[4:]}."
            )


def compile_model(
    model: keras.Model, recipe: Recipe, *, learning_rate: schedules.Rate, heads: Sequence[Head] = CLASSES
) -> None:
    """Compiles a model for its outputs: classes, whose logits it returns, and numbers.

    Args:
        model: the model.
        recipe: its optimizer's settings and precision.
        learning_rate: the optimizer's.
        heads: the outputs; several are named.
    """
    made = optimizer(recipe, learning_rate=learning_rate)
    if recipe.decay == "kernels":
        made.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) < 2])
    is_own = heads[0].kind == "own"  # the model computes the loss of all targets
    is_named = bool(heads[0].name) and not is_own
    model.compile(
        optimizer=made,
        loss={head.name: head.loss for head in heads} if is_named else heads[0].loss,
        metrics={head.name: head.metrics for head in heads} if is_named else heads[0].metrics,
        jit_compile=recipe.jit,
    )


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's EarlyStopping, which restores averaged weights if these are validated.

    Args:
        averages: the callback that validates them, or None.

    The other arguments are Keras's.
    """

    def __init__(self, averages: EvaluateAverages | None = None, **settings: Any):
        super().__init__(**settings)
        self._averages = averages

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        before = self.best_weights
        super().on_epoch_end(epoch, logs)
        if self._averages is not None and self.best_weights is not before:
            self.best_weights = self._averages.averaged()


def callbacks(what: Recipe) -> tuple[keras.callbacks.Callback, ...]:
    """Creates the callbacks of a recipe's `weight_average` and `early_stopping`, in their order."""
    stopping = agreement.early_stopping(what)
    averages = EvaluateAverages() if agreement.weight_average(what) is not None else None
    found: list[keras.callbacks.Callback] = [averages] if averages is not None else []
    if stopping is not None:
        found.append(
            EarlyStopping(
                averages,
                monitor=stopping.monitor,
                mode=stopping.direction,
                min_delta=stopping.min_delta,
                patience=what.early_stopping,
                start_from_epoch=stopping.start_epoch - 1,
                restore_best_weights=stopping.restore_best,
            )
        )
    return tuple(found)


def ends_with(made: Sequence[keras.callbacks.Callback]) -> str:
    """Describes a finished run's final weights, by its callbacks."""
    which = "moving averages" if any(isinstance(one, EvaluateAverages) for one in made) else "weights"
    stopping = next((one for one in made if isinstance(one, EarlyStopping)), None)
    if stopping is not None and stopping.restore_best_weights and stopping.best_weights is not None:
        return f"the {which} of the best epoch, {stopping.best_epoch + 1}"
    return f"the {which} of the last epoch"


def about_average(what: Recipe, optimizer: keras.optimizers.Optimizer, *, steps_per_epoch: int) -> str | None:
    """Returns a warning if a moving average will be dominated by the initial weights.

    Keras starts an average with the weights after the first step, and keeps `ema_momentum` of it at each later one.

    Args:
        what: the recipe.
        optimizer: the compiled one.
        steps_per_epoch: of the training.

    Returns:
        A sentence with the share and what to do; None without such an average, or if it has enough steps.

    Example:
        >>> made = keras.optimizers.SGD(use_ema=True, ema_momentum=0.99)
        >>> about_average(Recipe(epochs=20), made, steps_per_epoch=40) is None
        True
        >>> "46.1%" in about_average(Recipe(epochs=2), made, steps_per_epoch=39)  # 0.99 ** 77
        True
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    later = what.epochs * steps_per_epoch - 1
    if not inner.use_ema or inner.ema_overwrite_frequency or later < 1:
        return None
    share = inner.ema_momentum**later
    if share <= BEGINNING:
        return None
    return (
        f"This run ends with a moving average in which the weights of the first step have a share of {share:.1%}. More "
        f"than {BEGINNING:.0%} makes poor weights. Lower the momentum, or train for more epochs."
    )

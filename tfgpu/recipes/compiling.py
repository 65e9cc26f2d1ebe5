"""From a recipe's words to what Keras compiles: the optimizer with its schedule, the loss and the metrics."""

import inspect

import keras

from tfgpu.errors import InputError, unknown
from tfgpu.recipes.recipe import SETTINGS_OF_THEIR_OWN, Recipe
from tfgpu.training import schedules


def optimizers() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Lists the optimizers of the installed Keras by lower-case name; wrappers have no rate of their own."""
    found = inspect.getmembers(keras.optimizers, inspect.isclass)
    return {
        name.lower(): kind
        for name, kind in found
        if issubclass(kind, keras.optimizers.Optimizer) and "learning_rate" in inspect.signature(kind).parameters
    }


def check_optimizer(recipe: Recipe) -> type[keras.optimizers.Optimizer]:
    """Finds the optimizer's class and checks the names of its options, without making one.

    Raises:
        InputError: no such optimizer, or it has no such option.
    """
    known = optimizers()
    name = recipe.optimizer.lower()
    if name not in known:
        raise unknown("optimizer", recipe.optimizer, known)
    parameters = inspect.signature(known[name]).parameters
    options = [p for p in parameters if p not in ("self", "kwargs", "name", *SETTINGS_OF_THEIR_OWN)]
    for option in recipe.optimizer_options:
        if option not in options:
            raise unknown(f"option of optimizer {name}", option, options)
    return known[name]


def schedule(recipe: Recipe, *, steps_per_epoch: int) -> schedules.Schedule:
    """Builds the learning rate's course; it counts updates, of which there is one in `accumulate` steps.

    Raises:
        InputError: the schedule has no such option, or the numbers do not go together.
    """
    updates_per_epoch = steps_per_epoch / recipe.accumulate
    total = int(recipe.epochs * updates_per_epoch)
    if total < 1:
        raise InputError(
            f"`accumulate` must be at most the steps of the run, or nothing is ever learned. Received: "
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
        options=recipe.schedule_options,
    )


def optimizer(recipe: Recipe, *, learning_rate: schedules.Rate) -> keras.optimizers.Optimizer:
    """Makes the optimizer; under a strategy's scope, because it may make variables.

    Raises:
        InputError: Keras refuses a value of its options.
    """
    kind = check_optimizer(recipe)
    settings = dict(recipe.optimizer_options)
    if recipe.weight_decay is not None:
        settings["weight_decay"] = recipe.weight_decay
    if recipe.clip_norm is not None:
        settings["global_clipnorm"] = recipe.clip_norm
    if recipe.accumulate > 1:
        settings["gradient_accumulation_steps"] = recipe.accumulate
    try:
        return kind(learning_rate=learning_rate, **settings)
    except (TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"Keras's {kind.__name__} refuses its options {settings}: {reason}") from None


def compile_model(model: keras.Model, recipe: Recipe, *, learning_rate: schedules.Rate, labels: str = "class") -> None:
    """Compiles a classifier whose outputs are logits.

    Args:
        model: the classifier.
        recipe: its optimizer's settings and precision.
        learning_rate: the optimizer's.
        labels: as `data.info.labels` says: `"class"` numbers, or `"one_hot"` shares where examples are mixed.
    """
    kinds = {
        "class": keras.losses.SparseCategoricalCrossentropy,
        "one_hot": keras.losses.CategoricalCrossentropy,
    }
    model.compile(
        optimizer=optimizer(recipe, learning_rate=learning_rate),
        loss=kinds[labels](from_logits=True),
        metrics=["accuracy"],
        jit_compile=recipe.jit,
    )

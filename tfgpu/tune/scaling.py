"""Scales a recipe's learning rate and warm-up to another batch size, without TensorFlow.

Rules of thumb: linear scaling for SGD (Goyal et al., 2017, arXiv:1706.02677), square root scaling for Adam and similar
optimizers (Krizhevsky, 2014, arXiv:1404.5997; Malladi et al., 2022, arXiv:2205.10330, who also scale the betas and
epsilon, which is not done here). Both hold for small steps, and fail for batches that are a large part of the data.
"""

from typing import Any

from tfgpu.errors import InputError, unknown
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.recipe import Recipe

RULES = ("auto", "linear", "sqrt", "none")
_LINEAR = ("sgd", "momentum", "lars")
_WARMUP_EPOCHS = 5.0


def rule_of(optimizer: str) -> str:
    """The rule for an optimizer: "linear" for SGD, momentum and LARS; "sqrt" for adaptive optimizers.

    Example:
        >>> rule_of("momentum"), rule_of("adamw")
        ('linear', 'sqrt')
    """
    return "linear" if optimizer.lower() in _LINEAR else "sqrt"


def settings(recipe: Recipe, batch: int, *, scale: str = "auto") -> dict[str, Any]:
    """The settings of a recipe that change with its batch.

    Args:
        recipe: the recipe, with a good learning rate for its own batch.
        batch: the new global batch.
        scale: how the learning rate scales: "linear", "sqrt", "none", or "auto" (by the optimizer).

    Returns:
        `global_batch` and `learning_rate` (three digits), and `warmup_epochs` if the rate rises and more warm-up
        helps: 5 epochs (Goyal et al.), at most a quarter of all epochs or half the way to the first milestone.

    Example:
        >>> settings(Recipe(optimizer="momentum", learning_rate=0.1, global_batch=256, epochs=90), 1024)
        {'global_batch': 1024, 'learning_rate': 0.4, 'warmup_epochs': 5.0}
        >>> settings(Recipe(optimizer="adam", learning_rate=0.001, global_batch=256), 64)
        {'global_batch': 64, 'learning_rate': 0.0005}
    """
    check_scale(scale)
    rule = rule_of(recipe.optimizer) if scale == "auto" else scale
    times = (batch / recipe.global_batch) ** {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    rate = recipe.learning_rate if times == 1 else float(rate_text(recipe.learning_rate * times))
    found: dict[str, Any] = {"global_batch": batch, "learning_rate": rate}
    warmup = _warmup(recipe)
    if times > 1 and warmup is not None:
        found["warmup_epochs"] = warmup
    return found


def rate_text(rate: float) -> str:
    """Formats a learning rate with three significant digits.

    Example:
        >>> rate_text(0.00123456), rate_text(1.23456e-5), rate_text(0.1)
        ('0.00123', '1.23e-05', '0.1')
    """
    return f"{rate:.3g}"


def with_settings(recipe: Recipe, found: dict[str, Any]) -> Recipe:
    """Returns the validated recipe with these settings.

    Raises:
        InputError: they are incompatible with the recipe's other settings.
    """
    return recipes.make({**recipe.model_dump(mode="json"), **found})


def check_scale(scale: str) -> None:
    """Raises `InputError` unless it is the name of a rule."""
    if not isinstance(scale, str) or scale not in RULES:
        raise unknown("scale", scale, RULES)


def _warmup(recipe: Recipe) -> float | None:
    """Warm-up epochs for a raised learning rate; None if the recipe's own suffice, or its schedule has no warm-up."""
    if recipe.schedule == "plateau":
        return None
    own = recipe.warmup_epochs
    if own is None:
        own = min(1.0, recipe.epochs / 4) if recipe.schedule == "cosine" else 0.0
    wanted = min(_WARMUP_EPOCHS, recipe.epochs / 4)
    milestones = recipe.schedule_options.get("milestones")
    if recipe.schedule == "step" and milestones:
        try:
            wanted = min(wanted, min(milestones) / 2)
        except TypeError as error:
            raise InputError(f"`milestones` must be epochs. Received: {milestones!r}.") from error
    return wanted if wanted > own else None

"""What a Keras optimizer holds."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import BaseOptimizer, MultiOptimizer


def trained(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that a built optimizer trains, in the order of its slots."""
    return optimizer._trainable_variables


def iterations(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The counter of an optimizer's steps; with gradient accumulation, of batches."""
    return optimizer._iterations


def learning_rate(optimizer: keras.optimizers.Optimizer) -> object:
    """The variable or the schedule of an optimizer's learning rate."""
    return optimizer._learning_rate


def averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The moving averages of the trained variables (`use_ema=True`), in their order."""
    return optimizer._model_variables_moving_average


def accumulator(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> keras.Variable:
    """The sum of a variable's gradients since the last update (`gradient_accumulation_steps`)."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def accumulators(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    """The sums of gradients since the last update, of the variables that have one; empty without accumulation."""
    return [total for total in getattr(optimizer, "_accumulated_gradients", None) or [] if total is not None]


def index(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """Which of the trained variables one is."""
    return optimizer._get_variable_index(variable)


def key(optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable) -> str:
    """By what an optimizer knows a variable, or a replica's copy of it."""
    return optimizer._var_key(variable)


def knows(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether an optimizer was built for a variable as it is now: not if its TensorFlow variable was made again."""
    return optimizer._var_key(variable) in optimizer._trainable_variables_indices


def overwrites(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether a variable's gradient is its next value (the scales of float8), not a direction."""
    return optimizer._overwrite_variable_with_gradient(variable)


def uses_weight_decay(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Whether weight decay applies to a variable: `exclude_from_weight_decay` has not excluded it."""
    return optimizer._use_weight_decay(variable)


def strategy_of(optimizer: keras.optimizers.Optimizer) -> tf.distribute.Strategy:
    """The strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def set_strategy(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Assigns an optimizer to a strategy, as if it were made in its scope."""
    optimizer._distribution_strategy = strategy


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """An optimizer's variables, without those of an optimizer within it."""
    return list(optimizer._variables)


def lists_variables(attribute: str) -> bool:
    """Whether an optimizer's attribute lists its variables, or those that it trains, rather than slots."""
    return attribute in ("_variables", "_trainable_variables")


def track(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
    """Makes a variable one of an optimizer's, as `add_variable` does."""
    optimizer._track_variable(variable)


def untrack(optimizer: keras.optimizers.Optimizer, is_unwanted: Callable[[keras.Variable], bool]) -> None:
    """Removes from an optimizer's variables some that it has tracked, as it does with all in its attributes."""
    for variable in list(optimizer._variables):
        if is_unwanted(variable):
            optimizer._tracker.untrack(variable)


def show_to_checkpoints(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    """Makes `tf.train.Checkpoint` find these variables where it looks for those that the optimizer trains."""
    tracked = tf.__internal__.tracking.wrap(list(variables))
    optimizer._track_trackable(tracked, "_trainable_variables", overwrite=True)


def apply_without_overflow_check(optimizer: keras.optimizers.Optimizer, grads: list, variables: list | None):
    """`apply` of an optimizer that scales its loss, without the check for overflow."""
    return optimizer._common_apply(grads, variables)


def plain_method(name: str) -> Callable:
    """A private method of Keras's own optimizer, without what TensorFlow's backend adds for strategies.

    Args:
        name: without the underscore.
    """
    return getattr(BaseOptimizer, f"_{name}")


class WeightDecayHook:
    """A base class before Keras's: an optimizer's weight decay goes through `decay_variables(variables, stock)`."""

    def _apply_weight_decay(self, variables):
        self.decay_variables(variables, super()._apply_weight_decay)


def copy_decay_exclusions(
    old: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer, pairs: list[tuple[keras.Variable, keras.Variable]]
) -> None:
    """Excludes from weight decay in `new` what `exclude_from_weight_decay` excluded in `old`.

    Args:
        pairs: each variable of `old` with its counterpart in `new`.
    """
    excluded = getattr(old, "_exclude_from_weight_decay", None)
    if excluded is None:
        return
    new._exclude_from_weight_decay = set(excluded)
    new._exclude_from_weight_decay_pattern = old._exclude_from_weight_decay_pattern
    for before, after in pairs:
        if old._var_key(before) in excluded:
            new._exclude_from_weight_decay.add(new._var_key(after))


def uses_adamw(optimizer: keras.optimizers.Muon, variable: keras.Variable) -> bool:
    """Whether Muon updates a variable as AdamW does, number by number: all but matrices, and what is excluded."""
    return optimizer._should_use_adamw(variable)


def within(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers to which a `MultiOptimizer` deals variables; any other one itself."""
    return list(optimizer.optimizers) if isinstance(optimizer, MultiOptimizer) else [optimizer]


def choosing(optimizer: MultiOptimizer, choose: Callable) -> AbstractContextManager[None]:
    """Inside the block, a `MultiOptimizer` asks `choose(variable)` for the optimizer of a variable."""
    return slots.replaced(optimizer, _optimizer_map=choose)


def choice_of(optimizer: MultiOptimizer, variable: keras.Variable) -> keras.optimizers.Optimizer:
    """The optimizer that a `MultiOptimizer` gives a variable; a function of the user's may make a new one per call."""
    return optimizer._optimizer_map(variable)


def handling(
    optimizer: keras.optimizers.Optimizer, is_wanted: Callable[[keras.Variable], bool]
) -> AbstractContextManager[None]:
    """Inside the block, a built optimizer updates and averages only some of its variables."""
    wanted = list(map(is_wanted, optimizer._trainable_variables))

    def kept(found: list) -> list:
        return [each for each, want in zip(found, wanted, strict=True) if want]

    changed = {"_trainable_variables": kept(optimizer._trainable_variables)}
    if optimizer.use_ema:
        changed["_model_variables_moving_average"] = kept(optimizer._model_variables_moving_average)
    if optimizer.gradient_accumulation_steps:
        sums = zip(optimizer._accumulated_gradients, wanted, strict=True)
        changed["_accumulated_gradients"] = [total if want else None for total, want in sums]
    if isinstance(optimizer, MultiOptimizer):
        known = {optimizer._var_key(each) for each in changed["_trainable_variables"]}
        indices = optimizer._trainable_variables_indices
        changed["_trainable_variables_indices"] = {key: at for key, at in indices.items() if key in known}
    return slots.replaced(optimizer, **changed)

"""Parameter groups: optimizers with a learning rate per group of variables, and moving state between optimizers.

Keras calls `update_step(gradient, variable, learning_rate)` for each variable, so a subclass of any optimizer can pass
on another rate. Scaling the gradients would not work: Adam divides by their magnitude. Clipping, accumulation, loss
scaling and averages happen outside `update_step` and are unaffected; Keras multiplies weight decay by the rate.
"""

import functools
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tfgpu.compat import optimizers
from tfgpu.compat.keras import LossScaleOptimizer, MultiOptimizer
from tfgpu.core import step_context
from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError


@functools.cache
def extended(kind: type, mixin: type, *, prefix: str, saved_as: str) -> type:
    """A subclass of an optimizer's class, the same for the same arguments.

    Args:
        kind: the class of the optimizer, which the attribute `kind` gives.
        mixin: what is added; its methods come first.
        prefix: the class's name is this and that of `kind`.
        saved_as: the name in saved files, in the package `tfgpu`.
    """
    made = type(f"{prefix}{kind.__name__}", (mixin, kind), {"kind": kind, "__module__": mixin.__module__})
    return keras.saving.register_keras_serializable("tfgpu", saved_as)(made)


_decaying = step_context.Slot("parameter_groups.decaying")  # the factor of the group whose weights decay


class ParameterGroups(optimizers.WeightDecayHook):
    """Multiplies an optimizer's learning rate by a factor, for the variables whose paths are in `factors`.

    A model that is loaded or cloned may have other paths: `saved_factors` holds the factors of the variables that the
    optimizer in the configuration was built on, in order.
    """

    factors: Mapping[str, float] = {}
    saved_factors: Sequence = ()
    kind: type

    def build(self, variables):
        super().build(variables)
        paths, saved = [sharded_variable.full_variable(v).path for v in variables], dict(self.saved_factors)
        if saved and len(saved) == len(paths):
            self.factors = {**self.factors, **dict(zip(paths, saved.values(), strict=True))}
        elif saved and not saved.keys() >= set(paths):
            raise InputError(
                f"The optimizer has learning rates for {len(saved)} weights, but is built on {len(paths)} others. "
                "Create it with `incremental.discriminative` for this model."
            )
        self._factor_at = tuple(float(self.factors.get(path, 1.0)) for path in paths)
        self._paths = tuple(paths)

    def factor_of(self, variable) -> float:
        """What the learning rate of a variable is multiplied by."""
        return self._factor_at[optimizers.index(self, variable)]

    @property
    def learning_rate(self):
        rate, factor = super().learning_rate, _decaying.get()
        return rate if factor in (None, 1.0) else rate * factor

    @learning_rate.setter
    def learning_rate(self, value):
        super(ParameterGroups, type(self)).learning_rate.fset(self, value)

    def update_step(self, gradient, variable, learning_rate):
        factor = self.factor_of(variable)
        super().update_step(gradient, variable, learning_rate if factor == 1.0 else learning_rate * factor)

    def decay_variables(self, variables, stock):
        groups: dict[float, list] = {}
        for variable in variables:
            groups.setdefault(self.factor_of(variable), []).append(variable)
        for factor, group in groups.items():
            with _decaying.set_to(factor):
                stock(group)

    def get_config(self):
        plain = plain_class(self.kind)
        saved = list(self.saved_factors)
        if self.built:
            saved = list(map(list, zip(self._paths, self._factor_at, strict=True)))
        return super().get_config() | {"factors": dict(self.factors), "saved_factors": saved, "kind": plain}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        factors, saved, plain = config.pop("factors"), config.pop("saved_factors"), dict(config.pop("kind"))
        stock = keras.saving.deserialize_keras_object({**plain, "config": config}, custom_objects=custom_objects)
        made = _with_factors(type(stock), config, factors)
        made.saved_factors = [(path, factor) for path, factor in saved]
        return made


def plain_class(kind: type) -> dict:
    """How Keras's files name a class."""
    if kind.__module__.startswith("keras."):
        return {"class_name": kind.__name__, "module": "keras.optimizers", "registered_name": None}
    name = keras.saving.get_registered_name(kind)
    return {"class_name": kind.__name__, "module": kind.__module__, "registered_name": name}


keras.saving.register_keras_serializable("tfgpu", "Discriminative")(
    type("Discriminative", (ParameterGroups, keras.optimizers.Optimizer), {"__module__": __name__})
)  # the class that files name; `from_config` makes the right subclass


def _with_factors(kind: type, config: dict, factors: Mapping[str, float]):
    cls = extended(kind, ParameterGroups, prefix="Discriminative", saved_as="Discriminative")
    made = kind.from_config.__func__(cls, dict(config))
    made.factors = dict(factors)
    return made


def _config_without(optimizer, *names: str) -> dict:
    return {name: value for name, value in optimizer.get_config().items() if name not in names}


def _regrouped(optimizer: ParameterGroups, factors: Mapping[str, float]):
    return _with_factors(optimizer.kind, _config_without(optimizer, "factors", "saved_factors", "kind"), factors)


def unbuilt_copy(optimizer):
    """A copy of an optimizer that is not built; it can be built on any of the variables that its factors are for."""
    if isinstance(optimizer, LossScaleOptimizer):
        options = _config_without(optimizer, "inner_optimizer")
        return LossScaleOptimizer(unbuilt_copy(optimizer.inner_optimizer), **options)
    if isinstance(optimizer, ParameterGroups):
        return _regrouped(optimizer, optimizer.factors)
    return type(optimizer).from_config(optimizer.get_config())


def with_factors(optimizer, factors: Mapping[str, float]):
    """Makes an optimizer like `optimizer`, with other learning rates for some variables; copies its state.

    Args:
        optimizer: a Keras optimizer; it is not changed.
        factors: what the learning rate is multiplied by, by the variables' paths.

    Raises:
        InputError: it already distributes the variables over several optimizers.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        inner = with_factors(optimizer.inner_optimizer, factors)
        made = LossScaleOptimizer(inner, **_config_without(optimizer, "inner_optimizer"))
    elif isinstance(optimizer, MultiOptimizer):
        raise InputError(
            "A MultiOptimizer has an optimizer for each group of weights: set the learning rate of each of them."
        )
    elif isinstance(optimizer, ParameterGroups):
        made = _regrouped(optimizer, factors)
    else:
        made = _with_factors(type(optimizer), optimizer.get_config(), factors)
    if trained := built_like(optimizer, made):
        made.build(trained)
        copy_state(optimizer, made)
    return made


def inner_of(optimizer):
    """The optimizer inside a `LossScaleOptimizer`, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def schedule_of(optimizer):
    """The schedule or function that sets an optimizer's learning rate; None if the rate is a variable."""
    rate = optimizers.learning_rate(inner_of(optimizer))
    return None if isinstance(rate, keras.Variable) else rate


def built_on(optimizer) -> list:
    """The variables that an optimizer has slots for; empty if it is not built."""
    return list(optimizers.trained(inner_of(optimizer))) if optimizer.built else []


def built_like(old, new) -> list:
    """Gives `new`, which is not built yet, the weight decay of `old`; returns the variables of `old`."""
    trained = built_on(old)
    copy_exclusions(old, new, list(zip(trained, trained, strict=True)))
    return trained


def copy_exclusions(old, new, pairs: Sequence[tuple]) -> None:
    """Excludes from weight decay in `new` what is excluded in `old`: Keras does not keep it in the configuration.

    Args:
        old: an optimizer.
        new: one that is not built yet.
        pairs: each variable of `old` with the one that takes its place in `new`.
    """
    optimizers.copy_decay_exclusions(inner_of(old), inner_of(new), list(pairs))


def copy_state(old, new) -> None:
    """Copies the state of an optimizer to another of its kind, built on as many variables in the same order.

    If a variable has grown, the new part of its slots keeps its initial value; the new part of its moving average is
    the weight itself.
    """
    old_and_new = zip(*(sharded_variable.merged(each.variables) for each in (old, new)), strict=True)
    for before, after in old_and_new:
        after.assign(grown(before.numpy(), after.numpy()))
    inner = inner_of(new)
    if inner.use_ema:
        ends = zip(optimizers.trained(inner_of(old)), optimizers.trained(inner), strict=True)
        averages = optimizers.averages(inner)
        for (before, after), average in zip(ends, averages, strict=True):
            if average is not None and tuple(before.shape) != tuple(after.shape):
                known = tuple(slice(0, size) for size in before.shape)
                average.assign(grown(average.numpy()[known], after.numpy()))


def copy_common_state(old, new) -> None:
    """Copies the slots of the variables that both optimizers train, and what is not a slot.

    Both are of one kind. What is not a slot: iterations, learning rate, loss scale.
    """
    slots_old, rest_old = slots_by_variable(old)
    slots_new, rest_new = slots_by_variable(new)
    for key, slots in slots_new.items():
        for before, after in zip(slots_old.get(key, ()), slots, strict=key in slots_old):
            after.assign(before.numpy())
    for before, after in zip(rest_old, rest_new, strict=True):
        if tuple(before.shape) == tuple(after.shape):
            after.assign(before.numpy())


def slots_by_variable(optimizer) -> tuple[dict, list]:
    """The slots by the id of their variable, in order, and the variables that are not slots.

    `optimizer.variables` does not tell which slot belongs to which variable: some optimizers create slots list by list,
    some in pairs. The optimizer's own lists do.
    """
    inner = inner_of(optimizer)
    trained = list(optimizers.trained(inner))
    slots: dict[int, list] = {id(v): [] for v in trained}
    taken = set()
    for name, value in sorted(vars(inner).items()):
        items = list(value) if isinstance(value, (list, tuple)) else []
        is_slots = not optimizers.lists_variables(name) and len(items) == len(trained)
        if is_slots and all(item is None or isinstance(item, keras.Variable) for item in items):
            for variable, item in zip(trained, items, strict=True):
                if item is not None and id(item) not in taken:
                    taken.add(id(item))
                    slots[id(variable)].append(item)
    return slots, [v for v in optimizer.variables if id(v) not in taken]


def grown(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """`after` with `before` in its corner; both have the same number of axes."""
    made = np.array(after)
    made[tuple(slice(0, size) for size in before.shape)] = before
    return made

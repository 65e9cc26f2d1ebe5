"""Optimizers with a learning rate of its own for some variables, and their state in another optimizer.

Keras calls `update_step(gradient, variable, learning_rate)` for each variable, so a subclass of any optimizer can hand
on another rate. Scaling gradients would not do: Adam divides by their size. Clipping, accumulation, float16's scale and
averages stand outside of it, and stay what they are; weight decay is multiplied by the rate in Keras.
"""

import contextvars
import functools
from collections.abc import Mapping, Sequence

import keras
import numpy as np
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.multi_optimizer import MultiOptimizer

from tfgpu.errors import InputError
from tfgpu.parallel import sharded_variable
from tfgpu.parallel.zero import sharding

_decaying = contextvars.ContextVar("decaying", default=1.0)


class Rates:
    """Multiplies an optimizer's learning rate by a factor, for the variables whose paths are in `factors`.

    A model that is loaded or cloned may have other paths: `saved_factors` are those of the variables that the optimizer
    in the configuration was built on, in order.
    """

    factors: Mapping[str, float] = {}
    saved_factors: Sequence = ()
    kind: type

    def build(self, variables):
        super().build(variables)
        paths, saved = [sharding.full_variable(v).path for v in variables], dict(self.saved_factors)
        if saved and len(saved) == len(paths):
            self.factors = {**self.factors, **dict(zip(paths, saved.values(), strict=True))}
        elif saved and not saved.keys() >= set(paths):
            raise InputError(
                f"The optimizer has learning rates for {len(saved)} weights, and is built on {len(paths)} others. "
                "Make it with `incremental.discriminative` for this model."
            )
        self._factor_at = tuple(float(self.factors.get(path, 1.0)) for path in paths)
        self._paths = tuple(paths)

    def factor_of(self, variable) -> float:
        """What the learning rate of a variable is multiplied by."""
        return self._factor_at[self._get_variable_index(variable)]

    @property
    def learning_rate(self):
        rate = super().learning_rate
        factor = _decaying.get()
        return rate if factor == 1.0 else rate * factor

    @learning_rate.setter
    def learning_rate(self, value):
        super(Rates, type(self)).learning_rate.fset(self, value)

    def update_step(self, gradient, variable, learning_rate):
        factor = self.factor_of(variable)
        super().update_step(gradient, variable, learning_rate if factor == 1.0 else learning_rate * factor)

    def _apply_weight_decay(self, variables):
        groups: dict[float, list] = {}
        for variable in variables:
            groups.setdefault(self.factor_of(variable), []).append(variable)
        for factor, group in groups.items():
            before = _decaying.set(factor)
            try:
                super()._apply_weight_decay(group)
            finally:
                _decaying.reset(before)

    def get_config(self):
        plain = {"class_name": self.kind.__name__, "module": self.kind.__module__}
        plain["registered_name"] = keras.saving.get_registered_name(self.kind)
        if self.kind.__module__.startswith("keras."):
            plain = {"class_name": self.kind.__name__, "module": "keras.optimizers", "registered_name": None}
        saved = (
            list(map(list, zip(self._paths, self._factor_at, strict=True))) if self.built else list(self.saved_factors)
        )
        return super().get_config() | {"factors": dict(self.factors), "saved_factors": saved, "kind": plain}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        factors, saved, plain = config.pop("factors"), config.pop("saved_factors"), dict(config.pop("kind"))
        stock = keras.saving.deserialize_keras_object({**plain, "config": config}, custom_objects=custom_objects)
        made = _with_factors(type(stock), config, factors)
        made.saved_factors = [(path, factor) for path, factor in saved]
        return made


keras.saving.register_keras_serializable("tfgpu", "Discriminative")(
    type("Discriminative", (Rates, keras.optimizers.Optimizer), {"__module__": __name__})
)  # what a file is read by; `from_config` makes the class that it names


@functools.cache
def _class_of(kind: type) -> type:
    made = type(f"Discriminative{kind.__name__}", (Rates, kind), {"kind": kind, "__module__": __name__})
    return keras.saving.register_keras_serializable("tfgpu", "Discriminative")(made)


def _with_factors(kind: type, config: dict, factors: Mapping[str, float]):
    made = kind.from_config.__func__(_class_of(kind), dict(config))
    made.factors = dict(factors)
    return made


def _stock_config(optimizer) -> dict:
    own = ("factors", "saved_factors", "kind")
    return {name: value for name, value in optimizer.get_config().items() if name not in own}


def anew(optimizer):
    """The same optimizer, not built; to be built on any of the variables that its factors are for."""
    if isinstance(optimizer, LossScaleOptimizer):
        options = {name: value for name, value in optimizer.get_config().items() if name != "inner_optimizer"}
        return LossScaleOptimizer(anew(optimizer.inner_optimizer), **options)
    if isinstance(optimizer, Rates):
        return _with_factors(optimizer.kind, _stock_config(optimizer), optimizer.factors)
    return type(optimizer).from_config(optimizer.get_config())


def with_factors(optimizer, factors: Mapping[str, float]):
    """An optimizer that does what `optimizer` does, with rates of its own for some variables; its state goes along.

    Args:
        optimizer: a Keras optimizer, which is left as it is.
        factors: what the learning rate is multiplied by, by the variables' paths.

    Raises:
        InputError: it deals the variables to several optimizers already.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        inner = with_factors(optimizer.inner_optimizer, factors)
        options = {name: value for name, value in optimizer.get_config().items() if name != "inner_optimizer"}
        made = LossScaleOptimizer(inner, **options)
    elif isinstance(optimizer, MultiOptimizer):
        raise InputError(
            "A MultiOptimizer has an optimizer for each group of weights: give each a learning rate of its own."
        )
    elif isinstance(optimizer, Rates):
        made = _with_factors(optimizer.kind, _stock_config(optimizer), factors)
    else:
        made = _with_factors(type(optimizer), optimizer.get_config(), factors)
    trained = built_on(optimizer)
    keep_exclusions(optimizer, made, list(zip(trained, trained, strict=True)))
    if trained:
        made.build(trained)
        carry(optimizer, made)
    return made


def inner_of(optimizer):
    """The optimizer within a `LossScaleOptimizer`; any other itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def schedule_of(optimizer):
    """The schedule, or the function, that an optimizer takes its rate from; None where that is a variable."""
    rate = inner_of(optimizer)._learning_rate
    return None if isinstance(rate, keras.Variable) else rate


def built_on(optimizer) -> list:
    """The variables that an optimizer has slots for; empty where it has none yet."""
    return list(inner_of(optimizer)._trainable_variables) if optimizer.built else []


def keep_exclusions(old, new, pairs: Sequence[tuple]) -> None:
    """Leaves out of weight decay what another optimizer leaves out: Keras does not say it in the configuration.

    Args:
        old: an optimizer.
        new: one that is not built yet.
        pairs: variables of the old one, each with the one that stands for it in the new one.
    """
    old, new = inner_of(old), inner_of(new)
    if not hasattr(old, "_exclude_from_weight_decay"):
        return
    new._exclude_from_weight_decay = set(old._exclude_from_weight_decay)
    new._exclude_from_weight_decay_pattern = old._exclude_from_weight_decay_pattern
    for before, after in pairs:
        if old._var_key(before) in old._exclude_from_weight_decay:
            new._exclude_from_weight_decay.add(new._var_key(after))


def carry(old, new) -> None:
    """Gives a built optimizer the state of another of its kind, built on as many variables in the same order.

    Where a variable has grown, what is new of a slot stays as the optimizer begins it; of a moving average, it is the
    weight itself.
    """
    for before, after in zip(_whole(old), _whole(new), strict=True):
        after.assign(grown(before.numpy(), after.numpy()))
    inner = inner_of(new)
    if inner.use_ema:
        ends = zip(inner_of(old)._trainable_variables, inner._trainable_variables, strict=True)
        averages = inner._model_variables_moving_average
        for (before, after), average in zip(ends, averages, strict=True):
            if average is not None and tuple(before.shape) != tuple(after.shape):
                known = tuple(slice(0, size) for size in before.shape)
                average.assign(grown(average.numpy()[known], after.numpy()))


def carry_known(old, new) -> None:
    """The same where the new optimizer has other variables: what both have slots for goes along, by variable.

    Both are of one kind. What is not a slot (iterations, rate, loss scale) goes along too.
    """
    slots_old, rest_old = _slots(old)
    slots_new, rest_new = _slots(new)
    for key, slots in slots_new.items():
        for before, after in zip(slots_old.get(key, ()), slots, strict=key in slots_old):
            after.assign(before.numpy())
    for before, after in zip(rest_old, rest_new, strict=True):
        if tuple(before.shape) == tuple(after.shape):
            after.assign(before.numpy())


def _slots(optimizer) -> tuple[dict, list]:
    """The slots by the id of their variable, in order, and what belongs to none.

    Keras keeps one list of slots after the other, and in some optimizers pairs: which slot is whose shows where they
    are made, so a slot is found by asking for each of the optimizer's lists.
    """
    inner = inner_of(optimizer)
    trained = list(inner._trainable_variables)
    slots: dict[int, list] = {id(v): [] for v in trained}
    taken = set()
    for name, value in sorted(vars(inner).items()):
        items = list(value) if isinstance(value, (list, tuple)) else []
        is_slots = name not in ("_variables", "_trainable_variables") and len(items) == len(trained)
        if is_slots and all(item is None or isinstance(item, keras.Variable) for item in items):
            for variable, item in zip(trained, items, strict=True):
                if item is not None and id(item) not in taken:
                    taken.add(id(item))
                    slots[id(variable)].append(item)
    return slots, [v for v in optimizer.variables if id(v) not in taken]


def _whole(optimizer) -> Sequence:
    return sharded_variable.merged(optimizer.variables)


def grown(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """`after` with `before` in its corner; both have as many axes."""
    made = np.array(after)
    made[tuple(slice(0, size) for size in before.shape)] = before
    return made

"""How often a strategy's replicas are compared, and what becomes of a difference."""

from dataclasses import dataclass

import tensorflow as tf

from tfgpu import repairs
from tfgpu.compat import slots
from tfgpu.errors import InputError, unknown, whole_number

ON_DIFFERENCE = ("stop", "chief")


@dataclass(frozen=True)
class Checks:
    """When replicas are compared.

    Attributes:
        every: steps between two comparisons; None chooses, 0 never compares.
        goes_on: a difference is mended from the chief's weights, and training goes on.
    """

    every: int | None = None
    goes_on: bool = False


def check(check_replicas: str | int, on_difference: str) -> Checks:
    """Reads the strategy's two options.

    Raises:
        InputError: an unknown value, or one that needs the repairs.

    Example:
        >>> check("auto", "stop"), check(1, "chief")
        (Checks(every=None, goes_on=False), Checks(every=1, goes_on=True))
    """
    if on_difference not in ON_DIFFERENCE:
        raise unknown("on_difference", on_difference, ON_DIFFERENCE)
    if isinstance(check_replicas, str):
        if check_replicas not in ("auto", "off"):
            raise InputError(
                f'`check_replicas` must be "auto", "off" or a number of steps. Received: {check_replicas!r}.'
            )
        every = None if check_replicas == "auto" else 0
    else:
        every = whole_number("check_replicas", check_replicas)
    goes_on = on_difference == "chief"
    if every == 0 and goes_on:
        raise InputError("on_difference='chief' needs comparisons. Remove check_replicas='off'.")
    if not repairs.is_enabled() and (every or goes_on):
        raise InputError("`check_replicas` needs the Keras repairs, which TFGPU_REPAIR=0 switches off. Unset it.")
    return Checks(every, goes_on)


def choose(strategy: tf.distribute.Strategy, checks: Checks) -> tf.distribute.Strategy:
    """Sets how the replicas of a strategy are compared in `fit`; returns the strategy."""
    slots.of(strategy).replica_checks = checks
    return strategy


def of(strategy: tf.distribute.Strategy | None) -> Checks | None:
    """What `choose` has set for a strategy, or None."""
    return None if strategy is None else slots.get(strategy, "replica_checks")

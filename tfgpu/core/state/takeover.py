"""Optimizers and metrics that were made outside the scope of a model's strategy become the strategy's.

`parallel.pipeline` and its like make a strategy that no script sees, and a notebook's cell or a callback calls
`compile` without a scope. The objects stay the same ones: their variables get a copy on each replica, with the values
that they have, so a rate that the script sets later counts.
"""

import logging
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from tfgpu.compat import optimizers, variables
from tfgpu.core import replication
from tfgpu.core.state.sharded_variable import shard_of
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)


def take_over(model: keras.Model, strategy: tf.distribute.Strategy, given: Iterable = ()) -> None:
    """Makes the optimizers and metrics of a model its strategy's.

    Args:
        model: its attributes, and lists and dictionaries in them, are looked through.
        strategy: of replicas or of one device, in whose scope the model was made; else nothing is done.
        given: more metrics and optimizers, such as the arguments of `compile`.

    Raises:
        InputError: an optimizer outside the scope has trained already.
    """
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        for each in _held([*vars(model).values(), *given]):
            if isinstance(each, keras.Optimizer):
                optimizers.set_strategy(each, strategy)  # its variables may stay where they are
        return
    if not replication.is_replicated(strategy):
        return
    for each in _held([*vars(model).values(), *model.metrics, *given]):
        if isinstance(each, keras.Optimizer):
            _take_optimizer(each, model, strategy)
        else:
            _remake(each.variables, strategy)


def _held(values: Iterable) -> Iterator[keras.Optimizer | keras.Metric]:
    """The optimizers and metrics among values, and in lists and dictionaries there; optimizers within others too."""
    seen, left = set(), list(values)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (keras.Optimizer, keras.Metric)):
            yield value
        if isinstance(value, keras.Optimizer):
            left += vars(value).values()
        elif isinstance(value, (list, tuple)):
            left.extend(value)  # not `+=`: a tuple of layers is one that TensorFlow wraps
        elif isinstance(value, dict):
            left += value.values()


def _take_optimizer(optimizer: keras.Optimizer, model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    has_copies = variables.has_copies(optimizers.iterations(optimizer))
    if optimizers.strategy_of(optimizer) is strategy or (has_copies and optimizer.built):
        return
    if optimizer.built and not _is_new(optimizer, model):
        count = int(optimizers.iterations(optimizer).numpy())
        raise InputError(
            f"The optimizer {optimizer.name!r} was made outside the scope of the model's strategy, and is built "
            f"(iterations: {count}), so its variables belong to other devices. Give `compile` a new one, such as "
            "`type(optimizer).from_config(optimizer.get_config())`, or make it inside "
            "`with model.distribute_strategy.scope():`."
        )
    _remake(optimizers.own_variables(optimizer), strategy)
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues):
            setattr(optimizer, name, _copied(value, strategy))
    optimizers.set_strategy(optimizer, strategy)
    said = "The optimizer %r was made outside the strategy's scope; its variables now belong to the strategy."
    _log.info(said, optimizer.name)


def _is_new(optimizer: keras.Optimizer, model: keras.Model) -> bool:
    """Whether a built optimizer has no state yet, and its slots are those of the model's variables as they are now."""
    own = {id(variable) for variable in model.trainable_variables}
    return int(optimizers.iterations(optimizer).numpy()) == 0 and all(
        id(variable) in own and optimizers.knows(optimizer, variable) and shard_of(variable) is variable
        for variable in optimizers.trained(optimizer)
    )


def _remake(found: Iterable[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Gives variables without copies one on each replica."""
    for variable in found:
        held = variables.held(variable)
        if isinstance(held, tf.Variable) and not variables.has_copies(variable):
            with strategy.scope():
                variables.initialize(variable, held.numpy())


def _copied(variable: tf.Variable, strategy: tf.distribute.Strategy) -> tf.Variable:
    kept = {name: getattr(variable, name) for name in ("trainable", "dtype", "aggregation", "synchronization")}
    with strategy.scope():
        return tf.Variable(variable.numpy(), name=variable.name.split(":")[0], **kept)

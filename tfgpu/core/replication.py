"""Strategies whose replicas each hold a copy of the model, and variables with a copy on each replica."""

import weakref
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfgpu.compat import distribute, slots, variables
from tfgpu.errors import InputError

made: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
"""Strategies that `tfgpu.strategy` has made and that have trained nothing yet, while the script has them."""


def forgotten_scope(strategy: tf.distribute.Strategy) -> str | None:
    """What to say of a model that was built in no scope, while a strategy of several replicas has trained nothing."""
    made.discard(strategy)
    replicas = max((each.num_replicas_in_sync for each in made), default=1)
    is_default = not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy()
    if replicas == 1 or not is_default:
        return None
    return (
        f"The model was built outside `strategy.scope()`, so it trains on one device, not on the {replicas} replicas "
        "of your strategy. Build and compile it inside `with strategy.scope():`. If one device is intended, use the "
        "scope of `tfgpu.strategy('one_device')`."
    )


def check_scope(strategy: tf.distribute.Strategy | None) -> None:
    """Raises an InputError where a model of this strategy is used in the scope of another."""
    here = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and strategy not in (None, here):
        raise InputError(
            f"The model was created in the scope of a {type(strategy).__name__}, and is used in that of a "
            f"{type(here).__name__}. Create it in the scope in which it is used, or call it outside that scope."
        )


def is_replicated(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether the strategy keeps a copy of the model on each replica, and sums gradients in collectives."""
    return isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy))


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas are in several processes."""
    return is_replicated(strategy) and distribute.is_multi_worker(strategy)


def is_on_host(strategy: tf.distribute.Strategy) -> bool:
    """Whether all replicas of this process compute on its CPU, so that a step may sum in host memory.

    The only place that distinguishes CPUs from GPUs in a step. If it returns False, CPUs take the GPUs' path.
    """
    return all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in strategy.extended.worker_devices)


def replica_context() -> tf.distribute.ReplicaContext | None:
    """The replica context inside a replica of a replicated strategy, even of a single replica; else None."""
    found = tf.distribute.get_replica_context()
    return found if found is not None and is_replicated(found.strategy) else None


def replica_number(context: tf.distribute.ReplicaContext) -> int | tf.Tensor:
    """A replica's global number, from 0: an int if known before the step runs, else an int32 tensor."""
    number = context.replica_id_in_sync_group
    known = tf.get_static_value(number)
    return tf.cast(number, tf.int32) if known is None else int(known)


def shard_index(strategy: tf.distribute.Strategy, replica):
    """Which shard of the global batch replica number `replica` gets, from 0.

    A distributed dataset cuts a batch into one shard per replica and deals them to the workers in turn: with W workers,
    device d of worker w holds shard d * W + w.
    """
    devices = len(strategy.extended.worker_devices)
    return replica % devices * (strategy.num_replicas_in_sync // devices) + replica // devices


def local_training_of(strategy: tf.distribute.Strategy):
    """How the replicas train on their own copies (`step_loop.LocalTraining`), or None if they train together."""
    return slots.get(strategy, "local_training")


def run_cross_replica(strategy: tf.distribute.Strategy, make: Callable[[], None]) -> None:
    """Runs `make` in cross-replica context and outside any graph, in the strategy's scope.

    A variable created inside a replica would get that replica's copy only; here it gets all copies.
    """
    with tf.init_scope(), distribute.cross_replica_mode(strategy), strategy.scope():
        make()


def check_is_replicated(variable: keras.Variable | tf.Variable) -> None:
    """Refuses to let all replicas change one shared variable.

    Raises:
        InputError: a Keras variable that was made outside the strategy's scope.
    """
    if isinstance(variable, keras.Variable) and not variables.has_copies(variable):
        raise InputError(
            f"The variable {variable.path!r} was made outside `strategy.scope()`: all replicas would change one copy. "
            "Create its layer, metric or optimizer in the scope, `with model.distribute_strategy.scope():`. For a "
            "layer that should not train, you can set `trainable = False` instead."
        )


def check_is_not_replicated(trained: Iterable[keras.Variable]) -> None:
    """Refuses to train replicated variables in a model that has no strategy.

    Raises:
        InputError: a variable of a model that was made in a strategy's scope, or placed on several devices.
    """
    for variable in trained:
        if variables.has_copies(variable):
            raise InputError(
                f"The variable {variable.path!r} belongs to a model made in a strategy's scope, or placed on several "
                "devices, but the model that trains it here was not. Make both in the same scope, or build the whole "
                "model first and then call `parallel.place` or the like on it."
            )

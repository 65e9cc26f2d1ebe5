"""`parallel.shard`: optimizer state, gradients and parameters sharded over replicas (ZeRO)."""

import logging
from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu.compat import slots, variables
from tfgpu.core import replication
from tfgpu.errors import InputError
from tfgpu.parallel import compiled_calls, device_placement, model_graph
from tfgpu.parallel.rematerialization import recomputed_layers
from tfgpu.parallel.zero import gathered_variable, optimizer_build, shard_collectives, sharding

_log = logging.getLogger(__name__)


def shard(model: keras.Model, stage: int = 1, *, offload: bool = False) -> keras.Model:
    """Makes each replica keep and update its own piece of every variable. Call it before `compile`.

    Of N replicas, each holds 1/N of the optimizer's slots, of the averages of `use_ema`, and of accumulated gradients.
    An optimizer that looks at whole variables (Adafactor, Lamb, Muon, perhaps one of your own) has them dealt whole to
    replicas that own them. Training gives what one device gives; `.keras` files and checkpoints are one device's, and
    load on any number of replicas.

    Args:
        model: made in the scope of `mirrored` or `multi_worker`, and built; or one of `parallel.place` or
            `parallel.pipeline` with several replicas.
        stage: 1 shards the optimizer's state. 2 also sends each replica only the sums of its own pieces of the
            gradients. 3 also shards the parameters: a layer gathers its own while it runs, and is recomputed in the
            backward pass, where it gathers them again.
        offload: keep pieces and slots in the host's memory and update them there. It is slower, and slots take no
            device memory.

    Returns:
        The same model, ready to be compiled and trained.

    Raises:
        InputError: the model has no replicas, is not built, is compiled or sharded already, or trains in a way that
            does not work on pieces. When the optimizer is built: it looks at whole variables, of which some are cut
            along an axis of the mesh.

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
    (https://arxiv.org/abs/1910.02054).

    Example:
        >>> import tfgpu
        >>> with tfgpu.strategies.mirrored().scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model = shard(model, stage=2)
        >>> model.compile("adam", "mse")
    """
    strategy = model.distribute_strategy
    if isinstance(strategy, tf.distribute.OneDeviceStrategy) and not offload:
        _check_stage(stage)
        _log.warning("One device holds all of %r: there are no replicas to shard it over.", model.name)
        return model
    return shard_over(model, strategy, stage, offload)


def shard_over(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    stage: int,
    offload: bool = False,
    place_of: Callable | None = None,
) -> keras.Model:
    """As `shard`, for a model that becomes one of a strategy's.

    Args:
        model, stage, offload: as for `shard`.
        strategy: the replicas.
        place_of: the placement at which a variable is used, for a model that is not on the replicas yet (stage 3).

    Raises:
        InputError: as for `shard`.
    """
    _check_stage(stage)
    _check(model, strategy)
    config = sharding.ZeroConfig(stage, offload)
    optimizer_build.install()
    compiled_calls.allow(model)
    shard_collectives.learn_ranks(strategy)
    if stage < 3:
        _initialize_deferred(model, strategy)
        for variable in model.trainable_variables:
            sharding.create_shard(variable, device_placement.of_copies(variable), strategy, config)
        return model

    def of_replicas(variable: keras.Variable) -> device_placement.DevicePlacement:
        if variables.is_deferred(variable):
            return device_placement.on_devices(strategy.extended.worker_devices)
        return device_placement.of_copies(variable)

    _check_gathers(model)
    gathered_variable.shard_parameters(model, place_of or of_replicas, strategy, config)
    if place_of is None:
        _initialize_deferred(model, strategy)  # those that are not sharded
    return model


def _initialize_deferred(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Gives variables that were made in `parallel.deferred` their initial values, on each replica."""
    for variable in filter(variables.is_deferred, model.variables):
        value = variables.take_value(variable)
        with strategy.scope():
            variables.initialize(variable, value)


def _check_stage(stage: int) -> None:
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise InputError(
            f"`stage` must be 1 (the optimizer's state), 2 (gradients too) or 3 (parameters too). Received: {stage!r}."
        )


def _check_gathers(model: keras.Model) -> None:
    """Refuses models for which parameters cannot be gathered (stage 3)."""
    layers = model_graph.with_layers_within([model])
    if any(model_graph.is_functional(layer) and model_graph.override_name(layer) for layer in layers):
        raise InputError(
            "The model is a pipeline or is recomputed in blocks, so each micro-batch would gather the parameters. "
            "Use stage=2; stage=3 recomputes each layer by itself."
        )
    recomputed_layers.check_not_recomputed(model)
    for layer in layers:
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise InputError(f"{layer.name!r} (SpectralNormalization) assigns the kernel in each step. Use stage=2.")


def _check(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    if not replication.is_replicated(strategy):
        raise InputError(
            "`parallel.shard` shards over replicas, and this model has none. Make it in the scope of "
            "`tfgpu.strategies.mirrored()` or `tfgpu.strategies.multi_worker()`; to offload from one device, of "
            "`tfgpu.strategies.mirrored(devices=['GPU:0'])`."
        )
    if replication.local_training_of(strategy) is not None:
        raise InputError("Replicas of `averaging` each need a whole optimizer. Use `mirrored` or `multi_worker`.")
    if slots.get(strategy, "top_k") is not None:
        raise InputError("`top_k` and a sharded optimizer cannot be combined. Remove one of them.")
    if not model.built or not model.trainable_variables:
        raise InputError(f"{model.name!r} has no trainable variables yet. Build it first: model.build(input_shape).")
    if any(map(sharding.is_sharded, model.trainable_variables)):
        raise InputError(f"{model.name!r} is already sharded. Build a new model.")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise InputError("The model's optimizer is already built. Shard the model before `compile`.")
    for variable in model.trainable_variables:
        if strategy is model.distribute_strategy and not variables.is_deferred(variable):
            replication.check_is_replicated(variable)
        if getattr(variable, "overwrite_with_gradient", False):
            raise InputError(f"{variable.path!r} (float8) is overwritten by its gradient. Use another dtype policy.")

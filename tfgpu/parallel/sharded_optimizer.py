"""Optimizer state, gradients and parameters over the replicas, instead of a copy of all on each (ZeRO)."""

import keras

from tfgpu.errors import InputError
from tfgpu.keras_fixes import compression, replica, shards


def shard(model: keras.Model, stage: int = 1, *, offload: bool = False) -> keras.Model:
    """Lets each data replica keep and update its own piece of every variable, before the model is compiled.

    Of N replicas each holds 1/N of the optimizer's slots, of the averages that `use_ema` keeps and of the gradients
    that accumulation keeps. What is learned is what one device learns; `.keras` files and checkpoints are one
    device's, and open and resume on any number of replicas.

    Args:
        model: made in the scope of `mirrored` or `multi_worker`, and built; one of `parallel.place` or
            `parallel.pipeline` with several replicas too.
        stage: 1 shards the optimizer's state; 2 besides sends each replica only the sums of its own pieces of the
            gradients.
        offload: keep the pieces and the slots in the host's memory, and update them there. Slower, and no slot takes
            any of the device's memory.

    Returns:
        The same model, to be compiled and fitted.

    Raises:
        InputError: the model has no replicas, is not built, is compiled or sharded already, or trains in a way that
            pieces do not fit. When the optimizer is built: it does not work element by element.

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
    (https://arxiv.org/abs/1910.02054).

    Example:
        >>> import tfgpu
        >>> with tfgpu.strategy("mirrored").scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model = shard(model, stage=2)
        >>> model.compile("adam", "mse")
    """
    if stage not in (1, 2):
        raise InputError(
            "`stage` is 1 (the optimizer's state) or 2 (gradients too). "
            f"Received: {stage!r}. Parameters stay whole on each replica: for a model that does not fit on one device "
            "use `parallel.place` or `parallel.pipeline`."
        )
    _check(model)
    shards.cut(model.trainable_variables, model.distribute_strategy, shards.Sharding(stage, offload))
    return model


def _check(model: keras.Model) -> None:
    strategy = model.distribute_strategy
    if not replica.is_spread(strategy):
        raise InputError(
            "`parallel.shard` spreads the optimizer over replicas, and this model has none. Make it in the scope of "
            "`tfgpu.strategy('mirrored')` or `tfgpu.strategy('multi_worker')`."
        )
    if replica.plan_of(strategy) is not None:
        raise InputError("Replicas that train apart (`averaging`) each need a whole optimizer. Use `mirrored`.")
    if compression.top_k_of(strategy) is not None:
        raise InputError("Top-k gradients and a sharded optimizer do not fit together. Leave one of them out.")
    if not model.built or not model.trainable_variables:
        raise InputError(f"{model.name!r} has no trainable variables yet. Build it first: model.build(input_shape).")
    if any(map(shards.is_sharded, model.trainable_variables)):
        raise InputError(f"{model.name!r} was sharded before. Make it anew.")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise InputError("The model has trained already, or its optimizer was built. Shard it before `compile`.")
    for variable in model.trainable_variables:
        replica.check_has_copies(variable)
        if getattr(variable, "overwrite_with_gradient", False):
            raise InputError(f"{variable.path!r} (float8) is overwritten by its gradient. Use another dtype policy.")

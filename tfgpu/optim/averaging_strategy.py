"""Local SGD: replicas train apart and average their weights now and then.

Every replica trains on its part of each global batch, with its own copy of the weights and of the optimizer's state.
After `every` updates one all-reduce averages the weights. It sends `1 / every` of what synchronous training sends, and
a slow network or a slow replica is waited for as much less often; the result is no longer that of one device.
"""

import numbers
from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu import repairs, strategies
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.optim import local_sgd as fixes


def averaging(
    devices: strategies.Devices = None,
    *,
    every: int = 16,
    after: int = 0,
    outer: strategies.Outer = None,
    all_reduce: str = "auto",
    bytes_per_pack: int = 0,
    cluster: Cluster | None = None,
) -> tf.distribute.Strategy:
    """Makes the strategy whose replicas train apart and average their weights.

    It is `multi_worker` on a cluster of several workers, else `mirrored`, and works with `model.fit`, `Trainer` and
    `train_on_batch`. An epoch's end averages too, before validation, callbacks and saves read the model, and so does
    what reads it in between (`evaluate`, `predict`, `get_weights`, a save: all workers must do so together).

    Args:
        devices: as for `tfgpu.strategy`.
        every: updates between two averagings, from 1. With 1 and plain SGD the result is synchronous training's.
        after: updates of synchronous training before replicas train apart (post-local SGD); early updates change
            weights the most.
        outer: a Keras optimizer, or a function that makes one, which applies the change of the average since the
            last one as a gradient; `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)` is DiLoCo's. Each model
            gets one of its own. None takes the average as it is. On several workers it must be a function.
        all_reduce, bytes_per_pack: as for `mirrored` and `multi_worker`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Raises:
        InputError: an option that is wrong or does not apply; or the repairs are switched off.
        MachineError: on workers, after TensorFlow has started its devices.

    Example:
        strategy = tfgpu.strategy("averaging", every=16, after=500)

    Sources: Stich, "Local SGD converges fast and communicates little", 2018 (https://arxiv.org/abs/1805.09767); Lin et
    al., "Don't use large mini-batches, use local SGD", 2018 (https://arxiv.org/abs/1808.07217); Douillard et al.,
    "DiLoCo", 2023 (https://arxiv.org/abs/2311.08105).
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    _check("every", every, 1)
    _check("after", after, 0)
    if not repairs.is_enabled():
        raise InputError("`averaging` needs the repairs of Keras, which TFGPU_REPAIR=0 leaves out. Unset that.")
    plan = fixes.Plan(every, after, _maker(outer, cluster))
    if cluster.is_multi_worker:
        made = strategies.multi_worker(devices, all_reduce=all_reduce, bytes_per_pack=bytes_per_pack, cluster=cluster)
    elif bytes_per_pack:
        raise InputError(
            f"`bytes_per_pack` applies to workers. Received: {bytes_per_pack!r} for `averaging` in one process. "
            "Leave it out."
        )
    else:
        made = strategies.mirrored(devices, all_reduce=all_reduce)
    return fixes.average_in(made, plan)


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"`{name}` must be a whole number from {least}. Received: {value!r}.")


def _maker(outer: strategies.Outer, cluster: Cluster) -> Callable[[], keras.optimizers.Optimizer] | None:
    if isinstance(outer, keras.optimizers.Optimizer):
        if cluster.is_multi_worker:
            name = type(outer).__name__
            raise InputError(
                f"`outer` must be a function on workers: the optimizer {name} has started TensorFlow before the "
                f"strategy could. Write outer=lambda: keras.optimizers.{name}(...)."
            )
        config = outer.get_config()
        return lambda: type(outer).from_config(config)
    if outer is not None and not callable(outer):
        raise InputError(f"`outer` must be a Keras optimizer, or a function that makes one. Received: {outer!r}.")
    return outer

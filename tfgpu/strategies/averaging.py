"""Local SGD: replicas train independently and average their weights periodically.

Every replica trains on its part of each global batch, with its own copy of the weights and of the optimizer's state.
After `every` updates, one all-reduce averages the weights. Compared with synchronous training, it sends `1 / every` of
the bytes and waits `1 / every` times as often for a slow network or replica. The result differs from one device's.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu import repairs
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, whole_number
from tfgpu.optim import local_sgd
from tfgpu.strategies.devices import Devices
from tfgpu.strategies.mirrored import mirrored
from tfgpu.strategies.multi_worker import multi_worker

Outer = keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer] | None


def averaging(
    devices: Devices = None,
    *,
    every: int = 16,
    after: int = 0,
    outer: Outer = None,
    all_reduce: str = "auto",
    bytes_per_pack: int | None = None,
    cluster: Cluster | None = None,
) -> tf.distribute.Strategy:
    """Makes the strategy whose replicas train independently and average their weights.

    It is `multi_worker` on a cluster of several workers, else `mirrored`, and works with `model.fit`, `Trainer` and
    `train_on_batch`. The end of an epoch averages too, before validation, callbacks and saves read the model. So does
    anything that reads the model in between (`evaluate`, `predict`, `get_weights`, a save): all workers must do it
    together.

    Args:
        devices: as for `tfgpu.strategy`.
        every: updates between two averagings, at least 1. With 1 and plain SGD the result equals synchronous
            training.
        after: updates of synchronous training before replicas train independently (post-local SGD); early updates
            change weights the most.
        outer: a Keras optimizer, or a function that makes one, which applies the change of the average since the
            previous averaging as a gradient; DiLoCo uses `keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`. Each
            model gets its own. None keeps the average as it is. On several workers it must be a function.
        all_reduce, bytes_per_pack: as for `mirrored` and `multi_worker`.
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy` or `tf.distribute.MirroredStrategy`.

    Raises:
        InputError: an option is invalid or does not apply, or the repairs are switched off.
        MachineError: on workers, after TensorFlow has started its devices.

    Example:
        strategy = tfgpu.strategies.averaging(every=16, after=500)

    Sources: Stich, "Local SGD converges fast and communicates little", 2018 (https://arxiv.org/abs/1805.09767); Lin et
    al., "Don't use large mini-batches, use local SGD", 2018 (https://arxiv.org/abs/1808.07217); Douillard et al.,
    "DiLoCo", 2023 (https://arxiv.org/abs/2311.08105).
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    whole_number("every", every)
    whole_number("after", after, minimum=0)
    if not repairs.is_enabled():
        raise InputError("`averaging` needs the Keras repairs, which TFGPU_REPAIR=0 switches off. Unset it.")
    make_outer = _outer_maker(outer, cluster)
    if cluster.is_multi_worker:
        made = multi_worker(devices, all_reduce=all_reduce, bytes_per_pack=bytes_per_pack, cluster=cluster)
    else:
        made = mirrored(devices, all_reduce=all_reduce, bytes_per_pack=bytes_per_pack)
    return local_sgd.average_in(made, local_sgd.LocalSGD(every, after, make_outer))


def _outer_maker(outer: Outer, cluster: Cluster) -> Callable[[], keras.optimizers.Optimizer] | None:
    if isinstance(outer, keras.optimizers.Optimizer):
        if cluster.is_multi_worker:
            name = type(outer).__name__
            raise InputError(
                f"`outer` must be a function on several workers: creating the optimizer {name} has started TensorFlow "
                f"before the strategy could. Write outer=lambda: keras.optimizers.{name}(...)."
            )
        config = outer.get_config()
        return lambda: type(outer).from_config(config)
    if outer is not None and not callable(outer):
        raise InputError(f"`outer` must be a Keras optimizer or a function that makes one. Received: {outer!r}.")
    return outer

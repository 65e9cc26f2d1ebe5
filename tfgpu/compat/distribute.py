"""What TensorFlow's distribution strategies hold."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.distribute import device_util, distribute_lib, distribute_utils, input_lib
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.values import DistributedVariable, Mirrored, PerReplica
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.none_tensor import NoneTensorSpec
from tensorflow.python.ops import collective_ops, resource_variable_ops

from tfgpu.compat.patch import wrapped

__all__ = ["CollectiveAllReduce", "DistributedVariable", "Mirrored", "PerReplica"]


@contextmanager
def as_replicas(strategy: tf.distribute.Strategy, count: int) -> Iterator[None]:
    """Inside the block, code that asks a strategy for its number of replicas gets another one.

    So does code that asks the strategy in which it runs, as `tf.nn.scale_regularization_loss` does.
    """
    here = tf.distribute.get_strategy()

    def number(stock, self):
        return count if self in (strategy, here) else stock(self)

    with wrapped("StrategyBase.num_replicas_in_sync", number):
        yield


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """The index of this process in a multi-worker strategy."""
    return strategy.extended._id_in_cluster


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """The number of processes of a multi-worker or parameter server strategy."""
    return strategy.extended._num_workers


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas of a mirrored strategy are in several processes."""
    return strategy.extended._in_multi_worker_mode()


def uses_default_reduction(strategy: tf.distribute.MirroredStrategy) -> bool:
    """Whether the replicas sum in the default way: no `cross_device_ops` were given."""
    return strategy.extended._cross_device_ops is strategy.extended._collective_ops


def communication_options(strategy: tf.distribute.Strategy) -> tf.distribute.experimental.CommunicationOptions:
    """The options with which a strategy of replicas runs its collectives."""
    return strategy.extended._communication_options


def use_nccl(strategy: tf.distribute.MirroredStrategy) -> None:
    """Makes a strategy's collectives request NCCL, which TensorFlow omits if any GPU of the process is divided."""
    extended = strategy.extended
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    asked = tf.distribute.experimental.CommunicationOptions(implementation=nccl)
    extended._communication_options = options = extended._communication_options.merge(asked)
    for launcher in extended._collective_ops._launchers:
        launcher._options = options


def asks_for_nccl(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy's collectives request NCCL, which TensorFlow then uses between GPUs."""
    nccl = tf.distribute.experimental.CommunicationImplementation.NCCL
    return strategy.extended._communication_options.implementation == nccl


def can_gather(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas can run their own collectives here: in a graph, if the strategy has a launcher for each.

    Eager replicas run one after the other, and the first would wait for the second.
    """
    return not tf.executing_eagerly() and isinstance(strategy.extended._cross_device_ops, CollectiveAllReduce)


def sums_by_replica(strategy: tf.distribute.Strategy) -> bool:
    """Whether each replica sums by a collective of its own; else one operation sums the values of all."""
    kind, stock = type(strategy.extended._cross_device_ops), CollectiveAllReduce
    return issubclass(kind, stock) and kind._all_reduce_per_replica_values is stock._all_reduce_per_replica_values


def cross_device_ops(strategy: tf.distribute.Strategy) -> tf.distribute.CrossDeviceOps:
    """The operations with which a strategy's replicas sum."""
    return strategy.extended._cross_device_ops


def set_cross_device_ops(strategy: tf.distribute.Strategy, operations: object) -> None:
    """Replaces the operations with which a strategy's replicas sum."""
    strategy.extended._cross_device_ops = operations


def keep_inputs_on(extended: object, host: str, default: str) -> None:
    """Sets where a mirrored strategy places what belongs to no replica, such as data, whatever the replicas' devices.

    Args:
        extended: the strategy's `extended`, when it is initialized.
        host: the full name of the CPU device for the data.
        default: the job, replica and task of everything else.
    """
    extended._input_workers_devices = ((host, extended._input_workers_devices[0][1]),)
    extended._host_input_device = type(extended._host_input_device)(host)
    extended._default_device = default


def collective_launcher(strategy: tf.distribute.Strategy, replica: int):
    """The launcher of one local replica's collectives."""
    return strategy.extended._cross_device_ops._launchers[replica]


def all_to_all(value: tf.Tensor, replica: int, options: object) -> tf.Tensor:
    """Row i of the result is row `r` of rank i's value, where `r` is the rank of this replica. Not for NCCL.

    TensorFlow's NCCL sends only to replicas of the same process (`nccl_manager.cc`, kAllToAll).

    Args:
        value: [replicas, ...], of the same static shape on all replicas.
        replica: this replica's number in its process.
        options: `tf.distribute.experimental.CommunicationOptions`, or None.
    """
    return _launch(collective_ops.all_to_all_v2, value, replica, options)


def reduce_scatter(value: tf.Tensor, replica: int, options: object) -> tf.Tensor:
    """The sum over all replicas of row `r`, where `r` is the rank of this replica. For NCCL only.

    TensorFlow has no reduce-scatter without NCCL (`collective_param_resolver_local.cc`, "undef"). Arguments as for
    `all_to_all`.
    """
    return _launch(_reduce_scatter, value, replica, options)[0]


def all_gather(value: tf.Tensor, replica: int, options: object, launcher: object = None) -> tf.Tensor:
    """The values of all ranks, concatenated along the first axis; arguments as for `all_to_all`.

    A `launcher` other than that of the replica's own device gathers on its device (`device_groups`).
    """
    return _launch(collective_ops.all_gather_v2, value, replica, options, launcher)


def _reduce_scatter(value, size, group, instance, communication_hint, timeout, ordering_token) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduceScatterV2(
        input=value,
        group_size=size,
        group_key=group,
        instance_key=instance,
        ordering_token=[] if ordering_token is None else [ordering_token],
        merge_op="Add",
        final_op="Id",
        communication_hint=communication_hint.lower(),
        timeout_seconds=timeout or 0,
    )


def broadcast_dtypes() -> tuple[tf.DType, ...]:
    """The dtypes that TensorFlow's collectives can broadcast."""
    attributes = op_def_registry.get("CollectiveBcastSend").attr
    allowed = next(each for each in attributes if each.name == "T").allowed_values.list.type
    return tuple(map(tf.as_dtype, allowed))


def _launch(
    collective: Callable, value: tf.Tensor, replica: int, options: object, launcher: object = None
) -> tf.Tensor:
    """Adds a collective, ordered after all others of its device."""
    launcher = launcher or collective_launcher(tf.distribute.get_strategy(), replica)
    options = launcher._options.merge(options)
    with on_device(launcher._device):
        return collective(
            value,
            launcher._group_size,
            launcher._group_key,
            launcher._next_instance_key(),
            communication_hint=options.implementation.value,
            timeout=options.timeout_seconds,
            ordering_token=launcher._get_ordering_token(),
        )


@contextmanager
def on_device(name: str) -> Iterator[None]:
    """Runs the operations of the block on a device, whatever function places those around it."""
    with tf.device(None), tf.device(name):
        yield


def moved(value: tf.Tensor, device: str) -> tf.Tensor:
    """A value on a device; an empty name leaves it where it is."""
    if not device or (value.device and device_util.canonicalize(value.device) == device_util.canonicalize(device)):
        return value
    with on_device(device):
        return tf.identity(value)


def fetch(remote: tf.distribute.experimental.coordinator.RemoteValue) -> object:
    """What a closure returned; None where its worker is lost meanwhile: ask again.

    A closure that returns nothing gives None too. TensorFlow would keep the None for good
    (`RemoteValueImpl.get`), also after another worker has run the closure.
    """
    found = remote.fetch()
    if found is None:
        remote._has_fetched_to_local = False
    return found


def is_worker_failure(error: Exception) -> bool:
    """Whether an error says that a worker of a parameter server strategy is gone."""
    return cluster_coordinator._is_worker_failure(error)


def is_server_failure(error: Exception) -> bool:
    """Whether an error says that a parameter server is gone."""
    return cluster_coordinator._is_ps_failure(error)


def failed_servers(error: Exception) -> list[int]:
    """The numbers of the parameter servers that an error names."""
    return sorted(cluster_coordinator._extract_failed_ps_instances(str(error)))


def server_addresses(strategy: tf.distribute.ParameterServerStrategy) -> Sequence[str]:
    """The addresses of the parameter servers."""
    return strategy._cluster_resolver.cluster_spec().as_dict().get("ps", [])


@contextmanager
def cross_replica_mode(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside the block, a replica's code runs as if outside the replicas."""
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def next_batch(iterator: tf.distribute.DistributedIterator) -> tuple[tf.Tensor, Callable]:
    """Whether any replica has another batch (bool scalar), and a function that returns it (else placeholders).

    `get_next_as_optional` wraps the batch of all devices in one `Optional` of the host: each batch leaves its GPU.
    """
    strategy, workers = iterator._strategy, iterator._input_workers
    optionals = []
    for worker, local in zip(workers.worker_devices, iterator._iterators, strict=True):
        with tf.device(worker):
            optionals.append(local.get_next_as_optional_list())

    def get_value():
        values = []
        for number, (worker, local) in enumerate(zip(workers.worker_devices, optionals, strict=True)):
            for device, optional in zip(workers.compute_devices_for_worker(number), local, strict=True):
                with tf.device(worker), tf.device(device):
                    values.append(_value_or_placeholder(optional))
        if iterator._replica_order is not None:
            values = iterator._reorder_replicas(values)
        return input_lib._create_per_replica(values, strategy)

    return input_lib._calculate_replicas_with_values(strategy, workers, optionals) > 0, get_value


def pieces_of(distributed: tf.distribute.DistributedDataset) -> tf.data.Dataset:
    """What this worker reads of a dataset that `experimental_distribute_dataset` has distributed: a piece a replica."""
    return distributed._cloned_datasets[0]


def set_pieces(distributed: tf.distribute.DistributedDataset, pieces: tf.data.Dataset) -> None:
    """Replaces what this worker reads of a distributed dataset; the new pieces must have the spec of the old ones."""
    distributed._cloned_datasets[0] = pieces


def _value_or_placeholder(optional: tf.experimental.Optional) -> object:
    """A replica's batch, or an empty one if it has none; None stays None, which TensorFlow's own function rejects."""
    specs = tf.nest.flatten(optional.element_spec)
    held = [at for at, spec in enumerate(specs) if not isinstance(spec, NoneTensorSpec)]

    def value() -> list:
        found = tf.nest.flatten(optional.get_value())
        return [found[at] for at in held]

    def placeholder() -> list:
        return input_lib._dummy_tensor_fn([specs[at] for at in held])

    found = dict(zip(held, tf.cond(optional.has_value(), value, placeholder), strict=True))
    return tf.nest.pack_sequence_as(optional.element_spec, [found.get(at) for at in range(len(specs))])


def regroup(copies, wrap_class: type = PerReplica):
    """The replicas' structures as one structure of distributed values."""
    return distribute_utils.regroup(copies, wrap_class=wrap_class)


def plain_variable(value: object, device: str, name: str) -> tf.Variable:
    """A variable on one device, which is not trained; whatever the scope, no strategy makes copies of it."""
    with tf.init_scope(), tf.device(device):
        return resource_variable_ops.ResourceVariable(value, trainable=False, name=name)


def with_copies(
    like: tf.distribute.DistributedValues, copies: Sequence[tf.Variable]
) -> tf.distribute.DistributedValues:
    """A variable of the same strategy, with these copies on the replicas of this process, which may differ in shape."""
    return type(like)(like._distribute_strategy, tuple(copies), like._aggregation)


def select(values: object, replica: int):
    """One replica's part of a structure of distributed values."""
    return distribute_utils.select_replica(replica, values)


@contextmanager
def started_collectives_kept() -> Iterator[None]:
    """Inside the block a strategy of several workers uses the collectives that an earlier one of its cluster started.

    TensorFlow would start them again on each worker. If the first worker does so after another has asked it for a
    collective, the question is lost, and all wait forever.
    """
    started = eager_context.context()._collective_ops_server_def

    def enable(stock, self, server) -> None:
        names = ("cluster", "job_name", "task_index")
        if started is None or any(getattr(started, name) != getattr(server, name) for name in names):
            stock(self, server)

    with wrapped("Context.enable_collective_ops", enable):
        yield


def full_device_name(name: str) -> str:
    """A device's name, completed with job, task and kind."""
    return device_util.canonicalize(name)


def global_seed() -> int | None:
    """The seed that `tf.random.set_seed` has set, or None."""
    return eager_context.global_seed()


def set_collective_key_base(strategy: tf.distribute.Strategy, base: int) -> None:
    """Makes a strategy that is being created number its collectives from `base` on."""
    strategy._collective_key_base = base


def first_group_key(strategy: tf.distribute.Strategy) -> int:
    """The key that a strategy's first group of devices gets."""
    return strategy.extended._collective_keys._group_key


def replica_spec(spec: tf.TypeSpec) -> tf.TypeSpec:
    """The spec of one replica's part of distributed values, given their spec."""
    return spec._value_specs[0] if hasattr(spec, "_value_specs") else spec


def act_as_non_chief(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Makes a one-process strategy act as a worker that is not the chief, as a probe needs."""
    strategy.extended._is_chief = False

"""Collectives where the values are: among the devices that hold one stage of the model, or one shard of its layers.

TensorFlow packs only values on the replicas' own devices. It sends each of the others there, sums it in a collective of
its own, and sends the sum back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import tensorflow as tf
from tensorflow.python.distribute import device_util
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce

from tfgpu.compat import collective_order, distribute, slots

Column = Sequence[tf.Tensor]
"""One value: its tensor on each replica."""


def use(strategy: tf.distribute.Strategy) -> None:
    """Makes `of` find the groups of a strategy of one process that sums by collectives; else it changes nothing."""
    is_local = isinstance(strategy, tf.distribute.MirroredStrategy)
    if is_local and isinstance(strategy.extended._cross_device_ops, CollectiveAllReduce) and of(strategy) is None:
        slots.of(strategy).device_groups = DeviceGroups(strategy)


def of(strategy: tf.distribute.Strategy) -> "DeviceGroups | None":
    """The groups of devices of a strategy; None if each replica holds all it has on its own device."""
    return slots.get(strategy, "device_groups")


@dataclass(frozen=True)
class ReplicaSum:
    """How one replica sums its values with the other replicas.

    Attributes:
        device: of its collectives.
        sum: takes its values, and returns the sums on that device.
    """

    device: str
    sum: Callable[[list[tf.Tensor]], list[tf.Tensor]]


def sums_by_replica(
    strategy: tf.distribute.Strategy, column: Column, options: tf.distribute.experimental.CommunicationOptions
) -> list[ReplicaSum]:
    """How each replica of this process sums values that are where one value is, with its `CollectiveAllReduce`."""
    groups = of(strategy) or DeviceGroups(strategy)
    group = groups.group_of(column) if groups is of(strategy) else groups.own
    return [
        ReplicaSum(device, partial(groups.sum_of_replica, group, number, options=options))
        for number, device in enumerate(group)
    ]


class DeviceGroups:
    """Groups of one device per replica, each with its own collectives.

    No device is in two groups, so that a device runs its collectives in one order. A value whose devices cannot be a
    group is summed on the replicas' own devices, and sent back.

    Args:
        strategy: a `MirroredStrategy` that sums by `CollectiveAllReduce`.
    """

    def __init__(self, strategy: tf.distribute.MirroredStrategy):
        self._own, self._keys = strategy.extended._cross_device_ops, strategy.extended._collective_keys
        self._reductions = {self._own._devices: self._own}

    @property
    def own(self) -> tuple[str, ...]:
        """The replicas' own devices."""
        return self._own._devices

    def group_of(self, column: Column) -> tuple[str, ...]:
        """The devices that sum a value: those that hold it, if they can be a group, or else the replicas' own."""
        own = self._own._devices
        held = tuple(_device(value) or device for value, device in zip(column, own, strict=True))
        if held not in self._reductions and self._can_meet(held):
            options = self._own._launchers[0]._options
            self._reductions[held] = CollectiveAllReduce(held, len(held), options, self._keys)
        return held if held in self._reductions else own

    @contextmanager
    def launcher(self, group: tuple[str, ...], replica: int) -> Iterator[object]:
        """Yields what makes a group's collectives on a replica's device; among packs, those of the block are packs."""
        found = self._reductions[group]._launchers[replica]
        with collective_order.packs_in_group(self._own._launchers[replica], found, group):
            yield found

    def sum(
        self, columns: Sequence[Column], options: tf.distribute.experimental.CommunicationOptions
    ) -> list[list[tf.Tensor]]:
        """The sums over replicas, each where the value is. In a graph, in cross-replica context.

        Args:
            columns: values; those of one group and dtype share packs.
            options: with the size of packs.
        """
        found, by_group = [None] * len(columns), {}
        for at, column in enumerate(columns):
            by_group.setdefault((self.group_of(column), column[0].dtype), []).append(at)
        for (group, _), places in by_group.items():
            for at, sums in zip(places, self._sum(group, [columns[at] for at in places], options), strict=True):
                found[at] = sums
        return found

    def sum_of_replica(
        self,
        group: tuple[str, ...],
        replica: int,
        values: list[tf.Tensor],
        options: tf.distribute.experimental.CommunicationOptions,
    ) -> list[tf.Tensor]:
        """The sums on a replica's device of a group. All replicas must call it alike."""
        reduction = self._reductions[group]
        given = [distribute.moved(value, group[replica]) for value in values]
        with reduction._lock, self.launcher(group, replica):
            return reduction._all_reduce(tf.distribute.ReduceOp.SUM, given, replica, options)

    def _sum(self, group: tuple[str, ...], columns: list[Column], options) -> list[list[tf.Tensor]]:
        by_replica = [
            self.sum_of_replica(group, number, list(values), options)
            for number, values in enumerate(zip(*columns, strict=True))
        ]
        totals = zip(*by_replica, strict=True)
        return [
            [distribute.moved(total, value.device) for total, value in zip(sums, column, strict=True)]
            for sums, column in zip(totals, columns, strict=True)
        ]

    def _can_meet(self, devices: tuple[str, ...]) -> bool:
        """Whether devices can be a new group: different ones, in no other group, that TensorFlow connects as it does
        the replicas' own.
        """
        taken = {device for group in self._reductions for device in group}
        groups = devices, self._own._devices
        kinds = [{tf.DeviceSpec.from_string(each).device_type for each in group} for group in groups]
        asks_for_nccl = self._own._launchers[0]._options.implementation.value == "NCCL"
        are_new = len(set(devices)) == len(devices) and not taken & set(devices)
        return are_new and kinds[0] == kinds[1] and not (asks_for_nccl and _has_divided_gpus())


def moved_beside(found: tf.IndexedSlices, given: tf.IndexedSlices) -> tf.IndexedSlices:
    """Slices on the device of others."""
    values, indices = (distribute.moved(part, given.values.device) for part in (found.values, found.indices))
    return tf.IndexedSlices(values, indices, found.dense_shape)


def _has_divided_gpus() -> bool:
    """Whether a GPU is divided into several devices, between which NCCL does not work."""
    return len(tf.config.list_logical_devices("GPU")) > len(tf.config.list_physical_devices("GPU"))


def _device(value: tf.Tensor) -> str:
    """The full name of a tensor's device; empty if it is not known."""
    return device_util.canonicalize(value.device) if value.device else ""

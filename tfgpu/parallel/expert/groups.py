"""Tensors that the devices of a group exchange, with the gradients of one device.

The replicas of a mesh with `data=m` and `expert=n` are m groups of n neighbors. All are in one process, so that an
exchange is one copy from each device of a group to each other one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import collectives, replication, step_context, traffic, travel

TO_EXPERTS, FROM_EXPERTS = "to_experts", "from_experts"
"""The names in a graph of what an exchange brings; those of its gradient end with `_back`."""


@dataclass(frozen=True)
class Groups:
    """The replicas by groups.

    Attributes:
        size: devices in a group.
        count: how many groups there are.
    """

    size: int
    count: int

    @property
    def own(self) -> int:
        """This replica's group."""
        return replication.replica_number(replication.replica_context()) // self.size

    @property
    def place(self) -> int:
        """This replica's number in its group."""
        return replication.replica_number(replication.replica_context()) % self.size

    def to_experts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends one tensor to each device of the group; returns those that the devices of the group sent to this one.

        The gradient that comes back is that of this replica's loss.
        """

        def back(upstream: list) -> list:
            return [_unweighed(each) for each in self._exchange(upstream, f"{TO_EXPERTS}_back")]

        return _linear(parts, lambda given: self._exchange(given, TO_EXPERTS), back)

    def from_experts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `to_experts`, for the way back. What comes of the gradient is weighed by each replica's rows, so that the
        gradient of the experts' weights is that of the batch.
        """

        def back(upstream: list) -> list:
            return self._exchange([_weighed(each) for each in upstream], f"{FROM_EXPERTS}_back")

        return _linear(parts, lambda given: self._exchange(given, FROM_EXPERTS), back)

    def sum_over_groups(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of what the replicas with the same place have."""
        if self.count == 1 or not values:
            return values
        sent = travel.to_reduce_dtype(values)
        traffic.note(sent)
        found = replication.replica_context().merge_call(self._sum, args=tuple(sent))
        return travel.from_reduce_dtype(list(found), values)

    def _exchange(self, parts: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        own = self.place
        traffic.note([part for at, part in enumerate(parts) if at != own])

        def across(strategy, *columns):
            sent = [strategy.experimental_local_results(column) for column in columns]  # by receiver, then by replica
            found = []
            for replica, device in enumerate(strategy.extended.worker_devices):
                first, place = replica // self.size * self.size, replica % self.size
                with tf.device(device):
                    found.append(tuple(tf.identity(sent[place][first + at], name) for at in range(self.size)))
            return distribute.regroup(tuple(found))

        with collectives.explained_merge_call():
            return list(replication.replica_context().merge_call(across, args=tuple(parts)))

    def _sum(self, strategy, *columns):
        values = [strategy.experimental_local_results(column) for column in columns]
        found = []
        for replica, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                alike = [replica % self.size + group * self.size for group in range(self.count)]
                found.append(tuple(tf.add_n([column[at] for at in alike]) for column in values))
        return distribute.regroup(tuple(found))


def _linear(parts: Sequence[tf.Tensor], forward: Callable, backward: Callable) -> list[tf.Tensor]:
    @tf.custom_gradient
    def apply(*given):
        return forward(list(given)), lambda *upstream: backward([tf.convert_to_tensor(each) for each in upstream])

    return list(apply(*parts))


def _factor() -> tf.Tensor | None:
    """By what a replica's gradients are multiplied before they are summed; None where the loss is weighed already."""
    facts = step_context.step()
    if facts is None or facts.loss_is_weighed or facts.loss_is_sum:
        return None
    return facts.share * step_context.num_replicas() if facts.loss_is_divided else facts.share


def _weighed(gradient: tf.Tensor) -> tf.Tensor:
    factor = _factor()
    return gradient if factor is None else tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _unweighed(gradient: tf.Tensor) -> tf.Tensor:
    """Undoes `_weighed`, as this replica's gradients are weighed together later."""
    factor = _factor()
    return gradient if factor is None else tf.math.divide_no_nan(gradient, tf.cast(factor, gradient.dtype))

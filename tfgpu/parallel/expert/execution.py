"""Runs layers that hold experts: the tokens of all devices of a group go to the experts, and the results come back.

Each replica trains on its rows of the batch, as without `expert`; a layer of experts alone is spread. It gets what its
`call` is given from all devices of the group, runs the layer's own code with this device's experts, and sends each
device its part of the results: one exchange each way, and one each way in the backward pass.

Source: Lepikhin et al., 2020, "GShard", https://arxiv.org/abs/2006.16668
"""

import functools
import inspect
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfgpu.compat import training
from tfgpu.compat.keras import in_symbolic_scope
from tfgpu.compat.patch import override
from tfgpu.core import replication, step_context
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, placement, shard_averages
from tfgpu.parallel.expert import balance, banks, shards, updates
from tfgpu.parallel.expert.banks import Bank
from tfgpu.parallel.expert.groups import Groups
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.zero import gathered_variable


def install(model: keras.Model, mesh: Mesh, strategy: tf.distribute.Strategy) -> None:
    """Makes a model one of replicas that hold a part of the experts each.

    Args:
        model: built.
        mesh: with devices.
        strategy: a replica for each device.

    Raises:
        InputError: no layer holds experts, or the devices do not divide them.
    """
    groups = Groups(mesh.expert, mesh.data)
    found, where = banks.find(model, groups), device_placement.on_devices(mesh.devices)
    updates.install()
    shard_averages.install()
    gathered_variable.export_full_variables()
    balance.install(model)
    training.set_strategy(model, strategy)
    for bank in found:
        shards.spread(bank.layer, bank.names, where, strategy, groups)
        _run_in_groups(bank, groups)
    placement.move_variables(model, where, strategy)


def _run_in_groups(bank: Bank, groups: Groups) -> None:
    layer, stock = bank.layer, bank.layer.call
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def call(*args, **kwargs):
        if in_symbolic_scope():
            return stock(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        if step_context.current().is_trying:
            return _Tried(bank, groups).result(stock, bound)
        if replication.replica_context() is None:
            return stock(*args, **kwargs)
        facts = step_context.step()
        if facts is not None and (facts.whole is not None or facts.is_within_whole):
            raise InputError(
                f"A step that sees the whole batch cannot train {layer.name!r}, whose experts are on several devices. "
                "Use Keras's `train_step`, or one that gives each row its own number."
            )
        return _Run(bank, groups).result(stock, bound)

    override(layer, "call", call, by=__name__)


class _Run:
    """One call of a layer that holds experts, on one replica."""

    def __init__(self, bank: Bank, groups: Groups):
        self._bank, self._groups = bank, groups
        self._axes, self._join = bank.plan.arguments, bank.plan.styles["call"]

    def result(self, stock: Callable, bound: inspect.BoundArguments) -> tf.Tensor:
        """This replica's tokens, as its group's experts make them."""
        sizes = None
        for name, value in list(bound.arguments.items()):
            if tf.is_tensor(value) and value.shape.rank:
                parts = self._to_experts(name, value)
                axis = self._axis_of_tokens(name)
                sizes = sizes or [_size(part, axis) for part in parts]
                bound.arguments[name] = tf.concat(parts, axis)
        found = stock(*bound.args, **bound.kwargs)
        if not tf.is_tensor(found) or sizes is None:
            raise InputError(
                f"{self._bank.path!r} holds experts on several devices, so its `call` takes tensors of tokens and "
                f"returns one tensor. Received: {type(found).__name__}."
            )
        parts = self._groups.from_experts(_split(found, sizes, 1 if self._join == 0 else 0))
        return tf.add_n(parts) if self._join == "sum" else tf.concat(parts, self._join)

    def _to_experts(self, name: str, value: tf.Tensor) -> list[tf.Tensor]:
        """What all devices of the group have for this one's experts."""
        count = self._groups.size
        sent = tf.split(value, count, self._axes[name]) if name in self._axes else [value] * count
        return self._groups.to_experts(sent)

    def _axis_of_tokens(self, name: str) -> int:
        return 1 if self._axes.get(name) == 0 else 0


class _Tried(_Run):
    """A call within the trial of a layer around, on drawn rows: this device's experts stand in for all.

    What is looked at is whether each row has its own result.
    """

    def result(self, stock: Callable, bound: inspect.BoundArguments) -> tf.Tensor:
        count = self._groups.size
        for name, axis in self._axes.items():
            value = bound.arguments.get(name)
            if tf.is_tensor(value):
                bound.arguments[name] = tf.concat(tf.split(value, count, axis), self._axis_of_tokens(name))
        found = stock(*bound.args, **bound.kwargs)
        is_by_expert = 0 in self._axes.values()
        if self._join == "sum":
            return found
        parts = tf.split(found, count, 1 if self._join == 0 else 0) if is_by_expert else [found] * count
        return tf.concat(parts, self._join)


def _size(value: tf.Tensor, axis: int) -> int | tf.Tensor:
    return tf.shape(value)[axis] if value.shape[axis] is None else value.shape[axis]


def _split(value: tf.Tensor, sizes: Sequence, axis: int) -> list[tf.Tensor]:
    if all(isinstance(size, int) for size in sizes):
        return tf.split(value, list(sizes), axis)
    return tf.split(value, tf.stack(sizes), axis, num=len(sizes))

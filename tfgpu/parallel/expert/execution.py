"""Runs layers that hold experts: the tokens of all devices of a group go to the experts, and the results come back.

Each replica trains on its rows of the batch, as without `expert`; a layer of experts alone is spread. It gets what its
`call` is given from all devices of the group, runs the layer's own code with this device's experts, and sends each
device its part of the results: one exchange each way, and one each way in the backward pass.

KerasHub's blocks add a loss of the batch's means, which balances experts and is no mean over replicas: what it needs of
each token, one number for each expert, is brought together. What comes back to a device from all replicas of its group
is the gradient of the group's rows; it is summed over groups alone.

Source: Lepikhin et al., 2020, "GShard", https://arxiv.org/abs/2006.16668
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import keras
import tensorflow as tf

from tfgpu.compat import keras_hub, optimizers, training
from tfgpu.compat.keras import LossScaleOptimizer, in_symbolic_scope, name_scope
from tfgpu.compat.patch import override, wrap
from tfgpu.core import batch_rows, collectives, extensions, gradient_weights, gradients, replication, step_context
from tfgpu.core.row_mixing import row_sums
from tfgpu.errors import InputError
from tfgpu.optim import gradient_accumulation
from tfgpu.parallel import device_placement, model_graph, placement, shard_patches
from tfgpu.parallel.expert import shards
from tfgpu.parallel.expert.groups import Groups
from tfgpu.parallel.expert.shards import groups_of, is_of_experts
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.zero import gathered_variable
from tfgpu.parallel.zero import update as zero_update


def _balance(model: keras.Model) -> None:
    """Makes KerasHub's layers within a model balance their experts over all rows, in this process from now on."""
    for layer in model_graph.layers_within(model).values():
        if keras_hub.balances(type(layer)):
            _of_all_rows(sys.modules[type(layer).__module__])


@functools.cache
def _of_all_rows(module: ModuleType) -> None:
    @wrap(module, keras_hub.BALANCE, listed="*_load_balancing_loss")
    def compute(stock, router_logits, num_experts, top_k, attention_mask=None):
        if step_context.current().is_trying:
            return tf.zeros([], router_logits.dtype)  # the layer around is tried without it
        if _meets():
            router_logits = row_sums.all_rows(router_logits)
            if attention_mask is not None:
                attention_mask = _mask_of_all_rows(tf.convert_to_tensor(attention_mask))
        return stock(router_logits, num_experts=num_experts, top_k=top_k, attention_mask=attention_mask)


def _meets() -> bool:
    context = replication.replica_context()
    if context is None or context.num_replicas_in_sync == 1 or step_context.has_local_forward():
        return False
    return step_context.step() is not None or batch_rows.can_communicate()


def _mask_of_all_rows(mask: tf.Tensor) -> tf.Tensor:
    """[batch, length], or [batch, length, 1] of a mask of pairs, of which only whether a row has any is asked."""
    if mask.shape.rank == 3:
        mask = tf.reduce_any(tf.cast(mask, tf.bool), -1, keepdims=True)
    return row_sums.all_rows(mask)


class _ExpertUpdates(gradients.GradientExtension):
    """Sums the gradients of experts over groups, and all others over replicas."""

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        own = [at for at, variable in enumerate(update.variables) if is_of_experts(variable)]
        if not own:
            return None
        if not update.inner.built:
            with name_scope(update.optimizer.name, caller=update.optimizer):
                update.optimizer.build(list(update.variables))
        rest = [None if at in own else part for at, part in enumerate(parts)]
        if update.inner.gradient_accumulation_steps:
            found = gradient_accumulation.reduce_at_update(update, rest)
        else:
            found = collectives.sum_gradients(rest)
        there = [at for at in own if update.gradients[at] is not None]
        # Not the parts, which are weighed by this replica's rows: these are of the rows of all.
        given = [tf.convert_to_tensor(update.gradients[at]) for at in there]
        sums = groups_of(update.variables[own[0]]).sum_over_groups(given)
        for at, total in zip(there, sums, strict=True):
            found[at] = total
        return found

    @contextlib.contextmanager
    def around_update(self, update: gradients.Update, sums: list, named: list | None) -> Iterator[tuple]:
        if not any(map(is_of_experts, update.variables)):
            yield sums, named
            return
        if isinstance(update.optimizer, LossScaleOptimizer):  # so that all replicas skip a step
            sums, _ = zero_update.share_infinities(list(sums))
        scale = gradient_weights.loss_scale_of(update.optimizer)
        with contextlib.ExitStack() as stack:
            for each in optimizers.within(update.inner):
                stack.enter_context(_clipping(each, update.variables, sums, scale))
            yield sums, named


def _clipping(optimizer, variables: list, sums: list, scale) -> contextlib.AbstractContextManager:
    """Clips by the norms of all experts, which the devices of one group have."""
    trained = {id(variable) for variable in optimizers.trained(optimizer)}
    pairs = [
        (gradient, variable)
        for gradient, variable in zip(sums, variables, strict=True)
        if gradient is not None and id(variable) in trained
    ]
    targets = [variable for _, variable in pairs]
    counted = [not is_of_experts(each) or groups_of(each).own == 0 for each in targets]
    return shard_patches.full_norm_clipping(optimizer, [each for each, _ in pairs], targets, scale, counted)


@functools.cache
def _update_in_groups() -> None:
    """Makes optimizers update experts where they are, in this process from now on."""
    extensions.gradient_extensions.register(_ExpertUpdates(), order=35)
    extensions.xla_obstacles.register(lambda model: any(map(is_of_experts, model.variables)))


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
    found, where = shards.find(model, groups), device_placement.on_devices(mesh.devices)
    _update_in_groups()
    shard_patches.install_averages()
    gathered_variable.export_full_variables()
    _balance(model)
    training.set_strategy(model, strategy)
    for bank in found:
        shards.spread(bank.layer, bank.names, where, strategy, groups)
        _run_in_groups(bank, groups)
    placement.move_variables(model, where, strategy)


def _run_in_groups(bank: shards.Bank, groups: Groups) -> None:
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

    def __init__(self, bank: shards.Bank, groups: Groups):
        self._bank, self._groups = bank, groups
        self._axes, self._join = bank.plan.arguments, bank.plan.styles["call"]

    def result(self, stock: Callable, bound: inspect.BoundArguments) -> tf.Tensor:
        """This replica's tokens, as its group's experts make them."""
        sizes = None
        for name, value in list(bound.arguments.items()):
            if tf.is_tensor(value) and value.shape.rank:
                count, axis = self._groups.size, self._axis_of_tokens(name)
                sent = tf.split(value, count, self._axes[name]) if name in self._axes else [value] * count
                parts = self._groups.to_experts(sent)  # what all devices of the group have for this one's experts
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

"""Gradient compression (top-k with error feedback): each replica sends its largest numbers and keeps the rest.

Of every weight's gradient a replica sends the fraction `top_k` that is largest in magnitude, at least one number, with
the positions. The rest stays in the replica's residual, which is added to the gradient of the next step: nothing is
lost, only delayed. All replicas add what was sent in the same order, so their copies stay bit-equal.

Sources: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018 (https://arxiv.org/abs/1809.07599); Lin et al.,
"Deep gradient compression", 2018 (https://arxiv.org/abs/1712.01887).
"""

import math
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import collectives, extensions, gradient_weights, gradients, replication
from tfgpu.core.state import replica_values, training_state
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError


def set_top_k(strategy: tf.distribute.Strategy, top_k: float) -> None:
    """Makes the replicas of a strategy send this fraction of each gradient, above 0 and up to 1."""
    slots.of(strategy).top_k = top_k


def top_k_of(strategy: tf.distribute.Strategy) -> float | None:
    """The fraction of each gradient that is sent; None if all of it is."""
    return slots.get(strategy, "top_k")


class TopK(gradients.GradientExtension):
    """Sums what the replicas send of their gradients, under a strategy with `top_k`."""

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        """The sum of the largest numbers of the replicas' gradients; slices of embeddings are sent whole.

        Args:
            update: the call of the optimizer; its inner optimizer keeps the residual.
            parts: this replica's gradients: tensors, slices or None.

        Raises:
            InputError: gradients are accumulated over several batches, or have unknown shapes.
        """
        if top_k_of(replication.replica_context().strategy) is None:
            return None
        inner = update.inner
        if inner.gradient_accumulation_steps:
            raise InputError(
                f"`top_k` does not apply with gradient_accumulation_steps={inner.gradient_accumulation_steps}: its "
                "residual already accumulates. Remove one of them, or use `reduce_dtype`."
            )
        places = [at for at, gradient in enumerate(parts) if tf.is_tensor(gradient) and gradient.dtype.is_floating]
        found = collectives.sum_gradients([None if at in places else gradient for at, gradient in enumerate(parts)])
        if not places:
            return found
        dense = [parts[at] for at in places]
        sizes = [gradient.shape.num_elements() for gradient in dense]
        if None in sizes:
            raise InputError("`top_k` needs gradients of known shapes. Use `reduce_dtype`.")
        key = tuple(getattr(update.variables[at], "path", update.variables[at].name) for at in places)
        scale = tf.cast(gradient_weights.loss_scale_of(update.optimizer), tf.float32)
        flat = tf.concat([tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in dense], 0) / scale
        total = tf.split(_exchange(flat, sizes, _residual(inner, key, sum(sizes))) * scale, sizes)
        for at, gradient, value in zip(places, dense, total, strict=True):
            found[at] = tf.cast(tf.reshape(value, gradient.shape), gradient.dtype)
        return found


extensions.gradient_extensions.register(TopK(), order=20)


class ResidualState(training_state.StateProvider):
    """The residuals of all replicas in a checkpoint, as `residual/OPTIMIZER/0000`: float32 [replicas, numbers]."""

    def each_replica(self, model) -> dict[str, tf.Variable]:
        return {
            f"residual/{name}/{at:04d}": residual
            for name, optimizer in training_state.optimizers(model).items()
            for at, residual in enumerate(residuals(optimizer))
        }

    def put_arrays(self, model, arrays: Mapping[str, np.ndarray | ArraySlices]) -> None:
        for name, optimizer in training_state.optimizers(model).items():
            saved = [arrays[key] for key in sorted(arrays) if key.startswith(f"residual/{name}/")]
            slots.of(_inner(optimizer)).saved_residuals = saved  # one that is not made yet gets its value then
            for at, residual in enumerate(residuals(optimizer)):
                shape = (model.distribute_strategy.num_replicas_in_sync, *residual.shape)
                found = saved[at] if at < len(saved) else np.zeros(shape, "float32")
                replica_values.assign(model.distribute_strategy, residual, found, "sum")


extensions.state_providers.register(ResidualState())


def residuals(optimizer) -> list[tf.Variable]:
    """What each replica has not sent yet, in the order in which the residuals were made."""
    return list(slots.get(_inner(optimizer), "residuals", {}).values())


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _exchange(flat: tf.Tensor, sizes: list[int], residual: tf.Variable) -> tf.Tensor:
    """The sum of what all replicas send of their gradients and residuals; updates this replica's residual.

    If a number is not finite, all replicas get NaN and keep their residuals: such a step is skipped, or ends the run.

    Args:
        flat: the gradients of all weights in a row.
        sizes: how many numbers each weight has.
        residual: what this replica has not sent yet, in the same order.
    """
    context = replication.replica_context()
    is_finite = tf.reduce_all(tf.math.is_finite(flat))
    unsent = tf.identity(residual)
    flat += unsent
    places = _largest(flat, sizes, top_k_of(context.strategy))
    values = tf.gather(flat, places)
    values = tf.where(is_finite, values, tf.fill(tf.shape(values), float("nan")))
    (sent,) = collectives.all_reduce([tf.IndexedSlices(values, places, tf.shape(flat))])
    total, replicas = tf.zeros_like(flat), context.num_replicas_in_sync
    shares = zip(tf.split(sent.values, replicas), tf.split(sent.indices, replicas), strict=True)
    for theirs, at in shares:  # in one order on all replicas: bit-equal sums
        total = tf.tensor_scatter_nd_add(total, at[:, None], theirs)
    left = tf.tensor_scatter_nd_update(flat, places[:, None], tf.zeros_like(values))
    residual.assign(tf.where(tf.reduce_all(tf.math.is_finite(total)), left, unsent))
    return total


def _largest(flat: tf.Tensor, sizes: list[int], top_k: float) -> tf.Tensor:
    """The positions of each weight's numbers of largest magnitude."""
    places, start = [], 0
    for size, part in zip(sizes, tf.split(flat, sizes), strict=True):
        count = min(size, max(1, math.ceil(top_k * size)))
        places.append(tf.math.top_k(tf.abs(part), count, sorted=False).indices + start)
        start += size
    return tf.concat(places, 0)


def _residual(inner, key: tuple[str, ...], size: int) -> tf.Variable:
    """This optimizer's residual for these weights, with a value of its own on each replica; made on first use."""
    state, strategy = slots.of(inner), replication.replica_context().strategy
    if not hasattr(state, "residuals"):
        state.residuals = {}
    found = state.residuals

    def make():
        found[key] = tf.Variable(tf.zeros([size]), trainable=False, aggregation=tf.VariableAggregation.NONE)
        saved = getattr(state, "saved_residuals", [])
        if len(found) <= len(saved):
            replica_values.assign(strategy, found[key], saved[len(found) - 1], "sum")

    if key not in found:
        replication.run_cross_replica(strategy, make)
    return found[key]

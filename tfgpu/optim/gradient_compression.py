"""Sparse gradients with error feedback: each replica sends its largest numbers, and keeps the rest for the next steps.

Of every weight's gradient a replica sends the `top_k` part that is largest in magnitude, at least one number, with the
places. What it did not send stays in a residual of its own, which is added to the next step's gradient: nothing is
lost, only late. All replicas add what was sent in the same order, so that their copies stay equal to the bit.

Sources: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018 (https://arxiv.org/abs/1809.07599); Lin et al.,
"Deep gradient compression", 2018 (https://arxiv.org/abs/1712.01887).
"""

import math

import numpy as np
import tensorflow as tf

from tfgpu.core import (
    broadcast,
    collectives,
    extensions,
    gradient_weights,
    gradients,
    replication,
    training_state,
)
from tfgpu.errors import InputError


def send_largest(strategy: tf.distribute.Strategy, top_k: float) -> None:
    """Lets the replicas of a strategy send this part of each gradient, above 0 and up to 1."""
    strategy._tfgpu_top_k = top_k


def top_k_of(strategy: tf.distribute.Strategy) -> float | None:
    """The part of each gradient that is sent, or None where all of it is."""
    return getattr(strategy, "_tfgpu_top_k", None)


class _TopK(gradients.GradientExtension):
    def sum(self, update: gradients.Update, parts: list) -> list | None:
        if top_k_of(replication.replica_context().strategy) is None:
            return None
        return meet(update.optimizer, update.inner, parts, update.variables)


extensions.gradient_extensions.register(_TopK(), order=20)


def meet(optimizer, inner, grads: list, variables: list) -> list:
    """The sum over replicas of what each sends of its gradients; slices of embeddings are sent whole.

    Args:
        optimizer: the optimizer that applies them, which may scale the loss.
        inner: the same without loss scaling; it keeps the residual.
        grads: this replica's parts: tensors, slices or None.
        variables: what the gradients are of.

    Raises:
        InputError: gradients are accumulated over several batches.
    """
    if inner.gradient_accumulation_steps:
        raise InputError(
            f"`top_k` does not apply with gradient_accumulation_steps={inner.gradient_accumulation_steps}: its "
            "residual accumulates already. Leave one of them out, or use `reduce_dtype`."
        )
    places = [at for at, g in enumerate(grads) if tf.is_tensor(g) and g.dtype.is_floating]
    out = collectives.all_reduce([None if at in places else g for at, g in enumerate(grads)])
    if not places:
        return out
    parts = [grads[at] for at in places]
    if any(part.shape.num_elements() is None for part in parts):
        raise InputError("`top_k` needs gradients of known shapes. Use `reduce_dtype`.")
    key = tuple(getattr(variables[at], "path", variables[at].name) for at in places)
    scale = tf.cast(gradient_weights.loss_scale_of(optimizer), tf.float32)
    sizes = [part.shape.num_elements() for part in parts]
    flat = tf.concat([tf.reshape(tf.cast(part, tf.float32), [-1]) for part in parts], 0) / scale
    total = tf.split(_summed(flat, sizes, _residual(inner, key, sum(sizes))) * scale, sizes)
    for at, part, value in zip(places, parts, total, strict=True):
        out[at] = tf.cast(tf.reshape(value, part.shape), part.dtype)
    return out


class ResidualState(training_state.StateProvider):
    """The residuals of all replicas in a checkpoint, as `residual/OPTIMIZER/0000`: float32 [replicas, numbers]."""

    def arrays(self, model) -> dict[str, np.ndarray]:
        strategy = model.distribute_strategy
        return {
            f"residual/{name}/{at:04d}": broadcast.parts(strategy, residual)
            for name, optimizer in training_state.optimizers(model).items()
            for at, residual in enumerate(residuals(optimizer))
        }

    def put_arrays(self, model, arrays: dict[str, np.ndarray]) -> None:
        for name, optimizer in training_state.optimizers(model).items():
            saved = [arrays[key] for key in sorted(arrays) if key.startswith(f"residual/{name}/")]
            restore_residuals(model.distribute_strategy, optimizer, saved)


training_state.register(ResidualState())


def residuals(optimizer) -> list[tf.Variable]:
    """What each replica has not sent yet, in the order in which the residuals were made."""
    return list(getattr(_inner(optimizer), "_tfgpu_residuals", {}).values())


def restore_residuals(strategy: tf.distribute.Strategy, optimizer, saved: list[np.ndarray]) -> None:
    """Restores an optimizer's residuals; one that is not made yet gets its value when it is made.

    Args:
        strategy: the model's.
        optimizer: with or without loss scaling.
        saved: float32 [replicas, numbers] for each residual; those that are missing start from zero.
    """
    inner = _inner(optimizer)
    inner._tfgpu_kept = list(saved)
    for at, residual in enumerate(residuals(optimizer)):
        found = saved[at] if at < len(saved) else np.zeros((strategy.num_replicas_in_sync, *residual.shape), "float32")
        broadcast.put_parts(strategy, residual, found, "sum")


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _summed(flat: tf.Tensor, sizes: list[int], residual: tf.Variable) -> tf.Tensor:
    """The sum of what all replicas send of their gradients and residuals; the residual keeps what this one does not.

    Numbers that are not finite are seen by all, and leave the residuals as they were: such a step is skipped, or ends
    the run.
    """
    top_k, replicas = (
        top_k_of(replication.replica_context().strategy),
        replication.replica_context().num_replicas_in_sync,
    )
    is_finite = tf.reduce_all(tf.math.is_finite(flat))
    waiting = tf.identity(residual)
    flat += waiting
    places, start = [], 0
    for part in tf.split(flat, sizes):
        size = part.shape.num_elements()
        count = min(size, max(1, math.ceil(top_k * size)))
        places.append(tf.math.top_k(tf.abs(part), count, sorted=False).indices + start)
        start += size
    places = tf.concat(places, 0)
    values = tf.gather(flat, places)
    values = tf.where(is_finite, values, tf.fill(tf.shape(values), float("nan")))
    (sent,) = collectives.all_reduce([tf.IndexedSlices(values, places, tf.shape(flat))])
    total, where = tf.zeros_like(flat), tf.split(sent.indices, replicas)
    for theirs, at in zip(tf.split(sent.values, replicas), where, strict=True):  # in one order: equal to the bit
        total = tf.tensor_scatter_nd_add(total, at[:, None], theirs)
    left = tf.tensor_scatter_nd_update(flat, places[:, None], tf.zeros_like(values))
    residual.assign(tf.where(tf.reduce_all(tf.math.is_finite(total)), left, waiting))
    return total


def _residual(inner, key: tuple[str, ...], size: int) -> tf.Variable:
    """This optimizer's residual for these weights: each replica has its own."""
    if not hasattr(inner, "_tfgpu_residuals"):
        inner._tfgpu_residuals = {}
    found, strategy = inner._tfgpu_residuals, replication.replica_context().strategy

    def make():
        found[key] = tf.Variable(tf.zeros([size]), trainable=False, aggregation=tf.VariableAggregation.NONE)
        kept = getattr(inner, "_tfgpu_kept", [])
        if len(found) <= len(kept):
            broadcast.put_parts(strategy, found[key], kept[len(found) - 1], "sum")

    if key not in found:
        replication.run_cross_replica(strategy, make)
    return found[key]

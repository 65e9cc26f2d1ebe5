"""Clips the gradients of sharded variables by the norms of the full variables.

`clipnorm` clips each variable by its norm and needs the norm over all shards; `global_clipnorm` also needs the pieces
of all replicas.
"""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfgpu.compat import optimizers
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, replication, step_context
from tfgpu.core.state.sharded_variable import has_shards, shard_info

_factors = step_context.Slot("shard_clipping.factors")
"""By the id of the optimizer: what each gradient is multiplied by, in their order."""


def install() -> None:
    """Makes optimizers clip in this way; called once per process, by `shard_patches`."""

    @wrap("BaseOptimizer.backend_apply_gradients")
    def apply_gradients(stock, self, grads, trainable_variables):
        if _factors_of(self) is not None or not self.clipnorm or not has_shards(trainable_variables):
            return stock(self, grads, trainable_variables)
        with full_norm_clipping(self, grads, trainable_variables):
            return stock(self, grads, trainable_variables)

    @wrap("BaseOptimizer.clip_gradients")
    def clip_gradients(stock, self, grads):
        factors = _factors_of(self)
        if factors is None:
            return stock(self, grads)
        if self.global_clipnorm:  # Keras makes tensors of slices there
            return [tf.convert_to_tensor(g) * tf.cast(f, g.dtype) for g, f in zip(grads, factors, strict=True)]
        return [_scaled(gradient, factor) for gradient, factor in zip(grads, factors, strict=True)]


def _factors_of(optimizer) -> list | None:
    return (_factors.get() or {}).get(id(optimizer))


@contextlib.contextmanager
def full_norm_clipping(
    optimizer, grads: Sequence, variables: Sequence, scale=1.0, counted: Sequence[bool] | None = None
) -> Iterator[None]:
    """In the block, the optimizer clips the gradients of shards by the norms of the full variables.

    The norms are computed before the block, outside the conditions of accumulation and float16, where replicas could
    not communicate.

    Args:
        optimizer: not a `LossScaleOptimizer`, but the optimizer within it; built.
        grads: None for one that another replica has, and which is not clipped here.
        variables: one for each gradient; shards or not.
        scale: what the gradients will be divided by before they are clipped.
        counted: which gradients count for the sums over replicas, as others hold some of them too; None counts all.
    """
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        yield
        return
    squares = _squared_norms(optimizer, grads, variables, scale, counted or [True] * len(grads))
    if optimizer.clipnorm:
        norms = {key: tf.sqrt(value) for key, value in squares.items()}
        factors = {key: optimizer.clipnorm / tf.maximum(norm, optimizer.clipnorm) for key, norm in norms.items()}
    else:
        norm, most = tf.sqrt(tf.add_n(list(squares.values()))), optimizer.global_clipnorm
        factors = dict.fromkeys(squares, most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm))
    pairs = zip(grads, variables, strict=True)
    own = [factors[_outermost(variable)] for gradient, variable in pairs if gradient is not None]
    with _factors.set_to({**(_factors.get() or {}), id(optimizer): own}):
        yield


def _squared_norms(optimizer, grads: Sequence, variables: Sequence, scale, counted: Sequence[bool]) -> dict:
    """The squared norm of each gradient that will be clipped, summed over the shards of a variable."""
    squares: dict = {}
    for gradient, variable, counts in zip(grads, variables, counted, strict=True):
        if gradient is None or not counts:
            squares.setdefault(_outermost(variable), []).append(tf.zeros([], variable.dtype))
            continue
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values = values / tf.cast(scale, values.dtype)
        if optimizer.gradient_accumulation_steps:
            total = optimizers.accumulator(optimizer, variable)
            values = (values + total) / optimizer.gradient_accumulation_steps
        squares.setdefault(_outermost(variable), []).append(tf.reduce_sum(tf.square(values)))
    totals = {key: tf.cast(tf.add_n(found), tf.float32) for key, found in squares.items()}
    sharded = [variable for variable in variables if shard_info(variable) is not None]
    over = {_outermost(variable) for variable in sharded if shard_info(variable).sharding.over_replicas}
    if over and replication.replica_context() is not None:
        keys = [key for key in totals if key in over]
        (summed,) = collectives.sum_small([tf.stack([totals[key] for key in keys])])
        totals |= dict(zip(keys, tf.unstack(summed, len(keys)), strict=True))
    return totals


def _scaled(gradient, factor: tf.Tensor):
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _outermost(variable):
    """Identifies the full variable that a variable belongs to, past shards of shards."""
    info = shard_info(variable)
    if info is None:
        return id(variable)
    while info.outer is not None:
        info = info.outer
    return info.of

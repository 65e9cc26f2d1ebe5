"""The update of a sharded optimizer: Keras's own update runs on pieces, and what comes out is gathered."""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfgpu.compat import optimizers
from tfgpu.compat.keras import LossScaleOptimizer, name_scope
from tfgpu.core import collectives, gradient_weights, gradients, replication, step_context, traffic
from tfgpu.core.state import layer_state
from tfgpu.core.state.sharded_variable import full_variable, shard_of
from tfgpu.parallel import shard_clipping
from tfgpu.parallel.zero.reduction import all_gather, local_piece, reduce_gradients
from tfgpu.parallel.zero.sharding import device_of, is_fully_sharded, is_sharded, state_of


class ShardedUpdates(gradients.GradientExtension):
    """Gradients of sharded variables are summed in pieces, and each replica updates its own piece."""

    def variable_of(self, variable):
        return full_variable(variable)

    def arrive_summed(self, update: gradients.Update) -> bool:
        return any(map(is_fully_sharded, update.variables))

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        if not parts or not any(map(is_sharded, update.variables)):
            return None
        return reduce_gradients(update.inner, parts, update.variables)

    @contextlib.contextmanager
    def around_update(self, update: gradients.Update, sums: list, named: list | None) -> Iterator[tuple]:
        if not any(map(is_sharded, update.variables)):
            yield sums, named
            return
        with sharded_update(update.optimizer, update.inner, sums, update.variables) as pieces:
            yield pieces, None if named is None else [shard_of(variable) for variable in update.variables]


@contextlib.contextmanager
def sharded_update(optimizer, inner, pieces: list, variables: Sequence) -> Iterator[list]:
    """Surrounds an optimizer's own update: yields the gradients to apply, and gathers the updated variables.

    Args:
        optimizer: the one that is called.
        inner: the optimizer inside loss scaling; without loss scaling, the same.
        pieces: pieces of the gradients, from `reduce_gradients`; None without a gradient.
        variables: sharded, one for each piece.
    """
    if not inner.built:
        with name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    shards = [shard_of(variable) for variable in variables]
    _refresh_shards(optimizers.trained(inner))
    pieces = [_on_shards_device(piece, shard) for piece, shard in zip(pieces, shards, strict=True)]
    all_finite = None
    if isinstance(optimizer, LossScaleOptimizer):
        pieces, all_finite = _share_infinities(pieces)
    given = [(piece, shard) for piece, shard in zip(pieces, shards, strict=True) if piece is not None]
    scale = gradient_weights.loss_scale_of(optimizer)
    with shard_clipping.full_norm_clipping(inner, *zip(*given, strict=True), scale):
        yield pieces
    changed = optimizers.trained(inner) if inner.use_ema else [shard for _, shard in given]
    _gather_changed(inner, changed)
    for shard in changed:
        _apply_constraint(shard, all_finite)


def _refresh_shards(shards: Sequence) -> None:
    """Gives each shard this replica's piece of the variable, whatever assigned it since the last step."""
    for shard in shards:
        if not is_fully_sharded(shard):
            with tf.device(device_of(shard)):
                layer_state.own(shard).assign(local_piece(layer_state.own(full_variable(shard)), shard))


def _on_shards_device(piece, shard):
    if piece is None:
        return None
    with tf.device(layer_state.own(shard).device):
        return tf.nest.map_structure(tf.identity, piece, expand_composites=True)


def _share_infinities(pieces: list) -> tuple[list, tf.Tensor]:
    """Adds infinity to one piece where any replica's pieces are not finite, so that all replicas skip the step.

    Returns:
        The pieces, and whether all replicas' pieces are finite.
    """
    values = [p.values if isinstance(p, tf.IndexedSlices) else p for p in pieces if p is not None]
    is_bad = tf.reduce_any(tf.stack([tf.reduce_any(~tf.math.is_finite(value)) for value in values]))
    (count,) = collectives.sum_small([tf.cast(is_bad, tf.float32)])
    first = next(at for at, piece in enumerate(pieces) if piece is not None)
    piece = pieces[first]
    more = tf.where(count < 0.5, tf.zeros([], piece.dtype), tf.constant(float("inf"), piece.dtype))
    if isinstance(piece, tf.IndexedSlices):
        pieces[first] = tf.IndexedSlices(piece.values + more, piece.indices, piece.dense_shape)
    else:
        pieces[first] = piece + more
    return pieces, count < 0.5


def _gather_changed(optimizer, shards: Sequence) -> None:
    """Gives every replica's copies of the variables the new pieces of all replicas."""
    if all(map(is_fully_sharded, shards)):
        return
    overwrites_by_average = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if optimizer.gradient_accumulation_steps and not overwrites_by_average:
        _gather_if_updated(optimizer, shards)
    else:
        _gather(shards)


def _gather(shards: Sequence) -> None:
    for shard, found in zip(shards, all_gather([layer_state.own(shard) for shard in shards], shards), strict=True):
        with tf.device(device_of(shard)):
            layer_state.own(full_variable(shard)).assign(found)


def _gather_if_updated(optimizer, shards: Sequence) -> None:
    """Gathers only in the batch that completes an update: across replicas, a condition may contain collectives."""

    def across(strategy):
        def gather():
            strategy.extended.call_for_each_replica(_gather, args=(shards,))
            return 0

        count = optimizers.iterations(optimizer).value  # includes this batch
        tf.cond(count % optimizer.gradient_accumulation_steps == 0, gather, lambda: 0)

    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        size = sum(shard.shape[0] for shard in shards if shard.dtype == dtype)
        traffic.note([tf.TensorSpec([size], dtype)], part=1 / optimizer.gradient_accumulation_steps)
    with step_context.outside_xla():
        replication.replica_context().merge_call(across)


def _apply_constraint(shard, all_finite: tf.Tensor | None) -> None:
    constraint = state_of(shard).variable.constraint
    if constraint is None:
        return
    copy, has_pieces = layer_state.own(full_variable(shard)), is_fully_sharded(shard)
    with tf.device(device_of(shard)):
        before = all_gather([copy], [shard])[0] if has_pieces else tf.convert_to_tensor(copy)
        found = tf.cast(constraint(before), copy.dtype)
        found = local_piece(found, shard) if has_pieces else found
        copy.assign(found if all_finite is None else tf.where(all_finite, found, copy))

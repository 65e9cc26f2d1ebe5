"""The update of a sharded optimizer: Keras's own runs on pieces and whole variables; what comes out is gathered."""

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfgpu.compat import optimizers
from tfgpu.compat.keras import LossScaleOptimizer, name_scope
from tfgpu.core import collectives, gradient_weights, gradients, replication, step_context, traffic
from tfgpu.core.state import layer_state
from tfgpu.core.state.sharded_variable import full_variable
from tfgpu.parallel import shard_patches
from tfgpu.parallel.zero import owner_exchange
from tfgpu.parallel.zero.dealing import flat_of, is_dealt, owners_of, target_of
from tfgpu.parallel.zero.reduction import all_gather, local_piece, reduce_gradients
from tfgpu.parallel.zero.sharding import device_of, is_fully_sharded, is_sharded, state_of


class ShardedUpdates(gradients.GradientExtension):
    """Gradients of sharded variables are summed in pieces or at owners; each replica updates what is its own."""

    def variable_of(self, variable):
        return full_variable(variable)

    def arrive_summed(self, update: gradients.Update) -> bool:
        return any(map(is_fully_sharded, update.variables))

    def sum(self, update: gradients.Update, parts: list) -> list | None:
        if not parts or not any(map(is_sharded, update.variables)):
            return None
        if not update.inner.built:
            with name_scope(update.optimizer.name, caller=update.optimizer):
                update.optimizer.build(list(update.variables))
        return reduce_gradients(update.inner, parts, update.variables)

    @contextlib.contextmanager
    def around_update(self, update: gradients.Update, sums: list, named: list | None) -> Iterator[tuple]:
        if not any(map(is_sharded, update.variables)):
            yield sums, named
            return
        with _ShardedUpdate(update).of(sums) as (pieces, targets):
            yield pieces, None if named is None and len(pieces) == len(sums) else targets


class _ShardedUpdate:
    """Surrounds an optimizer's own update.

    Args:
        update: its variables are sharded, and its optimizer is built.
    """

    def __init__(self, update: gradients.Update):
        self._optimizer, self._inner = update.optimizer, update.inner
        self._targets = [target_of(variable) for variable in update.variables]
        self._has_gradient = [gradient is not None for gradient in update.gradients]
        self._each = [each for each in optimizers.within(update.inner) if optimizers.trained(each)]

    @contextlib.contextmanager
    def of(self, sums: list) -> Iterator[tuple[list, list]]:
        """Yields the gradients to apply and their variables, without those of other owners; gathers what has changed.

        Args:
            sums: from `reduce_gradients`.
        """
        _refresh(optimizers.trained(self._inner))
        sums = [_on_shards_device(piece, target) for piece, target in zip(sums, self._targets, strict=True)]
        all_finite = None
        if isinstance(self._optimizer, LossScaleOptimizer):
            sums, all_finite = share_infinities(sums)
        pairs = zip(self._targets, self._has_gradient, sums, strict=True)
        mine = [not has or piece is not None for _, has, piece in pairs]
        scale = gradient_weights.loss_scale_of(self._optimizer)
        with contextlib.ExitStack() as stack:
            for each in self._each:
                stack.enter_context(self._clipping(each, sums, scale))
            for each in {id(each): each for each in (self._inner, *self._each)}.values():
                if any(map(is_dealt, optimizers.trained(each))):
                    stack.enter_context(optimizers.handling(each, _is_updated_here))
            yield _where(sums, mine), _where(self._targets, mine)
        for each in self._each:
            _gather_changed(each, self._changed(each))
        for each in self._each:
            for target in self._changed(each):
                _apply_constraint(target, all_finite)

    def _places(self, optimizer) -> list[int]:
        """The positions of an optimizer's variables that have a gradient."""
        own = {id(target) for target in optimizers.trained(optimizer)}
        return [at for at, each in enumerate(self._targets) if id(each) in own and self._has_gradient[at]]

    def _changed(self, optimizer) -> list:
        if optimizer.use_ema:
            return optimizers.trained(optimizer)
        return [self._targets[at] for at in self._places(optimizer)]

    def _clipping(self, optimizer, sums: list, scale) -> contextlib.AbstractContextManager:
        places = self._places(optimizer)
        targets = [self._targets[at] for at in places]
        counted = [not is_dealt(each) or owners_of(each)[0] == owner_exchange.this_replica() for each in targets]
        return shard_patches.full_norm_clipping(optimizer, [sums[at] for at in places], targets, scale, counted)


def _where(values: list, wanted: list[bool]) -> list:
    return [value for value, want in zip(values, wanted, strict=True) if want]


def _is_updated_here(target) -> bool:
    return not is_dealt(target) or owner_exchange.is_held(target)


def _refresh(targets: Sequence) -> None:
    """Gives each shard what is this replica's of the variable, whatever assigned it since the last step."""
    for target in targets:
        if not is_dealt(target) and not is_fully_sharded(target):
            with tf.device(device_of(target)):
                layer_state.own(target).assign(local_piece(layer_state.own(full_variable(target)), target))
    dealt = [target for target in targets if is_dealt(target)]
    if not dealt:
        return
    wholes = [layer_state.own(full_variable(target)) for target in dealt]
    if is_fully_sharded(flat_of(dealt[0])):
        wholes = owner_exchange.pieces_to_owners(wholes, dealt)
    for target, whole in zip(dealt, wholes, strict=True):
        if owner_exchange.is_held(target):
            with tf.device(device_of(target)):
                layer_state.own(target).assign(whole)


def _on_shards_device(piece, shard):
    if piece is None:
        return None
    with tf.device(layer_state.own(shard).device):
        return tf.nest.map_structure(tf.identity, piece, expand_composites=True)


def share_infinities(pieces: list) -> tuple[list, tf.Tensor]:
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


def _gather_changed(optimizer, targets: Sequence) -> None:
    """Gives every replica's copies of the variables what the replicas have updated."""
    targets = [target for target in targets if is_dealt(target) or not is_fully_sharded(target)]
    if not targets:
        return
    overwrites_by_average = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if optimizer.gradient_accumulation_steps and not overwrites_by_average:
        _gather_if_updated(optimizer, targets)
    else:
        _gather(targets)


def _gather(targets: Sequence) -> None:
    flat = [target for target in targets if not is_dealt(target)]
    dealt = [target for target in targets if is_dealt(target)]
    found = all_gather([layer_state.own(target) for target in flat], flat)
    if dealt:
        given, has_pieces = [layer_state.own(target) for target in dealt], is_fully_sharded(flat_of(dealt[0]))
        send = owner_exchange.pieces_from_owners if has_pieces else owner_exchange.send_from_owners
        found += send(given, dealt)
    for target, value in zip((*flat, *dealt), found, strict=True):
        with tf.device(device_of(target)):
            layer_state.own(full_variable(target)).assign(value)


def _gather_if_updated(optimizer, targets: Sequence) -> None:
    """Gathers only in the batch that completes an update: across replicas, a condition may contain collectives."""

    def across(strategy):
        def gather():
            strategy.extended.call_for_each_replica(_gather, args=(targets,))
            return 0

        count = optimizers.iterations(optimizer).value  # includes this batch
        tf.cond(count % optimizer.gradient_accumulation_steps == 0, gather, lambda: 0)

    for dtype in dict.fromkeys(target.dtype for target in targets):
        size = sum(flat_of(target).shape[0] for target in targets if target.dtype == dtype)
        traffic.note([tf.TensorSpec([size], dtype)], part=1 / optimizer.gradient_accumulation_steps)
    with step_context.outside_xla():
        replication.replica_context().merge_call(across)


def _apply_constraint(target, all_finite: tf.Tensor | None) -> None:
    constraint, shard = state_of(target).variable.constraint, flat_of(target)
    if constraint is None:
        return
    copy, has_pieces = layer_state.own(full_variable(shard)), is_fully_sharded(shard)
    with tf.device(device_of(shard)):
        before = all_gather([copy], [shard])[0] if has_pieces else tf.convert_to_tensor(copy)
        found = tf.cast(constraint(before), copy.dtype)
        found = local_piece(found, shard) if has_pieces else found
        copy.assign(found if all_finite is None else tf.where(all_finite, found, copy))

"""The sharded optimizer: each replica updates a piece of every variable, and holds the slots of that piece alone.

A sharded variable has a shard: a flat Keras variable whose copy on a replica is that replica's piece. Keras's optimizer
is built on the shards and applied to them, unchanged. Around it, in each step:

1. the gradients meet: in stage 1 every replica gets their sum and takes its piece, in stage 2 it gets its piece alone;
2. each replica takes its piece of the variable, which between steps is the truth: what anybody assigned counts;
3. what depends on all pieces is brought together: whether all numbers are finite, and the norms that clipping needs;
4. Keras unscales, accumulates, clips, decays, updates and averages the pieces;
5. the new pieces are gathered into the variable on every replica.

To files, checkpoints and `get_weights` the slots are those of one device: a shard's slot is a `parts.Part`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks import swap_ema_weights
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfgpu.errors import InputError
from tfgpu.keras_fixes import accumulation, elementwise, exchanges, homes, meter, parts, replica, sharing, state
from tfgpu.keras_fixes.seam import wrap

BUCKET_BYTES = 32 << 20
"""Of gradients that travel in one collective, so that the first can leave while others are computed."""


@dataclass(frozen=True)
class Flat:
    """A variable's numbers in a row, cut into a piece for each replica; the last is filled up with zeros."""

    sizes: tuple[int, ...]
    over_replicas = True

    def shape(self, found: Sequence) -> tuple[int, ...]:
        return self.sizes

    def read(self, found: Sequence) -> np.ndarray:
        """The whole; on several workers every one must call this."""
        value = found[0]._value
        bits = sharing.parts(value.distribute_strategy, value)
        flat = sharing.from_bits(bits, tf.as_dtype(value.dtype).as_numpy_dtype().dtype).reshape(-1)
        return flat[: int(np.prod(self.sizes))].reshape(self.sizes)

    def write(self, found: Sequence, value: np.ndarray) -> None:
        variable = found[0]._value
        strategy = variable.distribute_strategy
        rows = np.zeros((strategy.num_replicas_in_sync, *variable.shape), value.dtype)
        rows.reshape(-1)[: value.size] = value.reshape(-1)
        sharing.put_parts(strategy, variable, rows, "first")


@dataclass(frozen=True)
class Sharding:
    """How a model's variables are sharded: stage 1, 2 or 3, and whether pieces and slots live in the host's memory."""

    stage: int
    offload: bool


def cut(variables: Sequence, strategy: tf.distribute.Strategy, how: Sharding) -> None:
    """Gives each variable a shard, on the devices of its copies; optimizers that are built from now on use them."""
    _use_shards()
    if how.offload:
        strategy._tfgpu_has_homes = True
    on_host = homes.home(["CPU:0"] * strategy.num_replicas_in_sync)
    for variable in variables:
        size = -(-int(np.prod(variable.shape)) // strategy.num_replicas_in_sync)
        with strategy.scope(), homes.at(on_host) if how.offload else _beside(variable, strategy):
            shard = keras.Variable(np.zeros(size), dtype=variable.dtype, name=variable.name)
        shard._path = variable.path
        parts.mark([shard], Flat(tuple(variable.shape)), variable.path, parts.part_of(variable))
        shard._tfgpu_sharding, shard._tfgpu_full = how, variable
        variable._tfgpu_shard = shard


@contextlib.contextmanager
def _beside(variable, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Puts new variables where this one's copies are."""
    with strategy.extended.colocate_vars_with(variable._value):
        yield


def full_of(variable):
    """The variable whose shard this is; any other variable itself."""
    return getattr(variable, "_tfgpu_full", variable)


def shard_of(variable):
    """A sharded variable's shard; any other variable itself."""
    return getattr(variable, "_tfgpu_shard", variable)


def is_sharded(variable) -> bool:
    """Whether a variable is a shard, or has one."""
    return hasattr(shard_of(variable), "_tfgpu_full")


def meet(optimizer, grads: list, variables: Sequence) -> list:
    """This replica's pieces of the sums of gradients; None stays None.

    Args:
        optimizer: not a `LossScaleOptimizer`, but the one within it.
        grads: this replica's parts, as large as the variables; tensors or IndexedSlices.
        variables: sharded.
    """
    shards, found = [shard_of(variable) for variable in variables], list(grads)
    if optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor is not None:  # Keras makes tensors, too
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
    scatter = shards[0]._tfgpu_sharding.stage > 1
    meets_whole = [g is not None and (not scatter or isinstance(g, tf.IndexedSlices)) for g in found]
    whole = [at for at, is_whole in enumerate(meets_whole) if is_whole]
    sent = [found[at] for at in whole]
    for at, total in zip(whole, replica.widened(replica.all_reduce(replica.narrowed(sent)), sent), strict=True):
        found[at] = _piece(total, shards[at])
    rest = [at for at, g in enumerate(found) if g is not None and at not in set(whole)]
    for bucket in _buckets(rest[::-1], found, shards):  # the last layers' gradients are there first
        for at, piece in zip(bucket, _scattered(bucket, found, shards), strict=True):
            found[at] = piece
    return found


@contextlib.contextmanager
def updating(optimizer, inner, pieces: list, variables: Sequence) -> Iterator[list]:
    """Around an optimizer's own update: gives the pieces of the gradients to be applied, and gathers what comes out."""
    shards = [shard_of(variable) for variable in variables]
    if not inner.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    for shard in inner._trainable_variables:
        with tf.device(state.own(full_of(shard)).device):
            state.own(shard).assign(_row(state.own(full_of(shard)), shard))
    pieces = [piece if piece is None else _at_home(piece, shard) for piece, shard in zip(pieces, shards, strict=True)]
    is_finite = None
    if isinstance(optimizer, LossScaleOptimizer):
        pieces, is_finite = _finite_for_all(pieces)
    given = [(piece, shard) for piece, shard in zip(pieces, shards, strict=True) if piece is not None]
    with parts.clipping(inner, *zip(*given, strict=True), accumulation.scale_of(optimizer)):
        yield pieces
    changed = inner._trainable_variables if inner.use_ema else [shard for _, shard in given]
    if inner.gradient_accumulation_steps and not (inner.use_ema and inner.ema_overwrite_frequency):
        _gather_at_update(inner, changed)
    else:
        _gather(changed)
    for shard in changed:
        _constrain(full_of(shard), is_finite)


def _piece(total, shard):
    """This replica's piece of a gradient that every replica has."""
    if not isinstance(total, tf.IndexedSlices):
        with tf.device(_device(shard)):
            return _row(total, shard)
    # Slices stay slices, of single numbers: Keras squares each before it adds those of one row.
    size, width = shard.shape[0], int(np.prod(full_of(shard).shape[1:]))
    places = tf.cast(total.indices, tf.int64)[:, None] * width + tf.range(width, dtype=tf.int64)
    places = tf.reshape(places, [-1]) - tf.cast(exchanges.own_number(), tf.int64) * size
    is_own, values = (places >= 0) & (places < size), tf.reshape(total.values, [-1])
    return tf.IndexedSlices(
        tf.where(is_own, values, tf.zeros_like(values)),
        tf.where(is_own, places, tf.zeros_like(places)),
        tf.constant([size], tf.int64),
    )


def _rows(value, shard) -> tf.Tensor:
    """A tensor as large as the variable, as the pieces of all replicas."""
    length, count = int(np.prod(full_of(shard).shape)), replica.context().num_replicas_in_sync
    flat, size = tf.reshape(tf.convert_to_tensor(value), [length]), shard.shape[0]
    if count * size > length:
        flat = tf.pad(flat, [[0, count * size - length]])
    return tf.reshape(flat, [count, size])


def _row(value, shard) -> tf.Tensor:
    return _rows(value, shard)[exchanges.own_number()]


def _device(shard) -> str:
    """Where this replica's copy of the variable lives."""
    return state.own(full_of(shard)).device


def _at_home(piece, shard):
    with tf.device(state.own(shard).device):
        return tf.nest.map_structure(tf.identity, piece, expand_composites=True)


def _buckets(places: Sequence[int], values: Sequence, shards: Sequence) -> list[list[int]]:
    """Places of what can travel together: of one dtype, on one device, up to a number of bytes."""
    found, open_ones, count = [], {}, replica.context().num_replicas_in_sync
    for at in places:
        key = values[at].dtype, _device(shards[at])
        bucket, size = open_ones.get(key, (None, 0))
        more = values[at].dtype.size * shards[at].shape[0] * count
        if bucket is None or size + more > BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(at)
        open_ones[key] = bucket, size + more
    return found


def _scattered(bucket: Sequence[int], grads: Sequence, shards: Sequence) -> list[tf.Tensor]:
    """The sums of this replica's pieces."""
    with tf.device(_device(shards[bucket[0]])):
        packed = tf.concat([_rows(grads[at], shards[at]) for at in bucket], 1)
        (narrow,) = replica.narrowed([packed])
        (total,) = replica.widened([exchanges.sum_of_own_row(narrow)], [packed])
        return tf.split(total, [shards[at].shape[0] for at in bucket])


def _gather(shards: Sequence) -> None:
    """Gives every replica's copy of the variables the pieces of all."""
    values = [state.own(shard) for shard in shards]
    for bucket in _buckets(range(len(shards)), values, shards):
        with tf.device(values[bucket[0]].device):
            packed = tf.concat([tf.convert_to_tensor(values[at]) for at in bucket], 0)
        device = _device(shards[bucket[0]])
        rows = exchanges.all_rows(packed, device)
        with tf.device(device):
            for at, found in zip(bucket, tf.split(rows, [shards[at].shape[0] for at in bucket], 1), strict=True):
                full = state.own(full_of(shards[at]))
                size = int(np.prod(full.shape))
                full.assign(tf.reshape(tf.reshape(found, [-1])[:size], full.shape))


def _gather_at_update(optimizer, shards: Sequence) -> None:
    """Gathers once in as many batches as make an update: a collective may stand in a condition between the replicas."""

    def across(strategy):
        def gather():
            strategy.extended.call_for_each_replica(_gather, args=(shards,))
            return 0

        is_update = optimizer._iterations.value % optimizer.gradient_accumulation_steps == 0  # counted already
        tf.cond(is_update, gather, lambda: 0)

    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        size = sum(shard.shape[0] for shard in shards if shard.dtype == dtype)
        meter.note([tf.TensorSpec([size], dtype)], part=1 / optimizer.gradient_accumulation_steps)
    with replica.uncompiled():
        replica.context().merge_call(across)


def _finite_for_all(pieces: list) -> tuple[list, tf.Tensor]:
    """The pieces, one with infinities where any replica has some: what one saw, all skip."""
    values = [p.values if isinstance(p, tf.IndexedSlices) else p for p in pieces if p is not None]
    bad = tf.reduce_any(tf.stack([tf.reduce_any(~tf.math.is_finite(value)) for value in values]))
    (count,) = replica.sum_small([tf.cast(bad, tf.float32)])
    first = next(at for at, piece in enumerate(pieces) if piece is not None)
    piece = pieces[first]
    more = tf.where(count < 0.5, tf.zeros([], piece.dtype), tf.constant(float("inf"), piece.dtype))
    if isinstance(piece, tf.IndexedSlices):
        pieces[first] = tf.IndexedSlices(piece.values + more, piece.indices, piece.dense_shape)
    else:
        pieces[first] = piece + more
    return pieces, count < 0.5


def _constrain(variable, is_finite: tf.Tensor | None) -> None:
    if variable.constraint is None:
        return
    copy = state.own(variable)
    with tf.device(copy.device):
        found = tf.cast(variable.constraint(tf.convert_to_tensor(copy)), copy.dtype)
        copy.assign(found if is_finite is None else tf.where(is_finite, found, copy))


@functools.cache
def _use_shards() -> None:
    """Lets optimizers that are built on sharded variables take their shards, in this process from now on."""

    @wrap(BaseOptimizer, "__init__")
    def init(stock, self, *args, **kwargs):
        for cls in type(self).__mro__:
            if issubclass(cls, BaseOptimizer):
                _build_on_shards(cls)
        stock(self, *args, **kwargs)

    left = [BaseOptimizer]
    while left:
        cls = left.pop()
        _build_on_shards(cls)
        left += cls.__subclasses__()

    @wrap(BaseOptimizer, "_use_weight_decay")
    def use_weight_decay(stock, self, variable):
        return stock(self, full_of(variable))

    @wrap(TFOptimizer, "_overwrite_model_variables_with_average_value")
    def overwrite(stock, self, trainable_variables):
        if replica.have_met() or not any(map(is_sharded, trainable_variables)):
            return stock(self, trainable_variables)
        for variable, average in zip(trainable_variables, self._model_variables_moving_average, strict=True):
            full_of(variable).assign(parts.Whole([average]).numpy())

    @wrap(swap_ema_weights.SwapEMAWeights, "_tf_swap_variables")
    def swap(stock, self, optimizer):
        if not any(map(is_sharded, optimizer._trainable_variables)):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            value = np.array(variable.numpy())
            variable.assign(average.numpy())
            average.assign(value)

    @wrap(swap_ema_weights.SwapEMAWeights, "_tf_finalize_ema_values")
    def finalize(stock, self, optimizer):
        if not any(map(is_sharded, optimizer._trainable_variables)):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            average.assign(variable.numpy())


def _averages(optimizer) -> Iterator[tuple]:
    """Each variable with the whole of its average."""
    for shard, average in zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True):
        yield full_of(shard), parts.Whole([average])


def _build_on_shards(cls: type) -> None:
    if "_tfgpu_builds_on_shards" in vars(cls):
        return
    cls._tfgpu_builds_on_shards = True
    if "build" not in vars(cls):
        return

    @wrap(cls, "build")
    def build(stock, self, variables):
        variables = [shard_of(variable) for variable in variables]
        if any(map(is_sharded, variables)) and not hasattr(self, "_tfgpu_is_elementwise"):
            check_optimizer(self, variables)
            _outside(variables, lambda: [parts.Whole([v]).assign(full_of(v)._value.numpy()) for v in variables])
            stock(self, variables)
            return _outside(variables, lambda: _fill_slots(self, variables))
        return stock(self, variables)


def _outside(shards: Sequence, run: Callable) -> None:
    """Runs something as if outside of any step."""
    run() if replica.context() is None else replica.run_outside(shards[0]._value.distribute_strategy, run)


def _fill_slots(optimizer, shards: Sequence) -> None:
    """Where a slot begins with the variable's values, gives each replica's copy its own piece: all have the first's."""
    shard_by_key = {parts.part_of(shard).of: shard for shard in shards}
    for slot in optimizer.variables:
        part = parts.part_of(slot)
        shard = shard_by_key.get(part.of[:-1]) if part is not None else None
        if shard is None:
            continue
        values = slot._value.values[0].numpy()
        if values.dtype.kind == "V" or not values.any():
            continue
        if not np.array_equal(values, shard._value.values[0].numpy()):
            if (values == values[0]).all():
                continue
            raise InputError(
                f"{type(optimizer).__name__} begins with numbers of its own in {slot.path!r}, which pieces would mix "
                "up. Use one whose slots begin with a constant or with the weights."
            )
        for copy, piece in zip(slot._value.values, shard._value.values, strict=True):
            copy.assign(piece)


def check_optimizer(optimizer, variables: Sequence) -> None:
    """Refuses what cannot work on pieces.

    Raises:
        InputError: variables without a shard among others; an optimizer that does not work element by element.
    """
    left = [variable.path for variable in variables if not is_sharded(variable)]
    if left:
        raise InputError(
            f"The variable {left[0]!r} was made after `parallel.shard`, so the optimizer would have sharded variables "
            "and others. Make all variables first, then call `parallel.shard`, then `compile`."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reason = elementwise.reason_against(inner)
    if reason:
        raise InputError(
            f"{type(inner).__name__} cannot be sharded: {reason} Use an optimizer that works element by element "
            "(Adam, AdamW, Lion, SGD, RMSprop, Adagrad, ...)."
        )
    for each in (optimizer, inner):
        object.__setattr__(each, "_tfgpu_is_elementwise", True)

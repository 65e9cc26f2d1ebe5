"""Puts shards in the place of a variable, and makes Keras read, write, save and update them as that variable.

An optimizer whose update depends on the whole variable would see its shards. On shards along an axis it is refused; for
shards over replicas see `zero/dealing.py`.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, optimizers, saving, variables
from tfgpu.compat.patch import override, wrap
from tfgpu.compat.variables import CHECKPOINT_KEY
from tfgpu.core import collectives, replication, step_context
from tfgpu.core.state.sharded_variable import (
    ShardedVariable,
    ShardInfo,
    Sharding,
    full_variable,
    has_shards,
    merged,
    set_shard_info,
    shard_info,
)
from tfgpu.errors import InputError

_factors = step_context.Slot("shard_patches.factors")
"""By the id of the optimizer: what each gradient is multiplied by, in their order."""
_NOT_ELEMENTWISE = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)
"""Optimizers whose update of a number depends on other numbers of the variable."""


def _clip_by_full_norms() -> None:
    """`clipnorm` needs the norm over all shards of a variable, `global_clipnorm` also the pieces of all replicas."""

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
    over = {_outermost(variable) for variable in variables if is_piece(variable)}
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


@functools.cache
def install_averages() -> None:
    """Makes Keras overwrite and swap full variables with their moving averages, not pieces."""

    @wrap("TFOptimizer.overwrite_model_variables_with_average_value")
    def overwrite(stock, self, trainable_variables):
        if step_context.gradients_are_summed() or not _has_pieces(self):
            return stock(self, trainable_variables)
        for variable, average in _averages(self):
            variable.assign(average.numpy())

    @wrap("SwapEMAWeights.tf_swap_variables")
    def swap(stock, self, optimizer):
        if not _has_pieces(optimizer):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            value = np.array(variable.numpy())
            variable.assign(average.numpy())
            average.assign(value)

    @wrap("SwapEMAWeights.tf_finalize_ema_values")
    def finalize(stock, self, optimizer):
        if not _has_pieces(optimizer):
            return stock(self, optimizer)
        for variable, average in _averages(optimizer):
            average.assign(variable.numpy())


def _has_pieces(optimizer) -> bool:
    return any(map(is_piece, optimizers.trained(optimizer)))


def is_piece(variable) -> bool:
    """Whether a variable is a shard of which each replica has its own."""
    info = shard_info(variable)
    return info is not None and info.sharding.over_replicas


def _averages(optimizer) -> Iterator[tuple]:
    """Each full variable with its full average."""
    for target, average in zip(optimizers.trained(optimizer), optimizers.averages(optimizer), strict=True):
        full = full_variable(target)
        yield tuple(ShardedVariable([each]) if is_piece(each) else each for each in (full, average))


def mark_shards(shards: Sequence, sharding: Sharding, path: str, outer: ShardInfo | None = None) -> ShardedVariable:
    """Makes variables, in their order, the shards of one variable.

    Args:
        shards: the variables.
        sharding: how they make the full variable.
        path: of the full variable.
        outer: where the full variable is a shard itself, what it knows.
    """
    install()
    info = ShardInfo((object(),), sharding, path, outer)
    for shard in shards:
        set_shard_info(shard, info)
    return ShardedVariable(list(shards))


def save_merged(layer: keras.layers.Layer) -> None:
    """Makes a layer whose class saves its variables by name save and load them as on one device."""
    stock = keras.layers.Layer
    override(layer, "save_own_variables", functools.partial(stock.save_own_variables, layer), by=__name__)
    override(layer, "load_own_variables", functools.partial(stock.load_own_variables, layer), by=__name__)


def replace_variables(layer: keras.layers.Layer, shards_of: Mapping[int, Sequence]) -> None:
    """Replaces variables of a layer by shards, at the same positions among the layer's variables.

    Args:
        layer: built.
        shards_of: the shards by the `id` of the variable.
    """
    order, may_train = layers.own_variables(layer), {id(variable) for variable in layers.own_trainable(layer)}
    with layers.unlocked(layer) as (untrack, track):
        for variable in order:
            untrack(variable)
        for variable in order:
            trains = variable.trainable
            for each in shards_of.get(id(variable), [variable]):
                each.trainable = id(variable) in may_train  # of a frozen layer too; Keras keeps two lists
                track(each)
                each.trainable = trains


def refuse_methods(layer: keras.layers.Layer, names: Sequence[str], changed: str) -> None:
    """Makes methods of a layer raise an error.

    Args:
        layer: whose variables are shards.
        names: of the methods.
        changed: what a method changes, with the reason why it cannot: `"the kernel of 'dense', which is split"`.
    """

    def refuse(name: str, *args, **kwargs) -> None:
        raise InputError(f"`{name}` changes {changed}. Call it on the model in the file that `save` writes.")

    for name in names:
        override(layer, name, functools.partial(refuse, name), by=__name__, listed="*.enable_lora *.quantize")


def is_along_axis(info: ShardInfo | None) -> bool:
    """Whether a shard is part of a variable that is cut along an axis."""
    return info is not None and (not info.sharding.over_replicas or is_along_axis(info.outer))


def is_part_in_shape(info: ShardInfo | None) -> bool:
    """Whether a shard has the axes of its variable, so that an optimizer would take it for the whole."""
    return is_along_axis(info) or (info is not None and getattr(info.sharding, "is_in_shape", False))


@functools.cache
def install() -> None:
    """Makes Keras read, write, save and clip shards as the full variable, in this process from now on."""
    _merge_weights()
    _merge_in_files()
    _merge_in_checkpoints()
    _merge_in_optimizers()
    _clip_by_full_norms()


def _merge_weights() -> None:
    """For `get_weights`, `set_weights` and `summary`."""
    for owner in ("keras.layers.Layer", "keras.Model"):  # a model's own may have been wrapped before, by `averaging`

        @wrap(f"{owner}.get_weights")
        def get_weights(stock, self):
            if not has_shards(self.weights):
                return stock(self)
            return [variable.numpy() for variable in merged(self.weights)]

    @wrap("keras.layers.Layer.set_weights")
    def set_weights(stock, self, weights):
        found = merged(self.weights)
        if all(variables.held(variable) is not None for variable in found) or len(found) != len(weights):
            return stock(self, weights)
        for variable, value in zip(found, weights, strict=True):
            if tuple(variable.shape) != tuple(np.shape(value)):
                raise ValueError(
                    f"Layer {self.name} weight shape {variable.shape} is not compatible with provided weight shape "
                    f"{np.shape(value)}."
                )
            variable.assign(value)

    for name in ("count_params", "weight_memory_size"):

        @wrap(f"summary_utils.{name}")
        def size(stock, weights):
            return stock(merged(weights))


def write_variables(found: Sequence, store) -> None:
    """Writes variables into the part of a Keras file that is a layer's or an optimizer's, by number."""
    for at, variable in enumerate(found):
        store[str(at)] = variable if saving.is_streamed(store) else variable.numpy()


def read_variables(layer: keras.layers.Layer, found: Sequence, store) -> None:
    """Gives a layer's variables what `write_variables` wrote."""
    if len(store.keys()) != len(found):
        raise ValueError(f"Layer {layer.name!r} has {len(found)} variables; the file has {len(store.keys())} for it.")
    for at, variable in enumerate(found):
        variable.assign(store[str(at)])


def _merge_in_files() -> None:
    """For `.keras` and `.weights.h5` files."""

    @wrap("keras.layers.Layer.save_own_variables")
    def save_layer(stock, self, store):
        if not has_shards(layers.own_variables(self)):
            return stock(self, store)
        write_variables(merged(layers.own_variables(self)), store)

    @wrap("keras.layers.Layer.load_own_variables")
    def load_layer(stock, self, store):
        own = layers.own_variables(self)
        if not has_shards(own):
            return stock(self, store)
        read_variables(self, merged(own), store)

    @wrap("BaseOptimizer.save_own_variables")
    def save_optimizer(stock, self, store):
        write_variables(merged(self.variables), store)

    @wrap("BaseOptimizer.load_own_variables")
    def load_optimizer(stock, self, store):
        found = merged(self.variables)
        if not has_shards(self.variables) or len(found) != len(store.keys()):
            return stock(self, store)
        for at, variable in enumerate(found):
            variable.assign(store[str(at)])


def _merge_in_checkpoints() -> None:
    """For `tf.train.Checkpoint`, which would take the first replica's piece."""

    @wrap("Variable.serialize_to_tensors")
    def serialize(stock, self):
        if not is_piece(self):
            return stock(self)
        return {CHECKPOINT_KEY: tf.constant(ShardedVariable([self]).numpy())}

    @wrap("Variable.restore_from_tensors")
    def restore(stock, self, restored_tensors):
        if not is_piece(self):
            return stock(self, restored_tensors)
        ShardedVariable([self]).assign(restored_tensors[CHECKPOINT_KEY].numpy())


def _merge_in_optimizers() -> None:
    """Makes the slots of shards shards, and lets callers name full variables."""

    @wrap("BaseOptimizer.add_variable_from_reference")
    def add_variable(stock, self, reference_variable, name=None, initializer="zeros"):
        made = stock(self, reference_variable, name=name, initializer=initializer)
        info = shard_info(reference_variable)
        if info is not None:
            set_shard_info(made, info.slot(name or "var"))
        return made

    @wrap("BaseOptimizer.exclude_from_weight_decay")
    def exclude_from_weight_decay(stock, self, var_list=None, var_names=None):
        lists = [getattr(variable, "shards", [variable]) for variable in var_list or ()]
        stock(self, [shard for found in lists for shard in found] or var_list, var_names)

    @wrap("BaseOptimizer.build")
    def build(stock, self, variables):
        has_parts = any(is_part_in_shape(shard_info(variable)) for variable in variables)
        if has_parts and isinstance(self, _NOT_ELEMENTWISE):
            raise InputError(
                f"{type(self).__name__} looks at each variable as a whole, and here a variable is sharded. Use an "
                "optimizer that works element by element (Adam, AdamW, Lion, SGD, RMSprop, Adagrad, ...)."
            )
        stock(self, variables)

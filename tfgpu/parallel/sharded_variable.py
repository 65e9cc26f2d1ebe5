"""One variable in several parts: on servers, on the devices of an axis of the mesh, or a piece on each replica.

A part is an ordinary trainable Keras variable, with slots of its own. To the outside (files, checkpoints,
`get_weights`) the parts are one variable again, a `ShardedVariable`, in the place and the order of the variable that
one device has.

An optimizer that looks at a whole variable would see its parts: those are refused, and `clipnorm`, which clips each
variable by its norm, is given the norm of all parts; `global_clipnorm` that of all replicas' pieces.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import core
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.utils import summary_utils

from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, replication
from tfgpu.errors import InputError

_WHOLE_NORM = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)
_here = threading.local()

CHECKPOINT_KEY = "VARIABLE_VALUE"
"""Under which `tf.train.Checkpoint` keeps a variable's value."""


class Sharding(Protocol):
    """How the parts make the whole."""

    over_replicas: bool
    """Each replica holds a piece of its own: what is summed over the parts must be summed over replicas too."""

    def shape(self, parts: Sequence) -> tuple[int, ...]:
        """The shape of the whole."""

    def read(self, parts: Sequence) -> np.ndarray:
        """The whole as it is now, outside of replicas."""

    def write(self, parts: Sequence, value: np.ndarray) -> None:
        """Gives each part its piece, outside of replicas."""


@dataclass(frozen=True)
class ShardInfo:
    """What a part knows of the whole, in its attribute `_tfgpu_part`.

    Attributes:
        of: what identifies the whole; then, of a slot, the slot's name.
        cut: how the parts make it.
        path: the whole's.
        outer: the same of the whole, where it is itself a part.
    """

    of: tuple
    sharding: Sharding
    path: str
    outer: "ShardInfo | None" = None

    def slot(self, name: str) -> "ShardInfo":
        """What an optimizer's slot for the part is a part of."""
        outer = self.outer and self.outer.slot(name)
        return ShardInfo((*self.of, name), self.sharding, f"{self.path}/{name}", outer)


@dataclass(frozen=True)
class AxisSharding:
    """Parts that lie side by side along an axis."""

    axis: int
    over_replicas = False

    def shape(self, parts: Sequence) -> tuple[int, ...]:
        sizes = list(parts[0].shape)
        sizes[self.axis] = sum(part.shape[self.axis] for part in parts)
        return tuple(sizes)

    def read(self, parts: Sequence) -> np.ndarray:
        return np.concatenate([part.numpy() for part in parts], self.axis)

    def write(self, parts: Sequence, value: np.ndarray) -> None:
        ends = np.cumsum([part.shape[self.axis] for part in parts])
        for part, piece in zip(parts, np.split(value, ends[:-1], self.axis), strict=True):
            part.assign(piece)


class ShardedVariable:
    """The parts of a variable, or of one of its optimizer slots, as the one variable that they stand for.

    Args:
        parts: all of them, in their order.
        part: what they know of the whole; None takes what they carry.
    """

    _value = None

    def __init__(self, parts: list, part: ShardInfo | None = None):
        part = part or shard_info(parts[0])
        self.shards, self.sharding, self.path = parts, part.sharding, part.path
        self.name = self.path.rpartition("/")[2]
        self.dtype, self.shape = parts[0].dtype, tf.TensorShape(part.sharding.shape(parts))
        if part.outer is not None:
            self._tfgpu_part = part.outer

    @property
    def is_over_replicas(self) -> bool:
        """Whether to read it is a collective where there are several workers."""
        return self.sharding.over_replicas or any(getattr(part, "is_over_replicas", False) for part in self.shards)

    @property
    def trainable(self) -> bool:
        return self.shards[0].trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        for part in self.shards:
            part.trainable = value

    @property
    def value(self) -> tf.Tensor:
        return tf.convert_to_tensor(self)

    def numpy(self) -> np.ndarray:
        return self.sharding.read(self.shards)

    def assign(self, value) -> None:
        """Gives each part its piece of `value`."""
        value = np.asarray(value)
        if tuple(value.shape) != tuple(self.shape):
            raise InputError(f"The variable {self.path} has shape {self.shape}. Received: {tuple(value.shape)}.")
        self.sharding.write(self.shards, value)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype=None, name=None):
        if isinstance(self.sharding, AxisSharding):
            found = tf.concat([tf.convert_to_tensor(part) for part in self.shards], self.sharding.axis)
        else:
            found = tf.convert_to_tensor(self.numpy())
        return tf.cast(found, dtype or found.dtype)


def shard_info(variable) -> ShardInfo | None:
    """What a variable is a part of, or None."""
    return getattr(variable, "_tfgpu_part", None)


def mark_shards(variables: Sequence, sharding: Sharding, path: str, outer: ShardInfo | None = None) -> ShardedVariable:
    """Makes variables, in their order, the parts of one."""
    install()
    part = ShardInfo((object(),), sharding, path, outer)
    for variable in variables:
        variable._tfgpu_part = part
    return ShardedVariable(list(variables))


def merged(variables: Sequence) -> list:
    """The variables with a `ShardedVariable` in the place of the first of its parts: alike on any number of devices."""
    found = list(variables)
    while any(shard_info(variable) is not None for variable in found):
        groups: dict = {}
        for variable in found:
            part = shard_info(variable)
            groups.setdefault(id(variable) if part is None else part.of, []).append(variable)
        found = [group[0] if shard_info(group[0]) is None else ShardedVariable(group) for group in groups.values()]
    return found


def save_merged(layer: keras.layers.Layer) -> None:
    """Lets a layer whose class saves its variables by name save and load what it has on one device all the same."""
    for name in ("save_own_variables", "load_own_variables"):
        object.__setattr__(layer, name, functools.partial(getattr(keras.layers.Layer, name), layer))


def _own(layer: keras.layers.Layer) -> list:
    return merged(layer._trainable_variables + layer._non_trainable_variables)


def _has_parts(layer: keras.layers.Layer) -> bool:
    return any(shard_info(v) is not None for v in layer._trainable_variables + layer._non_trainable_variables)


@functools.cache
def install() -> None:
    """Lets Keras read, write and save parts as the one variable that they stand for, in this process from now on."""

    for owner in (keras.layers.Layer, keras.Model):  # a model's own may have been wrapped before, by `averaging`

        @wrap(owner, "get_weights")
        def get_weights(stock, self):
            if all(shard_info(variable) is None for variable in self.weights):
                return stock(self)
            return [variable.numpy() for variable in merged(self.weights)]

    @wrap(keras.layers.Layer, "set_weights")
    def set_weights(stock, self, weights):
        found = merged(self.weights)
        if all(variable._value is not None for variable in found) or len(found) != len(weights):
            return stock(self, weights)
        for variable, value in zip(found, weights, strict=True):
            if tuple(variable.shape) != tuple(np.shape(value)):
                raise ValueError(
                    f"Layer {self.name} weight shape {variable.shape} is not compatible with provided weight shape "
                    f"{np.shape(value)}."
                )
            variable.assign(value)

    @wrap(core.Variable, "_serialize_to_tensors")
    def serialize(stock, self):  # for `tf.train.Checkpoint`, which would take the first replica's piece
        if shard_info(self) is None or not shard_info(self).sharding.over_replicas:
            return stock(self)
        return {CHECKPOINT_KEY: tf.constant(ShardedVariable([self]).numpy())}

    @wrap(core.Variable, "_restore_from_tensors")
    def restore(stock, self, restored_tensors):
        if shard_info(self) is None or not shard_info(self).sharding.over_replicas:
            return stock(self, restored_tensors)
        ShardedVariable([self]).assign(restored_tensors[CHECKPOINT_KEY].numpy())

    for name in ("count_params", "weight_memory_size"):  # of `summary`

        @wrap(summary_utils, name)
        def size(stock, weights):
            return stock(merged(weights))

    @wrap(keras.layers.Layer, "save_own_variables")
    def save_layer(stock, self, store):
        if not _has_parts(self):
            return stock(self, store)
        for at, variable in enumerate(_own(self)):
            store[str(at)] = variable.numpy()

    @wrap(keras.layers.Layer, "load_own_variables")
    def load_layer(stock, self, store):
        if not _has_parts(self):
            return stock(self, store)
        if len(store.keys()) != len(_own(self)):
            raise ValueError(
                f"Layer {self.name!r} has {len(_own(self))} variables; the file has {len(store.keys())} for it."
            )
        for at, variable in enumerate(_own(self)):
            variable.assign(np.asarray(store[str(at)]))

    @wrap(BaseOptimizer, "add_variable_from_reference")
    def add_variable(stock, self, reference_variable, name=None, initializer="zeros"):
        made = stock(self, reference_variable, name=name, initializer=initializer)
        part = shard_info(reference_variable)
        if part is not None:
            made._tfgpu_part = part.slot(name or "var")
        return made

    @wrap(BaseOptimizer, "save_own_variables")
    def save_own_variables(stock, self, store):
        for at, variable in enumerate(merged(self.variables)):
            store[str(at)] = variable.numpy()

    @wrap(BaseOptimizer, "load_own_variables")
    def load_own_variables(stock, self, store):
        found = merged(self.variables)
        is_plain = all(shard_info(variable) is None for variable in self.variables)
        if is_plain or len(found) != len(store.keys()):
            return stock(self, store)
        for at, variable in enumerate(found):
            variable.assign(np.asarray(store[str(at)]))

    @wrap(BaseOptimizer, "exclude_from_weight_decay")
    def exclude_from_weight_decay(stock, self, var_list=None, var_names=None):
        lists = [getattr(variable, "shards", [variable]) for variable in var_list or ()]
        stock(self, [part for found in lists for part in found] or var_list, var_names)

    @wrap(BaseOptimizer, "build")
    def build(stock, self, variables):
        if any(shard_info(variable) is not None for variable in variables):
            check_optimizer(self)
        stock(self, variables)

    @wrap(BaseOptimizer, "_backend_apply_gradients")
    def apply_gradients(stock, self, grads, trainable_variables):
        is_known = getattr(_here, "factors", None) is not None
        if is_known or not self.clipnorm or all(shard_info(variable) is None for variable in trainable_variables):
            return stock(self, grads, trainable_variables)
        with full_norm_clipping(self, grads, trainable_variables):
            return stock(self, grads, trainable_variables)

    @wrap(BaseOptimizer, "_clip_gradients")
    def clip_gradients(stock, self, grads):
        factors = getattr(_here, "factors", None)
        if factors is None:
            return stock(self, grads)
        if self.global_clipnorm:  # Keras makes tensors of slices there
            return [tf.convert_to_tensor(g) * tf.cast(f, g.dtype) for g, f in zip(grads, factors, strict=True)]
        return [_scaled(gradient, factor) for gradient, factor in zip(grads, factors, strict=True)]


def check_optimizer(optimizer) -> None:
    """Refuses an optimizer whose update of a number depends on others of the same variable.

    Raises:
        InputError: as said.
    """
    if isinstance(optimizer, _WHOLE_NORM):
        raise InputError(
            f"{type(optimizer).__name__} looks at each variable as a whole, and here a variable lies in parts. Use an "
            "optimizer that works element by element (Adam, AdamW, Lion, SGD, RMSprop, Adagrad, ...)."
        )


@contextlib.contextmanager
def full_norm_clipping(optimizer, grads: Sequence, variables: Sequence, scale=1.0) -> Iterator[None]:
    """For the length of the block the optimizer clips the gradients of parts by the norms of the wholes.

    Taken outside of the conditions that accumulation and float16 stand in, where replicas could not meet.

    Args:
        optimizer: not a `LossScaleOptimizer`, but the one within it; built.
        grads: none is None.
        variables: a gradient's each; parts, or whole.
        scale: what the gradients will be divided by before they are clipped.
    """
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        yield
        return
    squares = _squares(optimizer, grads, variables, scale)
    if optimizer.clipnorm:
        norms = {key: tf.sqrt(value) for key, value in squares.items()}
        factors = {key: optimizer.clipnorm / tf.maximum(norm, optimizer.clipnorm) for key, norm in norms.items()}
    else:
        norm, most = tf.sqrt(tf.add_n(list(squares.values()))), optimizer.global_clipnorm
        factors = dict.fromkeys(squares, most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm))
    _here.factors = [factors[_outermost(variable)] for variable in variables]
    try:
        yield
    finally:
        _here.factors = None


def _squares(optimizer, grads: Sequence, variables: Sequence, scale) -> dict:
    """The squared norm of each gradient that will be clipped: of parts, of all that belong together."""
    squares: dict = {}
    for gradient, variable in zip(grads, variables, strict=True):
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values = values / tf.cast(scale, values.dtype)
        if optimizer.gradient_accumulation_steps:
            total = optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]
            values = (values + total) / optimizer.gradient_accumulation_steps
        squares.setdefault(_outermost(variable), []).append(tf.reduce_sum(tf.square(values)))
    totals = {key: tf.cast(tf.add_n(found), tf.float32) for key, found in squares.items()}
    over = {_outermost(v) for v in variables if shard_info(v) is not None and shard_info(v).sharding.over_replicas}
    if over and replication.replica_context() is not None:
        keys = [key for key in totals if key in over]
        (met,) = collectives.sum_small([tf.stack([totals[key] for key in keys])])
        totals |= dict(zip(keys, tf.unstack(met, len(keys)), strict=True))
    return totals


def _scaled(gradient, factor: tf.Tensor):
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _outermost(variable):
    part = shard_info(variable)
    if part is None:
        return id(variable)
    while part.outer is not None:
        part = part.outer
    return part.of

"""Optimizers that keep their slots in 8 or 16 bits: `with_state_dtype`.

A slot is two variables: the numbers in few bits, of the variable's shape, and a scale per block of 256, its largest
magnitude. The optimizer's own code sees a `NarrowSlot` instead: it is opened before the update of a variable, computes
in float32, and is rounded once after it. Accumulated gradients and averages stay in float32.

In 8 bits a number is the position of the nearest one in a table of 256. The tables are those of dynamic tree
quantization: the number of leading zeros is an exponent of ten, the bits after it a fraction, so that small numbers and
large ones have a like relative error (Dettmers et al., 2021, https://arxiv.org/abs/2110.02861).
"""

import contextlib
import dataclasses
import functools
import logging

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, optimizers, variables
from tfgpu.compat.keras import LossScaleOptimizer, MultiOptimizer
from tfgpu.core import step_context
from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError, unknown
from tfgpu.optim.parameter_groups import extended, plain_class

BLOCK = 256
"""How many numbers share a scale."""
_EXPONENTS = 7


@functools.cache
def table(is_signed: bool) -> np.ndarray:
    """The 256 numbers of 8 bits, ascending, the largest of which is 1.

    Example:
        >>> found = table(True)
        >>> found.shape, float(found[-1]), f"{table(False)[1]:.2e}"
        ((256,), 1.0, '3.25e-07')
    """
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2 ** (exponent + (0 if is_signed else 1)) + 1
        edges = np.linspace(0.1, 1.0, count)
        fractions = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - _EXPONENTS + 1)
        found += [*fractions, *(-fractions if is_signed else ())]
    return np.sort(np.array(found, "float32"))


def blocks_of(count: int) -> int:
    """How many blocks so many numbers make."""
    return -(-count // BLOCK)


def quantize(value: tf.Tensor, dtype: str, is_signed: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """A tensor in few bits.

    Args:
        value: of any static shape.
        dtype: of the result: `"uint8"` or `"bfloat16"`.
        is_signed: whether there are numbers below 0. If not, a number above 0 does not become 0, as it may be divided
            by.

    Returns:
        The numbers, of the tensor's shape, and the scales [blocks], float32.
    """
    count = value.shape.num_elements()
    flat = tf.reshape(tf.cast(value, tf.float32), [-1])
    rows = tf.reshape(tf.pad(flat, [[0, blocks_of(count) * BLOCK - count]]), [-1, BLOCK])
    scales = tf.reduce_max(tf.abs(rows), 1)
    normed = tf.reshape(tf.math.divide_no_nan(rows, scales[:, None]), [-1])[:count]
    if dtype == "bfloat16":
        return tf.reshape(tf.cast(normed, tf.bfloat16), value.shape), scales
    numbers = table(is_signed)
    codes = tf.searchsorted(tf.constant((numbers[:-1] + numbers[1:]) / 2), normed)
    if not is_signed:
        codes = tf.where(normed > 0, tf.maximum(codes, 1), codes)
    return tf.reshape(tf.cast(codes, tf.uint8), value.shape), scales


def dequantize(codes: tf.Tensor, scales: tf.Tensor, is_signed: bool) -> tf.Tensor:
    """The inverse of `quantize`, but for what it has rounded: float32."""
    count = codes.shape.num_elements()
    is_table = codes.dtype == tf.uint8
    if is_table:
        normed = tf.gather(tf.constant(table(is_signed)), tf.cast(codes, tf.int32))
    else:
        normed = tf.cast(codes, tf.float32)
    flat = tf.pad(tf.reshape(normed, [-1]), [[0, blocks_of(count) * BLOCK - count]])
    rows = tf.reshape(flat, [-1, BLOCK]) * scales[:, None]
    return tf.reshape(tf.reshape(rows, [-1])[:count], codes.shape)


_log = logging.getLogger(__name__)
_CODES = {"int8": "uint8", "bfloat16": "bfloat16"}
SMALLEST = 4096
"""Variables with fewer numbers keep slots of float32, as in the paper's library: they take little memory."""
_IN_FULL = ("gradient_accumulator", "average")
_O = keras.optimizers
_NEVER_NEGATIVE = {
    "velocity": (_O.Adam, _O.Nadam, _O.RMSprop, _O.Lamb, _O.Muon),
    "velocity_hat": (_O.Adam,),
    "accumulator": (_O.Adagrad,),
}
"""Slots that hold squares, by their names, and the optimizers that have them."""
_opened = step_context.Slot("narrow_state.opened")  # by the `id` of a slot, a list of its one value in float32


class NarrowSlot(variables.VirtualVariable):
    """What an optimizer sees of a slot in few bits. A variable gets this class; it holds nothing itself."""

    def set_up(self, codes: keras.Variable, scales: keras.Variable, is_signed: bool) -> None:
        self._codes, self._scales, self._is_signed = codes, scales, is_signed

    @contextlib.contextmanager
    def opened(self):
        """In the block this thread's replica computes with it in float32; it is rounded at the end."""
        held = [self._stored()]
        with _opened.set_to({**(_opened.get() or {}), id(self): held}):
            yield
        self._store(held[0])

    def read(self) -> tf.Tensor:
        held = self._held()
        return self._stored() if held is None else held[0]

    def write(self, value) -> None:
        """Replaces the value; of IndexedSlices, those rows."""
        if isinstance(value, tf.IndexedSlices):
            rows = tf.cast(value.indices, tf.int64)[:, None]
            value = tf.tensor_scatter_nd_update(self.read(), rows, tf.cast(value.values, tf.float32))
        value = tf.ensure_shape(tf.cast(tf.convert_to_tensor(value), tf.float32), self.shape)
        held = self._held()
        if held is None:
            self._store(value)
        else:
            held[0] = value

    def shared_name(self) -> str:
        return variables.shared_name(self._codes)

    def assign(self, value):
        self.write(value)
        return value

    def _held(self) -> list | None:
        """What holds the value in float32, in a block of `opened`."""
        return (_opened.get() or {}).get(id(self))

    def _stored(self) -> tf.Tensor:
        codes, scales = variables.local_copy(self._codes), variables.local_copy(self._scales)
        with tf.device(codes.device):
            return dequantize(tf.convert_to_tensor(codes), scales, self._is_signed)

    def _store(self, value: tf.Tensor) -> None:
        codes, scales = variables.local_copy(self._codes), variables.local_copy(self._scales)
        with tf.device(codes.device):
            found = quantize(value, codes.dtype.name, self._is_signed)
            codes.assign(found[0])
            scales.assign(found[1])


class NarrowState:
    """Makes an optimizer keep its slots in few bits."""

    state_dtype = "int8"
    kind: type

    def build(self, variables):
        if self.built:
            return
        self._narrow = {}
        super().build(variables)
        optimizers.untrack(self, lambda variable: isinstance(variable, NarrowSlot))
        slots = [slot for found in self._narrow.values() for slot in found]
        if slots:
            name, count = self.kind.__name__, sum(int(np.prod(slot.shape)) for slot in slots)
            _log.warning(
                "%s keeps %d slots (%d numbers) in %s, rounded by blocks of %d: training differs from float32's.",
                name, len(slots), count, self.state_dtype, BLOCK,
            )  # fmt: skip

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        made = super().add_variable_from_reference(reference_variable, name=name, initializer=initializer)
        count = int(np.prod(reference_variable.shape))
        if name in _IN_FULL or _whole_size(reference_variable) < SMALLEST or made.dtype != "float32":
            return made
        blocks = blocks_of(count)
        with variables.shaped_as(reference_variable, (blocks,)):
            scales = super().add_variable_from_reference(reference_variable, name=f"{name}_scale")
        _mark_scales(scales, reference_variable, made)
        slot = keras.Variable(0.0, trainable=False, name=made.name)
        start = np.array(made.numpy()) if initializer != "zeros" else None
        _make_codes(made, _CODES[self.state_dtype])
        slot.__class__ = NarrowSlot
        variables.set_held(slot, None)
        variables.set_shape(slot, reference_variable.shape)
        slot.set_up(made, scales, not isinstance(self, _NEVER_NEGATIVE.get(name, ())))
        if start is not None:
            slot.write(start)
        self._narrow.setdefault(optimizers.key(self, reference_variable), []).append(slot)
        return slot

    def update_step(self, gradient, variable, learning_rate):
        with contextlib.ExitStack() as stack:
            for slot in self._narrow.get(optimizers.key(self, variable), ()):
                stack.enter_context(slot.opened())
            super().update_step(gradient, variable, learning_rate)

    def assign(self, variable, value):
        variable.write(value) if isinstance(variable, NarrowSlot) else super().assign(variable, value)

    def assign_add(self, variable, value):
        if not isinstance(variable, NarrowSlot):
            return super().assign_add(variable, value)
        return variable.write(variable.read() + tf.cast(tf.convert_to_tensor(value), tf.float32))

    def assign_sub(self, variable, value):
        if not isinstance(variable, NarrowSlot):
            return super().assign_sub(variable, value)
        return variable.write(variable.read() - tf.cast(tf.convert_to_tensor(value), tf.float32))

    def get_config(self):
        return super().get_config() | {"state_dtype": self.state_dtype, "kind": plain_class(self.kind)}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        dtype, plain = config.pop("state_dtype"), dict(config.pop("kind"))
        stock = keras.saving.deserialize_keras_object({**plain, "config": config}, custom_objects=custom_objects)
        return with_state_dtype(stock, dtype)


keras.saving.register_keras_serializable("tfgpu", "NarrowState")(
    type("NarrowState", (NarrowState, keras.optimizers.Optimizer), {"__module__": __name__})
)  # the class that files name; `from_config` makes the right subclass


def with_state_dtype(optimizer: keras.optimizers.Optimizer, dtype: str = "int8") -> keras.optimizers.Optimizer:
    """An optimizer like this one, whose slots (momentum, velocity, ...) take a quarter or half of the memory.

    Each block of 256 numbers has a scale of its own. The update computes in float32; slots are rounded after it, so the
    result differs from that of float32, by how much depends on the training: `docs/measured/memory.md` has figures.
    On any replicas, sharded (`parallel.shard`) or not, it is that of one device with the same slots.

    Args:
        optimizer: any Keras optimizer that is not built yet; a `LossScaleOptimizer` goes around the result.
        dtype: `"int8"`: 8 bits by dynamic tree quantization. `"bfloat16"`: 16 bits.

    Returns:
        A new optimizer. Variables of fewer than 4096 numbers, accumulated gradients and averages stay in float32.

    Raises:
        InputError: the dtype is another one; the optimizer is built, or divides variables among others.

    Example:
        >>> optimizer = with_state_dtype(keras.optimizers.AdamW(0.001), "int8")
        >>> optimizer.build([keras.Variable(np.zeros((64, 64)), dtype="float32")])
        >>> sorted({variable.dtype for variable in optimizer.variables})
        ['float32', 'int64', 'uint8']

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (https://arxiv.org/abs/2110.02861).
    """
    if dtype not in _CODES:
        raise unknown("dtype", dtype, tuple(_CODES))
    if isinstance(optimizer, (LossScaleOptimizer, MultiOptimizer)):
        raise InputError(
            f"{type(optimizer).__name__} contains other optimizers. Give each of those to `with_state_dtype`."
        )
    if optimizer.built:
        raise InputError("The optimizer is already built. Give a new one.")
    if isinstance(optimizer, NarrowState):
        raise InputError(f"The optimizer already keeps its state in {optimizer.state_dtype}. Give Keras's own.")
    kind = type(optimizer)
    cls = extended(kind, NarrowState, prefix="Narrow", saved_as="NarrowState")
    made = kind.from_config.__func__(cls, dict(optimizer.get_config()))
    made.state_dtype = dtype
    optimizers.copy_decay_exclusions(optimizer, made, [])
    return made


def _whole_size(variable) -> int:
    """How many numbers a variable has, or the one that it is a shard of."""
    info = sharded_variable.shard_info(variable)
    if info is None:
        return int(np.prod(variable.shape))
    if not info.sharding.over_replicas or getattr(info.sharding, "is_in_shape", False):
        raise InputError(
            f"{info.path!r} is split along an axis, so blocks of its slots would differ from one device's. Use "
            "the optimizer without `with_state_dtype`, or a layout without tensor or expert parallelism."
        )
    return int(np.prod(info.sharding.sizes))


def _mark_scales(scales: keras.Variable, reference: keras.Variable, codes: keras.Variable) -> None:
    """Says of how many scales the whole has, where each replica has those of its piece."""
    info = sharded_variable.shard_info(scales)
    if info is None:
        return
    whole = (blocks_of(_whole_size(reference)),)
    sharding = dataclasses.replace(info.sharding, sizes=whole)
    sharded_variable.set_shard_info(scales, dataclasses.replace(info, sharding=sharding, outer=None))


def _make_codes(variable: keras.Variable, dtype: str) -> None:
    """Gives a slot copies of another dtype, on the same devices: what zeros are in few bits."""
    held, none = variables.held(variable), tf.as_dtype(dtype).as_numpy_dtype
    zero = int(np.searchsorted(table(True), 0.0)) if dtype == "uint8" else 0
    is_spread = isinstance(held, tf.distribute.DistributedValues)
    copies = held.values if is_spread else [held]
    made = [distribute.plain_variable(np.full(copy.shape, zero, none), copy.device, variable.name) for copy in copies]
    variables.set_held(variable, distribute.with_copies(held, made) if is_spread else made[0])
    variables.set_storage_dtype(variable, dtype)

"""Digests of variables: 64 bits for each copy, computed on the device that holds it.

The bits of each number are one or several integers, and the digest is their sum modulo 2**64, each times an odd number
that its position gives. A change of one number by any bits changes the digest, and so does an exchange of two numbers.
All of it has kernels on GPUs, and only the digests leave the device.
"""

import functools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.variables import has_copies, held
from tfgpu.core import extensions
from tfgpu.core.state import sharded_variable, training_state

CHUNK = 1 << 20
"""Integers that are digested at once: a device needs some 24 MiB for them, however large the variable."""
_MIX = 0x9E3779B97F4A7C15
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32}  # by size in bytes: the integers of the same bits


def of_tensor(value: tf.Tensor, positions: tf.Tensor | None = None) -> tf.Tensor:
    """The digest of a tensor of any dtype but strings: int64 scalar.

    Args:
        value: of a static shape.
        positions: from `odd_numbers`, if several tensors share them.

    Example:
        >>> zeros, other = of_tensor(tf.zeros(3)), of_tensor(tf.constant([0.0, 0.0, -0.0]))
        >>> bool(zeros == other)
        False
    """
    flat, words = tf.reshape(value, [-1]), _words(value.dtype)
    size, most = flat.shape[0], CHUNK // words
    positions = odd_numbers(words * min(size, most)) if positions is None else positions
    total = tf.zeros([], tf.int64)
    for number, begin in enumerate(range(0, size, most)):
        waits = [total] if number else []  # one chunk after the other, or all would be in memory at once
        with tf.control_dependencies(waits):
            part = _as_integers(flat if size <= most else flat[begin : begin + most])
            total += _odd(number) * tf.reduce_sum(part * positions[: part.shape[0]])
    return total


def odd_numbers(count: int) -> tf.Tensor:
    """The factors of the numbers at the first `count` positions: int64."""
    return 2 * tf.range(tf.constant(count, tf.int64), dtype=tf.int64) + 1


def compared(model: keras.Model) -> dict[str, keras.Variable]:
    """The variables of which every replica must hold an equal copy after each step, by their names in a checkpoint.

    The optimizer's come first: what differs there soon makes weights differ, and not the other way round.

    Left out are metrics, accumulated gradients and other variables that each replica has of its own (`on_read`, states
    of a stateful RNN, `batch_norm="replica"`), and the pieces of ZeRO.
    """
    return {name: variable for name, variable in _changing(model).items() if _is_compared(variable)}


def _changing(model: keras.Model) -> dict[str, keras.Variable]:
    """What a step changes, without building an optimizer that may never be used."""
    found = {}
    for name, optimizer in training_state.optimizers(model).items():
        if optimizer.built:
            found |= training_state.name_group(name, optimizer.variables)
    for provider in extensions.state_providers:
        found |= provider.variables(model)
    known = {id(variable) for variable in found.values()}
    own = [variable for variable in model.variables if id(variable) not in known]
    metrics = {id(variable) for variable in model.metrics_variables}
    weights = {id(variable) for variable in model.weights}
    seeds = [variable for variable in own if id(variable) not in metrics | weights]
    return found | training_state.name_group("draws", seeds) | training_state.name_group("weights", model.weights)


def of_copies(model: keras.Model, variables: Sequence[keras.Variable]) -> np.ndarray:
    """The digests of this process's copies of variables: int64 [replicas, variables].

    Args:
        model: keeps the function that computes them.
        variables: from `compared`.
    """
    kept = slots.of(model)
    function = getattr(kept, "digests", None)
    copies = [held(variable).values for variable in variables]
    if function is None or not function.fits(copies):
        function = kept.digests = _Digests(copies)
    return function()


class _Digests:
    """Computes the digests of the same variables again and again."""

    def __init__(self, copies: Sequence[Sequence[tf.Variable]]):
        self._copies = [tuple(each) for each in copies]
        # A partial has no code object, by which TensorFlow would take all models' digests for one function.
        self._compute = tf.function(functools.partial(self._of_replicas), autograph=False)

    def fits(self, copies: Sequence[Sequence[tf.Variable]]) -> bool:
        pairs = zip(copies, self._copies, strict=False)
        return len(copies) == len(self._copies) and all(tuple(map(id, a)) == tuple(map(id, b)) for a, b in pairs)

    def __call__(self) -> np.ndarray:
        return np.stack([row.numpy() for row in self._compute()])

    def _of_replicas(self) -> list[tf.Tensor]:
        return [self._of_replica(replica) for replica in zip(*self._copies, strict=True)]

    def _of_replica(self, copies: Sequence[tf.Variable]) -> tf.Tensor:
        found, positions = [], {}
        most: dict[str, int] = {}
        for copy in copies:
            words = copy.shape.num_elements() * _words(copy.dtype)
            most[copy.device] = max(most.get(copy.device, 1), min(words, CHUNK))
        for copy in copies:
            with tf.device(copy.device):
                if copy.device not in positions:
                    positions[copy.device] = odd_numbers(most[copy.device])
                value = tf.raw_ops.ReadVariableOp(resource=copy.handle, dtype=copy.dtype)
                found.append(of_tensor(tf.ensure_shape(value, copy.shape), positions[copy.device]))
        with tf.device("CPU:0"):
            return tf.stack(found)


def _words(dtype: tf.DType) -> int:
    """Integers that hold the bits of a number."""
    return max(1, dtype.size // 4)


def _as_integers(flat: tf.Tensor) -> tf.Tensor:
    """The bits of numbers as integers of at most 32 bits, in one row of int64.

    With 64 bits the highest one, times whatever odd number, would be that bit alone: two signs would cancel.
    """
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.int64)
    integers = tf.cast(tf.bitcast(flat, _INTEGERS[min(4, flat.dtype.size)]), tf.int64)
    return tf.reshape(integers, [-1])  # not before: a GPU reshapes int32 in the host's memory


def _odd(number: int) -> tf.Tensor:
    """An odd factor for a chunk, so that chunks cannot be exchanged."""
    factor = (_MIX * (2 * number + 1)) % 2**64
    return tf.constant(factor - 2**64 if factor >= 2**63 else factor, tf.int64)


def _is_compared(variable: keras.Variable) -> bool:
    if not isinstance(variable, keras.Variable) or held(variable) is None or not has_copies(variable):
        return False
    value, shard = held(variable), sharded_variable.shard_info(variable)
    if value.synchronization == tf.VariableSynchronization.ON_READ or value.dtype == tf.string:
        return False
    if shard is not None and _is_over_replicas(shard):
        return False
    return not any(slots.get(copy, "differs_by_replica") for copy in value.values)


def _is_over_replicas(shard: sharded_variable.ShardInfo) -> bool:
    return shard.sharding.over_replicas or (shard.outer is not None and _is_over_replicas(shard.outer))

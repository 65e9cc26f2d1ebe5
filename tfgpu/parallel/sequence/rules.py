"""Which layers and operations give each position its own result, and which need all positions.

Keras's own layers have rules. Attention meets (`attention.py`). Everything else is tried once: its code runs on drawn
values, whole and in parts; if the parts do not give the whole, it is computed on all positions, on the first device.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, slots
from tfgpu.compat.keras import in_symbolic_scope, replaced_attributes, tree
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.core.row_mixing import own_layers
from tfgpu.core.row_mixing.trials import isolation
from tfgpu.errors import InputError
from tfgpu.parallel.sequence import positions, ranks
from tfgpu.parallel.tensor import split_rules

_log = logging.getLogger(__name__)
_LOCAL, _PLAIN = object(), object()
"""Say to a rank that it may compute its own positions; and that code within needs no rules."""
_tried = step_context.Slot("sequence.tried")
"""The layer whose own code this rank is about to try."""
_is_plain = step_context.Slot("sequence.is_plain")
"""Whether code runs whose trial needed no rules: each layer within gives each position its own result."""
_is_placed = step_context.Slot("sequence.is_placed")
"""Whether a layer around knows the position at which this rank begins."""
_DIFFERS = object()
_TRIED_POSITIONS, _TRIED_ROWS = 4, 2
_OF_FEATURES = (
    keras.layers.Dense,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.UnitNormalization,
    keras.layers.Softmax,
)
_OF_NUMBERS = (
    keras.layers.Embedding,
    keras.layers.Dropout,
    keras.layers.Identity,
    keras.layers.InputLayer,
    keras.layers.Masking,
    keras.layers.Rescaling,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
)
_OF_SEVERAL = (
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
_OPERATIONS = split_rules.ELEMENTWISE_OPERATIONS | frozenset(
    "Cast Divide TrueDivide Sqrt Rsqrt Power Log Clip Where Equal NotEqual Greater GreaterEqual Less LessEqual "
    "LogicalAnd LogicalOr LogicalNot Erf Softcap ZerosLike OnesLike StopGradient".split()
)


@functools.cache
def install() -> None:
    """Lets ranks compute layers and operations by their rules."""

    @wrap("keras.layers.Layer.__call__")
    def call_layer(stock, self, *args, **kwargs):
        rank = ranks.here()
        if rank is None or in_symbolic_scope():
            return stock(self, *args, **kwargs)
        if own_layers.needs_all_rows(self, args, kwargs):  # replicas meet in the thread that started the ranks
            return rank.meet(_Whole(rank.group, self, functools.partial(stock, self)).on_all, (args, kwargs))
        if _is_plain.get():
            return stock(self, *args, **kwargs)
        if _tried.get() is self:
            with _tried.set_to(None):
                return stock(self, *args, **kwargs)
        return _called(rank, self, functools.partial(stock, self), args, kwargs)

    @wrap("keras.Operation.__call__")
    def call_operation(stock, self, *args, **kwargs):
        rank = ranks.here()
        if rank is None or in_symbolic_scope() or _is_plain.get() or isinstance(self, keras.layers.Layer):
            return stock(self, *args, **kwargs)
        return _called(rank, self, functools.partial(stock, self), args, kwargs)


def _called(rank: ranks.Rank, operation, stock, args: tuple, kwargs: dict) -> object:
    given = [value for value in tree.flatten((args, kwargs)) if tf.is_tensor(value)]
    parts = [value for value in given if positions.is_part(value, rank.group.length)]
    if not parts:  # the same for all ranks
        rank.group.has_met |= getattr(operation, "seed_generator", None) is not None
        with step_context.scope(draw_shard=None):
            return positions.mark_alike(stock(*args, **kwargs))
    if isinstance(operation, keras.layers.Layer):
        if _is_by_positions(_Call(operation, parts, given, kwargs)):
            return stock(*args, **kwargs)
    elif _is_elementwise(operation, parts, given):
        return stock(*args, **kwargs)
    answer = rank.meet(_Whole(rank.group, operation, stock).compute, (args, kwargs))
    if answer is _PLAIN:
        with _is_plain.set_to(True):
            return stock(*args, **kwargs)
    return _from_start(stock, operation, rank, args, kwargs) if answer is _LOCAL else answer


def _from_start(call, operation, rank: ranks.Rank, args: tuple, kwargs: dict) -> object:
    """Calls a layer that counts positions from `start_index`, as KerasHub's do, with the position of its part."""
    takes = inspect.signature(type(operation).call).parameters if isinstance(operation, keras.layers.Layer) else {}
    if "start_index" not in takes or kwargs.get("positions") is not None:
        return call(*args, **kwargs)
    at = [*takes].index("start_index") - 1  # without `self`
    given = args[at] if len(args) > at else kwargs.get("start_index")
    rank.group.has_met = True
    if given is None or not _is_placed.get():
        placed = rank.begin if given is None else given + rank.begin
        args, kwargs = (*args[:at], placed, *args[at + 1 :]) if len(args) > at else args, dict(kwargs)
        if len(args) <= at:
            kwargs["start_index"] = placed
    with _is_placed.set_to(True):  # what it hands on to layers within counts already
        return call(*args, **kwargs)


class _Call(NamedTuple):
    """A call of a layer: its tensors, and those of them that are parts of a sequence."""

    layer: keras.layers.Layer
    parts: list
    given: list
    kwargs: dict

    @property
    def rank(self) -> int:
        return self.parts[0].shape.rank

    def is_last(self, axis: int) -> bool:
        """Whether an axis is the last one, and not that of the positions."""
        return self.rank >= 3 and axis in (-1, self.rank - 1)


def _is_by_positions(call: _Call) -> bool:
    """Whether a layer of Keras's gives each position its own result, or meets within."""
    kind = type(call.layer)
    if call.layer.activity_regularizer is not None or layers.recomputes(call.layer):
        return False
    if kind in _RULES:
        return _RULES[kind](call)
    if kind.__name__ == "ReversibleEmbedding":  # KerasHub's
        return _is_of_numbers(call)
    # Keras's models, whose inner calls come here one by one; a class of the user's has code of its own.
    return kind in (keras.Sequential, keras.Model) or kind.__name__ == "Functional"


def _is_of_features(call: _Call) -> bool:
    axis = getattr(call.layer, "axis", -1)
    return all(map(call.is_last, axis if isinstance(axis, (list, tuple)) else [axis]))


def _is_of_numbers(call: _Call) -> bool:
    return getattr(call.layer, "noise_shape", None) is None


def _is_activation(call: _Call) -> bool:
    function = call.layer.activation
    is_softmax = getattr(function, "__name__", "") in ("softmax", "log_softmax")
    return split_rules.is_elementwise(function) or (is_softmax and call.is_last(-1))


def _is_concatenation(call: _Call) -> bool:
    return len(call.parts) == len(call.given) and call.is_last(call.layer.axis)


def _keeps_positions(call: _Call) -> bool:
    """Whether the second axis of the inputs is the second one of the outputs, and none of the kernel."""
    equation = call.layer.equation
    inputs, result = equation.replace(" ", "").split("->")
    given, kernel = inputs.split(",")
    return "..." not in equation and len(given) > 2 and given[1] not in kernel and result[1:2] == given[1]


def _is_attention(call: _Call) -> bool:
    gives_scores = call.kwargs.get("return_attention_scores") or layers.attention_settings(call.layer).gives_scores
    has_one_axis = isinstance(call.layer, keras.layers.GroupQueryAttention) or layers.attention_rank(call.layer) == 1
    return not gives_scores and has_one_axis and call.rank == 3


_RULES: dict[type, Callable[[_Call], bool]] = {
    **dict.fromkeys(_OF_FEATURES, _is_of_features),
    **dict.fromkeys(_OF_NUMBERS, _is_of_numbers),
    **dict.fromkeys(_OF_SEVERAL, lambda call: _are_alike(call.parts, call.given)),
    keras.layers.Activation: _is_activation,
    keras.layers.Concatenate: _is_concatenation,
    keras.layers.EinsumDense: _keeps_positions,
    keras.layers.MultiHeadAttention: _is_attention,
    keras.layers.GroupQueryAttention: _is_attention,
}
"""By class of Keras's; a subclass has code of its own."""


def _are_alike(parts: list, given: list) -> bool:
    """Whether all tensors are parts, or the same for each position."""
    rank = parts[0].shape.rank
    return all(
        any(each is part for part in parts) or (each.shape.rank == rank and each.shape[1] == 1) or each.shape.rank == 0
        for each in given
    ) and all(part.shape.rank == rank for part in parts)


def _is_elementwise(operation: keras.Operation, parts: list, given: list) -> bool:
    name = type(operation).__name__
    if not type(operation).__module__.startswith("keras."):
        return False
    if name in ("Softmax", "LogSoftmax"):
        return parts[0].shape.rank >= 3 and operation.axis in (-1, parts[0].shape.rank - 1)
    if name == "DotProductAttention":
        return True
    return name in _OPERATIONS and _are_alike(parts, given)


class _Whole:
    """What a call needs that may need all positions: a verdict, and then the call on all of them."""

    def __init__(self, group: ranks.Group, operation, stock):
        self._group, self._operation, self._stock = group, operation, stock

    def compute(self, brought: list) -> list:
        """What `_verdict` says, or `on_all`."""
        verdict = self._verdict(brought[0])
        return self.on_all(brought) if verdict is None else [verdict] * self._group.count

    def on_all(self, brought: list) -> list:
        """Each rank's part of the call's results on all positions."""
        group = self._group
        with tf.device(group.devices[0]):
            args, kwargs = positions.whole(brought, group.length)
            result = self._stock(*args, **kwargs)
            group.take_losses(self._operation)
            ranks_of_inputs = {each.shape.rank for each in tree.flatten(brought[0]) if tf.is_tensor(each)}
            return positions.split(result, group.length, group.devices, sorted(ranks_of_inputs))

    def _verdict(self, given: tuple) -> object:
        """`_LOCAL` or `_PLAIN` if parts give the whole, by a trial that is kept with the layer; else None."""
        layer, length = self._operation, self._group.length
        if not isinstance(layer, keras.layers.Layer) or getattr(layer, "sees_whole_batch", False) is True:
            return None
        if type(layer).__module__.startswith("keras.") and type(layer).call is not keras.layers.Layer.call:
            return None  # Keras's own layers have rules
        key = tuple(
            (each.shape.rank, positions.is_part(each, length)) if tf.is_tensor(each) else None
            for each in tree.flatten(given)
        )
        known = vars(slots.of(layer)).setdefault("sequence_verdicts", {})
        if key not in known:
            trial = _Trial(layer, given, length, self._group.count)
            why = trial.why_whole()
            known[key] = None if why is not None else _LOCAL if trial.has_met else _PLAIN
            if why is not None:
                _log.warning(
                    "%s %r mixes positions (%s): the first device of each group computes it on the whole sequence.",
                    type(layer).__name__,
                    layer.name,
                    why,
                )
        return known[key]


class _Trial:
    """A layer's code on drawn values, whole and in parts."""

    def __init__(self, layer: keras.layers.Layer, given: tuple, length: int, count: int):
        self._layer, self._given, self._length, self._count = layer, given, length, count
        self.has_met = False
        """Whether something within needed other positions, or the number of its first one."""

    def why_whole(self) -> str | None:
        """Why the layer needs all positions; None if it does not."""
        return isolation.run(self._apart)

    def _apart(self) -> str | None:
        with replaced_attributes({"current_call_ctx": None}), keras.StatelessScope():  # not in training
            return self._judged()

    def _judged(self) -> str | None:
        layer, small = self._layer, min(self._length, _TRIED_POSITIONS)
        for seed in range(2):
            args, kwargs = self._drawn(np.random.default_rng(seed), small * self._count)
            try:
                expected = tree.flatten(layer(*args, **kwargs))
                if layers.added_losses(layer):
                    return "it adds a loss"
                found = self._in_parts(args, kwargs, small)
            except Exception as error:
                return f"{type(error).__name__} in its parts" if not isinstance(error, InputError) else str(error)
            finally:
                layers.clear_losses(layer)
            if found is None:
                return "its parts do not agree"
            for one, other in zip(expected, found, strict=True):
                if not tf.is_tensor(one):
                    continue
                if one.shape != other.shape or not np.allclose(one, other, rtol=1e-4, atol=1e-5):
                    return "its parts do not give the whole"
        return None

    def _in_parts(self, args: tuple, kwargs: dict, small: int) -> list | None:
        """What the parts give, joined; None if they differ in what has no positions."""
        devices = ["CPU:0"] * self._count
        given = positions.split((args, kwargs), small, devices, range(2, 9))

        def call(rank: ranks.Rank):
            own, named = given[rank.at]
            with _tried.set_to(self._layer):
                return _from_start(self._layer, self._layer, rank, own, named)

        group = ranks.Group(devices, small)
        found = [tree.flatten(each) for each in group.run(call)]
        self.has_met |= group.has_met
        joined = [self._joined(column, small) for column in zip(*found, strict=True)]
        return None if any(each is _DIFFERS for each in joined) else joined

    @staticmethod
    def _joined(column: tuple, small: int) -> object:
        """One output of all positions; `_DIFFERS` if it has no positions, and the ranks do not agree."""
        shape = getattr(column[0], "shape", ())
        if tf.is_tensor(column[0]) and shape[:1] == [_TRIED_ROWS * small]:  # of tokens, row by row
            rows = [tf.reshape(each, [_TRIED_ROWS, small, *shape[1:]]) for each in column]
            return tf.reshape(tf.concat(rows, 1), [-1, *shape[1:]])
        if positions.is_part(column[0], small):
            return positions.joined(column)
        return column[0] if all(np.array_equal(column[0], each) for each in column) else _DIFFERS

    def _drawn(self, random: np.random.Generator, length: int) -> tuple:
        def draw(value):
            if not tf.is_tensor(value):
                return value
            shape = [_TRIED_ROWS, *(size or 3 for size in value.shape[1:])] if value.shape.rank else []
            if positions.is_part(value, self._length):
                shape[1] = length
            # A mask of queries and keys has positions on a later axis, too.
            whole = self._length * self._count
            shape = shape[:2] + [length if size == whole else size for size in shape[2:]]
            if value.dtype == tf.bool:
                return tf.constant(random.uniform(size=shape) < 0.8)
            if value.dtype.is_integer:
                return tf.cast(random.integers(0, 2, shape), value.dtype)
            return tf.cast(random.normal(size=shape), value.dtype)

        args, kwargs = self._given
        named = {name: value for name, value in kwargs.items() if name != "training"}  # in which dropout draws
        return tree.map_structure(draw, (args, named))

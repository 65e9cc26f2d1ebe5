"""Weights for the trial of a step whose replicas hold a piece of each (ZeRO, stage 3).

One device's step sees each variable whole, in its shape. A replica's step sees a flat piece of it, and that piece of
the gradient, which is the sum over replicas by then. So such a step is right by rows if the gradients that it takes are
sums over rows, and if what it does with them is the same for a piece as for the whole. The trial runs it on parts of
the rows with whole weights, and on all rows with pieces of the weights, which are drawn: reading the replicas' own
would be a collective.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.core import extensions, step_context
from tfgpu.core.row_mixing.trials import comparison, draws
from tfgpu.core.row_mixing.trials.step_recorder import Recorder
from tfgpu.core.row_mixing.trials.weights_in_pieces import TrialWeights
from tfgpu.core.state.sharded_variable import shard_info
from tfgpu.core.state.trial_scope import Apart

PIECES = 2
_LARGER = 1024.0
_seen = step_context.Slot("zero.trial_weights")


def stand_ins(model: keras.Model) -> "StandIns | None":
    """What stands in for the weights of which each replica of a model holds a flat piece; None if there are none.

    Those of experts are tried as any other variable.
    """
    found = [(variable, shard_info(variable)) for variable in model.variables]
    pieces = [(variable, info.sharding) for variable, info in found if info is not None and info.sharding.over_replicas]
    flat = [variable for variable, sharding in pieces if not getattr(sharding, "is_in_shape", False)]
    return StandIns(flat) if flat else None


extensions.trial_weights.register(stand_ins)


class StandIns(TrialWeights):
    """Drawn values in the place of variables of which each replica holds a piece.

    Args:
        shards: the variables.
    """

    pieces = PIECES
    refusal = (
        "which is impossible with `parallel.shard(stage=3)`: each replica holds only a part of the weights. Use "
        "`parallel.shard(model, stage=2)`"
    )

    def __init__(self, shards: Sequence[keras.Variable]):
        self._shards = list(shards)
        self._shapes = {id(each): tuple(shard_info(each).sharding.shape([each])) for each in shards}
        self._values: dict[int, tf.Tensor] = {}

    @property
    def ids(self) -> set[int]:
        return set(self._shapes)

    def draw(self) -> None:
        for at, shard in enumerate(self._shards):
            self._values[id(shard)] = draws.drawn_weight(at, shard, self._shapes[id(shard)])

    @contextlib.contextmanager
    def seen(self, scope: Apart, piece: int | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for shard in self._shards:
                value = self._values[id(shard)] if piece is None else self._pieces(shard)[piece]
                held = tf.Variable(value, trainable=shard.trainable)
                scope.begin_with(shard, held)
                stack.enter_context(variables.shaped_as(shard, value.shape))
            stack.enter_context(_seen.set_to((self, scope, piece)))
            yield

    def whole(self, shard: keras.Variable, scope: Apart, piece: int | None) -> tf.Tensor:
        """The whole value of a variable that a layer reads; its gradient goes to what the step sees of it."""
        own = tf.convert_to_tensor(scope.get_current_value(shard))
        if piece is None:
            return own
        parts = self._pieces(shard)
        parts[piece] = own
        return self._together(id(shard), parts)

    def whole_of(self, pieces: list[np.ndarray], whole: np.ndarray) -> list[np.ndarray]:
        """What the pieces' values may be for the whole: one after another, or each as it is."""
        flat = np.concatenate([each.reshape(-1) for each in pieces])
        is_cut = len(flat) == PIECES * -(-whole.size // PIECES)
        together = [flat[: whole.size].reshape(whole.shape)] if is_cut else []
        alike = pieces[:1] if all(np.array_equal(each, pieces[0], equal_nan=True) for each in pieces) else []
        return [each for each in (*together, *alike) if each.shape == whole.shape]

    def larger_first(self, piece: int | None, gradient: tf.Tensor) -> tf.Tensor:
        if piece is not None:
            return gradient * (_LARGER if piece == 0 else 1.0)
        first = tf.range(tf.size(gradient)) < -(-tf.size(gradient) // PIECES)
        return gradient * tf.reshape(tf.where(first, _LARGER, 1.0), tf.shape(gradient))

    def differing(self, whole: Recorder, pieces: list[Recorder], close: float) -> str | None:
        def is_close(one: np.ndarray, other: np.ndarray) -> bool:
            return comparison.is_close(one, other, close)

        def is_made(value: np.ndarray | None, found: list) -> bool:
            if value is None or any(each is None for each in found):
                return value is None and all(each is None for each in found)
            return any(is_close(value, each) for each in self.whole_of(found, value))

        if any(len(each.applied) != len(whole.applied) or len(each.logs) != len(whole.logs) for each in pieces):
            return "the number of updates"
        for at, gradients in enumerate(whole.applied):
            for number, value in enumerate(gradients):
                if not is_made(value, [each.applied[at][number] for each in pieces]):
                    return "what it does with the gradients of a piece of the weights"
        for at, value in enumerate(whole.logs):
            if not all(is_close(value, each.logs[at]) for each in pieces):
                return "a number in the logs, of a piece of the weights or gradients,"
        for key, variable in whole.assigned.items():
            unchanged = dataclasses.replace(variable, after=variable.before)
            if not is_made(variable.after, [each.assigned.get(key, unchanged).after for each in pieces]):
                return f"the variable {variable.path!r}, of a piece of the weights or gradients,"
        return None

    def _pieces(self, shard: keras.Variable) -> list[tf.Tensor]:
        flat = tf.reshape(self._values[id(shard)], [-1])
        size = -(-int(flat.shape[0]) // PIECES)
        return tf.split(tf.pad(flat, [[0, PIECES * size - int(flat.shape[0])]]), PIECES)

    def _together(self, key: int, pieces: list[tf.Tensor]) -> tf.Tensor:
        shape = self._shapes[key]
        return tf.reshape(tf.concat(pieces, 0)[: math.prod(shape)], shape)


def value_of(shard: keras.Variable) -> tf.Tensor | None:
    """The value of a variable in a step that is tried, whole; None outside of one."""
    seen = _seen.get()
    if seen is None:
        return None
    stand_ins, scope, piece = seen
    return stand_ins.whole(shard, scope, piece) if id(shard) in stand_ins.ids else None

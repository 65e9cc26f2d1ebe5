"""The layers that a tried layer calls: recorded where it has all rows, and replaced where they mix rows."""

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.core import step_context
from tfgpu.core.row_mixing.trials.isolation import TrialShard


class Needs(enum.Enum):
    """What a layer needs."""

    ITS_ROWS = "each replica's own rows"
    ITS_PARTS = "each replica's own rows, where layers within that mix rows get all"
    ALL = "all rows"
    UNKNOWN = "it could not be tried"


@dataclass
class Call:
    """A layer's call within the whole run, of which the shards get the rows."""

    layer: keras.layers.Layer
    arguments: tuple
    outputs: object
    losses: list
    state: dict
    context: object
    needs: Needs | None = None


@dataclass
class Recorder:
    """The calls of layers of the user's own within a trial: recorded in the whole run, replaced in the shards.

    Attributes:
        calls: by layer and its how-many-th call.
        shard: the rows of the run; None while calls are recorded.
        scope: the stateless scope of the run.
        counts: how many calls of each layer there were in the run.
    """

    calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    shard: TrialShard | None = None
    scope: keras.StatelessScope | None = None
    counts: dict[int, int] = field(default_factory=dict)
    is_on: bool = True


recorder = step_context.Slot("own_layers.recorder")


def within_trial(stock: Callable, layer: keras.layers.Layer, args: tuple, kwargs: dict) -> object:
    """A layer of the user's own is called by one that is tried."""
    kept: Recorder = recorder.get()
    if kept is None or not kept.is_on:
        return stock(layer, *args, **kwargs)
    number = kept.counts.get(id(layer), 0)
    kept.counts[id(layer)] = number + 1
    if kept.shard is None:
        context = copy.copy(private.call_context())
        before, losses = dict(kept.scope.state_mapping), len(kept.scope.losses)
        outputs = stock(layer, *args, **kwargs)
        state = {key: value for key, value in kept.scope.state_mapping.items() if before.get(key) is not value}
        kept.calls[id(layer), number] = Call(layer, (args, kwargs), outputs, kept.scope.losses[losses:], state, context)
        return outputs
    call = kept.calls.get((id(layer), number))
    if call is None or call.needs is not Needs.ALL:
        return stock(layer, *args, **kwargs)
    kept.scope.state_mapping.update(call.state)
    kept.scope.losses.extend(call.losses)
    return keras.tree.map_structure(lambda leaf: _rows_of(leaf, kept.shard), call.outputs)


def _rows_of(leaf: object, shard: TrialShard) -> object:
    has_rows = tf.is_tensor(leaf) and leaf.shape.rank and leaf.shape[0] and leaf.shape[0] % shard.total == 0
    return shard.of(leaf) if has_rows else leaf

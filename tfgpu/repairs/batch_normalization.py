"""BatchNormalization's moments over the global batch or, on request, over each replica's rows."""

import logging

import keras
import tensorflow as tf
from keras import ops

from tfgpu.compat import layers, slots
from tfgpu.compat.keras import nn, tree
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, replication, step_context
from tfgpu.core.moments import global_moments, graph_order
from tfgpu.core.state import layer_state
from tfgpu.errors import unknown
from tfgpu.repairs import Repair, probes, probing

SCOPES = ("global", "replica")

_log = logging.getLogger(__name__)


def choose_moments(strategy: tf.distribute.Strategy, scope: str) -> tf.distribute.Strategy:
    """Sets over which rows BatchNormalization takes its moments in training; returns the strategy.

    Args:
        strategy: a strategy of replicas.
        scope: `"global"`, the whole batch's, as on one device; or `"replica"`, each replica's own, with no collective
            in the step. Moving moments are then averaged over the replicas after each block of steps. A layer with
            `synchronized=True` still takes the whole batch's.

    Raises:
        InputError: the scope is unknown.
    """
    if scope not in SCOPES:
        raise unknown("batch_norm", scope, SCOPES)
    if scope == "replica" and strategy.num_replicas_in_sync > 1:
        slots.of(strategy).batch_norm = scope
        _log.warning(
            "batch_norm='replica': BatchNormalization normalizes each of %d replicas by its own rows. The result is "
            "no longer that of one device.",
            strategy.num_replicas_in_sync,
        )
    return strategy


def has_replica_moments(strategy: tf.distribute.Strategy) -> bool:
    """Whether BatchNormalization takes each replica's moments over its own rows."""
    return slots.get(strategy, "batch_norm") == "replica"


def normalize_by_global_batch() -> None:
    """Makes BatchNormalization take mean and variance over the global batch, with masks, as one device does.

    Stock Keras takes them over each replica's rows unless `synchronized=True`, ignores that flag if there is a mask,
    and then computes the variance as E[x^2] - E[x]^2, which cancels if the mean is large. Here one collective combines
    every replica's count, mean and variance; layers on parallel branches of a functional model share it.
    """

    @wrap("nn.compute_moments_sync")
    def compute_moments_sync(stock, x, axes, keepdims):
        if replication.replica_context() is None:
            return stock(x, axes, keepdims)
        return _squeezed(global_moments.over_replicas(x, axes), axes, keepdims)

    @wrap("BatchNormalization.moments")
    def moments(stock, self, inputs, mask):
        if replication.replica_context() is None:
            return stock(self, inputs, mask)
        if _takes_own_moments(self):
            for variable in layers.own_non_trainable(self):  # averaging moving averages equals averaging their inputs
                layer_state.move_own(variable)
            return stock(self, inputs, mask)
        axes = layers.reduction_axes(self)
        if mask is None:
            return nn.moments(inputs, axes, synchronized=True)
        mask = tf.cast(ops.expand_dims(mask, -1), tf.bool)
        return _squeezed(global_moments.over_replicas(inputs, axes, mask), axes, keepdims=False)

    @wrap("keras.layers.BatchNormalization.call")
    def call(stock, self, inputs, training=None, *args, **kwargs):
        if step_context.current().is_trying:
            # On all rows it is right by itself, and must not make the code around it look as if it mixed rows.
            # Code that passes it only some of the rows does mix them.
            return stock(self, inputs, training and not _has_all_rows(inputs), *args, **kwargs)
        return call_with_moments(stock, self, inputs, training, *args, **kwargs)

    def call_with_moments(stock, self, *args, **kwargs):
        if not _takes_own_moments(self) or step_context.surely_has_rows():
            return stock(self, *args, **kwargs)
        before = [(variable, tf.identity(variable.value)) for variable in layers.own_non_trainable(self)]
        outputs = stock(self, *args, **kwargs)
        for variable, value in before:  # stand-in rows change nothing
            layer_state.put(variable, tf.where(step_context.has_rows(), variable.value, value))
        return outputs

    @wrap("KerasFunction.run_through_graph")
    def run_through_graph(stock, self, inputs, operation_fn=lambda operation: operation, call_fn=None):
        is_symbolic = any(isinstance(each, keras.KerasTensor) for each in tree.flatten(inputs))
        can_share = call_fn is None and not is_symbolic and graph_order.replicas_meet()
        groups = graph_order.groups_of(self) if can_share else None
        if groups is None:
            return stock(self, inputs, operation_fn, call_fn)
        return graph_order.run(self, groups, inputs, operation_fn)


def _has_all_rows(inputs: tf.Tensor) -> bool:
    """Whether code that is tried normalizes all its rows, or several numbers of each."""
    rows = step_context.current().trial_rows or batch_rows.known_rows()
    count = None if rows is None else tf.get_static_value(rows.local)
    return not count or inputs.shape[0] is None or inputs.shape[0] % int(count) == 0


def _squeezed(values: list[tf.Tensor], axes, keepdims: bool) -> tuple[tf.Tensor, ...]:
    return tuple(values if keepdims else (tf.squeeze(value, axes) for value in values))


def _takes_own_moments(layer: keras.layers.BatchNormalization) -> bool:
    context = replication.replica_context()
    return context is not None and has_replica_moments(context.strategy) and not layer.synchronized


@probes("BatchNormalization takes its statistics from one replica's rows")
def batch_norm_differs() -> bool:
    """Whether BatchNormalization sees one replica's rows only."""
    return probing.differs(rows=2, layer=keras.layers.BatchNormalization)


REPAIRS = (Repair("global-batch-norm", batch_norm_differs, normalize_by_global_batch),)

"""KerasHub's balance of experts, from the rows of all replicas.

Its blocks add a loss of the batch's means, which is no mean over replicas. What it needs of each token, one number for
each expert, is brought together.
"""

import functools
import sys
from types import ModuleType

import keras
import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, replication, step_context
from tfgpu.core.row_mixing import row_sums
from tfgpu.parallel import model_graph

_FUNCTION = "compute_load_balancing_loss"


def install(model: keras.Model) -> None:
    """Makes KerasHub's layers within a model balance their experts over all rows, in this process from now on."""
    for layer in model_graph.layers_within(model).values():
        module = sys.modules[type(layer).__module__]
        if module.__name__.startswith("keras_hub.") and hasattr(module, _FUNCTION):
            _of_all_rows(module)


@functools.cache
def _of_all_rows(module: ModuleType) -> None:
    @wrap(module, _FUNCTION, listed="*_load_balancing_loss")
    def compute(stock, router_logits, num_experts, top_k, attention_mask=None):
        if step_context.current().is_trying:
            return tf.zeros([], router_logits.dtype)  # the layer around is tried without it
        if _meets():
            router_logits = row_sums.all_rows(router_logits)
            if attention_mask is not None:
                attention_mask = _mask_of_all_rows(tf.convert_to_tensor(attention_mask))
        return stock(router_logits, num_experts=num_experts, top_k=top_k, attention_mask=attention_mask)


def _meets() -> bool:
    context = replication.replica_context()
    if context is None or context.num_replicas_in_sync == 1 or step_context.has_local_forward():
        return False
    return step_context.step() is not None or batch_rows.can_communicate()


def _mask_of_all_rows(mask: tf.Tensor) -> tf.Tensor:
    """[batch, length], or [batch, length, 1] of a mask of pairs, of which only whether a row has any is asked."""
    if mask.shape.rank == 3:
        mask = tf.reduce_any(tf.cast(mask, tf.bool), -1, keepdims=True)
    return row_sums.all_rows(mask)

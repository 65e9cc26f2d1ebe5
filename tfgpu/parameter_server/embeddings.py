"""Embedding tables on parameter servers: rows are gathered on the server, and large tables are split among servers.

Stock Keras reads the whole table and gathers from the copy, so every step moves all of it over the network. It cannot
use TensorFlow's `ShardedVariable` either, so a table must fit on one server. Here a step moves only the rows it needs.
"""

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers as private_layers
from tfgpu.compat import slots, variables
from tfgpu.compat.keras import in_stateless_scope
from tfgpu.compat.patch import wrap
from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError
from tfgpu.parallel import shard_patches

_SEPARABLE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def set_partitioner(strategy: tf.distribute.Strategy, partitioner) -> None:
    """Splits tables that are created under the strategy by rows.

    Args:
        partitioner: as in `tf.distribute.experimental.partitioners`.
    """
    slots.of(strategy).partitioner = partitioner


def is_on_servers(variable) -> bool:
    """Whether a Keras variable is on a parameter server."""
    value = variables.held(variable)
    return value is not None and "/job:ps/" in (getattr(value, "device", None) or "")


def look_up_on_servers() -> None:
    """Gathers rows on the server of the table, and splits tables if the strategy has a partitioner."""

    @wrap("keras.layers.Embedding.build")
    def build(stock, self, input_shape=None):
        count = 1 if self.built else _count_shards(self)
        if count == 1:
            return stock(self, input_shape)
        private_layers.set_raw_embeddings(self, _split(self, count))
        self.built = True

    @wrap("keras.layers.Embedding.call")
    def call(stock, self, inputs):
        table = None if self.quantization_mode or self.lora_enabled else private_layers.raw_embeddings(self)
        shards = table.shards if isinstance(table, sharded_variable.ShardedVariable) else [table]
        is_dense = isinstance(inputs, tf.Tensor)
        if table is None or not is_dense or in_stateless_scope() or not is_on_servers(shards[0]):
            return stock(self, inputs)
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        return tf.cast(_rows(shards, ids), self.compute_dtype)

    @wrap("keras.layers.Embedding.enable_lora")
    def enable_lora(stock, self, *args, **kwargs):
        if _is_split(self):
            raise InputError(f"LoRA does not work with the table {self.name!r}, which is split among servers.")
        return stock(self, *args, **kwargs)

    @wrap("keras.layers.Embedding.load_own_variables")
    def load_own_variables(stock, self, store):
        if not _is_split(self):
            return stock(self, store)
        private_layers.raw_embeddings(self).assign(np.asarray(store["0"]))


def _is_split(layer) -> bool:
    return layer.built and isinstance(private_layers.raw_embeddings(layer), sharded_variable.ShardedVariable)


def _count_shards(layer) -> int:
    """How many shards the strategy's partitioner asks for; 1 keeps the table whole."""
    partitioner = slots.get(tf.distribute.get_strategy(), "partitioner")
    if partitioner is None:
        return 1
    shape = tf.TensorShape([layer.input_dim, layer.output_dim])
    count = int(list(partitioner(shape=shape, dtype=tf.as_dtype(layer.variable_dtype)))[0])
    count = max(1, min(count, layer.input_dim))
    if count == 1:
        return 1
    regularizer = layer.embeddings_regularizer
    refused = {
        "embeddings_constraint": layer.embeddings_constraint is not None,
        "embeddings_regularizer": regularizer is not None and not isinstance(regularizer, _SEPARABLE),
        "lora_rank": bool(layer.lora_rank),
        "quantization": bool(layer.quantization_mode),
    }
    for name in [name for name, is_there in refused.items() if is_there]:
        raise InputError(
            f"`{name}` of the table {layer.name!r} needs the whole table, but the partitioner splits it into {count} "
            "shards. Remove one of them."
        )
    return count


def _split(layer, count: int) -> sharded_variable.ShardedVariable:
    """Creates the shards of a table; their initial values are drawn as one table, as on one device."""
    rows, width = layer.input_dim, layer.output_dim
    with tf.init_scope():
        drawn = np.asarray(layer.embeddings_initializer((rows, width), dtype=layer.variable_dtype))
    ends = [rows * (at + 1) // count for at in range(count)]
    shards, options = [], {"regularizer": layer.embeddings_regularizer, "trainable": True}
    for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):

        def initial(shape, dtype, part=drawn[begin:end]):
            return tf.convert_to_tensor(part, dtype)

        shape, name = (end - begin, width), f"embeddings_{at}"
        shards.append(layer.add_weight(shape=shape, initializer=initial, name=name, **options))
    return shard_patches.mark_shards(shards, sharded_variable.AxisSharding(0), f"{layer.path}/embeddings")


def _rows(shards: list, ids: tf.Tensor) -> tf.Tensor:
    """Gathers rows on the servers that hold them; negative ids count from the end, as in Keras."""
    ends = np.cumsum([shard.shape[0] for shard in shards])
    ids = tf.where(ids < 0, ids + tf.constant(ends[-1], ids.dtype), ids)
    if len(shards) == 1:
        return shards[0].value.sparse_read(ids)
    flat = tf.reshape(ids, [-1])
    at = tf.searchsorted(tf.constant(ends, ids.dtype), flat, side="right")
    starts = tf.constant([0, *ends[:-1]], ids.dtype)
    places = tf.dynamic_partition(tf.range(tf.size(flat)), at, len(shards))
    wanted = tf.dynamic_partition(flat - tf.gather(starts, at), at, len(shards))
    found = [shard.value.sparse_read(rows) for shard, rows in zip(shards, wanted, strict=True)]
    rows = tf.dynamic_stitch(places, found)
    return tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))

"""Embedding tables on parameter servers: looked up where they lie, and cut by rows over several servers.

Stock Keras reads the whole table and gathers from the copy, so every step moves all of it over the network. And it
cannot use TensorFlow's `ShardedVariable`, so a table must fit on one server. Here a step moves the rows that it needs.
"""

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from tfgpu.compat.patch import wrap
from tfgpu.errors import InputError
from tfgpu.parallel import sharded_variable

_ADDS_UP = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def set_partitioner(strategy: tf.distribute.Strategy, partitioner) -> None:
    """Lets tables that are made under the strategy be cut by rows.

    Args:
        partitioner: as in `tf.distribute.experimental.partitioners`.
    """
    strategy._tfgpu_partitioner = partitioner


def is_on_servers(variable) -> bool:
    """Whether a Keras variable lies on a parameter server."""
    value = getattr(variable, "_value", None)
    return value is not None and "/job:ps/" in (getattr(value, "device", None) or "")


def look_up_on_servers() -> None:
    """Gathers rows where the table lies, and cuts tables where the strategy has a partitioner."""
    owner = keras.layers.Embedding

    @wrap(owner, "build")
    def build(stock, self, input_shape=None):
        count = 1 if self.built else _shards_of(self)
        if count == 1:
            return stock(self, input_shape)
        self._embeddings = _cut(self, count)
        self.built = True

    @wrap(owner, "call")
    def call(stock, self, inputs):
        table = None if self.quantization_mode or self.lora_enabled else self._embeddings
        shards = table.shards if isinstance(table, sharded_variable.ShardedVariable) else [table]
        is_dense = isinstance(inputs, tf.Tensor)
        if table is None or not is_dense or backend.in_stateless_scope() or not is_on_servers(shards[0]):
            return stock(self, inputs)
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        return tf.cast(_rows(shards, ids), self.compute_dtype)

    @wrap(owner, "enable_lora")
    def enable_lora(stock, self, *args, **kwargs):
        if isinstance(getattr(self, "_embeddings", None), sharded_variable.ShardedVariable):
            raise InputError(f"LoRA does not fit the table {self.name!r}, which is cut over parameter servers.")
        return stock(self, *args, **kwargs)

    @wrap(owner, "load_own_variables")
    def load_own_variables(stock, self, store):
        if not isinstance(getattr(self, "_embeddings", None), sharded_variable.ShardedVariable):
            return stock(self, store)
        self._embeddings.assign(np.asarray(store["0"]))


def _shards_of(layer) -> int:
    strategy = tf.distribute.get_strategy()
    partitioner = getattr(strategy, "_tfgpu_partitioner", None)
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
        "embeddings_regularizer": regularizer is not None and not isinstance(regularizer, _ADDS_UP),
        "lora_rank": bool(layer.lora_rank),
        "quantization": bool(layer.quantization_mode),
    }
    for name in [name for name, is_there in refused.items() if is_there]:
        raise InputError(
            f"`{name}` of the table {layer.name!r} looks at the whole table, which the partitioner cuts into {count}. "
            "Leave one of the two out."
        )
    return count


def _cut(layer, count: int) -> sharded_variable.ShardedVariable:
    """The table's shards: their first values are drawn as one table, as on one device."""
    rows, width = layer.input_dim, layer.output_dim
    with tf.init_scope():
        drawn = np.asarray(layer.embeddings_initializer((rows, width), dtype=layer.variable_dtype))
    ends = [rows * (at + 1) // count for at in range(count)]
    shards = []
    for at, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        shard = layer.add_weight(
            shape=(end - begin, width),
            initializer=lambda shape, dtype, part=drawn[begin:end]: tf.convert_to_tensor(part, dtype),
            name=f"embeddings_{at}",
            regularizer=layer.embeddings_regularizer,
            trainable=True,
        )
        shards.append(shard)
    return sharded_variable.mark_shards(shards, sharded_variable.AxisSharding(0), f"{layer.path}/embeddings")


def _rows(shards: list, ids: tf.Tensor) -> tf.Tensor:
    """Rows of the table, gathered on the servers that hold them; negative numbers count from the end, as in Keras."""
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

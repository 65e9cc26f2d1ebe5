"""Custom layers with plans, and models that use them: for `test_tensor_blocks.py`."""

import keras
import numpy as np
from keras import ops

import tfgpu

WIDTH, HEADS, KEYS, LENGTH, WORDS = 8, 4, 2, 5, 25


@keras.saving.register_keras_serializable("tests")
class Attention(keras.layers.Layer):
    """Grouped queries, by Dense layers and reshapes, as users write it."""

    def __init__(self, heads=HEADS, keys=KEYS, dropout=0.2, **kwargs):
        super().__init__(**kwargs)
        self.num_heads, self.num_keys, self.groups, self.rate = heads, keys, heads // keys, dropout
        self.head_width = WIDTH // heads
        self.query = keras.layers.Dense(WIDTH, name="query")
        self.key = keras.layers.Dense(self.head_width * keys, use_bias=False, name="key")
        self.value = keras.layers.Dense(self.head_width * keys, name="value")
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.dropout = keras.layers.Dropout(dropout, seed=5)
        self.out = keras.layers.Dense(WIDTH, name="out")

    def build(self, shape):
        for layer in (self.query, self.key, self.value):
            layer.build(shape)
        self.norm.build((None, None, None, self.head_width))
        self.out.build((None, None, WIDTH))

    def call(self, x):
        length = x.shape[1]
        queries = ops.reshape(self.query(x), (-1, length, self.num_heads, self.head_width))
        keys = ops.reshape(self.key(x), (-1, length, self.num_keys, self.head_width))
        values = ops.reshape(self.value(x), (-1, length, self.num_keys, self.head_width))
        queries = self.norm(queries)
        keys, values = (ops.repeat(each, self.groups, axis=2) for each in (keys, values))
        scores = ops.softmax(ops.einsum("bqhd,bkhd->bhqk", queries, keys))
        mixed = ops.einsum("bhqk,bkhd->bqhd", self.dropout(scores), values)
        return self.out(ops.reshape(mixed, (-1, length, self.num_heads * self.head_width)))

    def get_config(self):
        sizes = {"heads": self.num_heads, "keys": self.num_keys, "dropout": self.rate}
        return super().get_config() | sizes


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    """Attention and a gated feed-forward, with dropout before, between and after the pair."""

    def __init__(self, heads=HEADS, keys=KEYS, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.keys = heads, keys
        self.attention = Attention(heads, keys, name="attention")
        self.before = keras.layers.Dropout(0.1, seed=1)
        self.norm = keras.layers.RMSNormalization(name="norm")
        self.gate = keras.layers.Dense(12, lambda x: ops.silu(x) + 0.1, name="gate")
        self.up = keras.layers.Dense(12, use_bias=False, name="up")
        self.between = keras.layers.Dropout(0.2, seed=2)
        self.down = keras.layers.Dense(WIDTH, name="down")
        self.after = keras.layers.Dropout(0.1, seed=3)

    def build(self, shape):
        for layer in (self.attention, self.norm, self.gate, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], 12))

    def call(self, x):
        x = x + self.before(self.attention(x))
        normed = self.norm(x)
        return x + self.after(self.down(self.between(self.gate(normed) * self.up(normed))))

    def get_config(self):
        return super().get_config() | {"heads": self.heads, "keys": self.keys}


ATTENTION = {
    "query": "column",
    "key": "key_value",
    "value": "key_value",
    "dropout": -3,
    "out": "row",
    "num_heads": "heads",
    "num_keys": "key_value_heads",
    "groups": "groups",
}
tfgpu.parallel.register_plan(Attention, ATTENTION)
tfgpu.parallel.register_plan(Block, {"gate": "column", "up": "column", "down": "row"})


def model(heads=HEADS, keys=KEYS, lora=False):
    """Words, a block, and the logits of the tied table."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(WORDS, WIDTH, name="table")
    block = Block(heads, keys, name="block")
    made = keras.Model(inputs, table(block(table(inputs)), reverse=True))
    if lora:
        for layer in (table, block.attention, block.norm, block.up):
            layer.trainable = False
        for layer in (block.gate, block.down, block.attention.query, block.attention.key):
            layer.trainable = True
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(np.random.default_rng(1).normal(size=layer.lora_kernel_b.shape) * 0.1)
    return made


def fit(made, *callbacks, epochs=4, **optimizer):
    """Batches of 4, 4 and 2 rows."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, WORDS, (10, LENGTH)), draw.integers(0, WORDS, (10, LENGTH))
    with made.distribute_strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        chosen = keras.optimizers.AdamW(0.01, weight_decay=0.1, **optimizer)
        made.compile(chosen, loss, weighted_metrics=["accuracy"], jit_compile=False)
    how = {"batch_size": 4, "epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    return made.fit(x, y, sample_weight=np.linspace(0.5, 2, 10)[:, None], **how).history


def assert_equal(one, expected, made, history, bound=1e-5):
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=bound, err_msg=name)
    for variable, mine, other in zip(one.weights, made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=bound, err_msg=variable.path)

"""Sharded parameters (stage 3): what any model learns, what a device holds, and what is sent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.parallel import Mesh, apply, memory_by_device, shard
from tfgpu.parallel.zero import gathered_variable

layers = keras.layers
RNG = np.random.default_rng(0)
NUMBERS, WORDS = RNG.normal(size=(50, 8)).astype("float32"), RNG.integers(0, 11, (50, 6))
Y, WEIGHTS = RNG.normal(size=(50, 1)).astype("float32"), RNG.uniform(0.5, 2.0, 50).astype("float32")


class Reading(layers.Layer):
    """Reads the table of a layer that the model calls too."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


class Subclassed(keras.Model):
    """Has no graph, a variable of its own, and a variable that nothing reads."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(7, "relu")
        self.inner = keras.Sequential([layers.Dense(5, use_bias=False), layers.BatchNormalization()])
        self.kernel = self.add_weight(shape=(5, 1), name="own")
        self.unused = self.add_weight(shape=(3,), name="unused", initializer="ones")

    def call(self, x, training=False):
        return keras.ops.matmul(self.inner(self.first(x), training=training), self.kernel)


class Adding(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(8,), initializer="ones")

    def call(self, x):
        self.add_loss(keras.ops.mean((x * self.scale) ** 2))
        return x * self.scale


class Stepping(keras.Model):
    """A step written by hand."""

    def loss_of(self, x, y, predicted, weights):
        return self.compute_loss(x, y, predicted, weights)

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.loss_of(x, y, predicted, weights)
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(found, self.trainable_variables)
        return {metric.name: metric.result() for metric in self.metrics}


class Scaling(Stepping):
    def loss_of(self, *given):
        return self.optimizer.scale_loss(super().loss_of(*given))


class Summing(Stepping):
    def loss_of(self, x, y, predicted, weights):
        return tf.reduce_sum((predicted - y) ** 2, -1) / 16


class Penalizing(Stepping):
    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted, weights) + tf.reduce_mean(inner.gradient(predicted, x) ** 2)
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(found, self.trainable_variables)
        return {metric.name: metric.result() for metric in self.metrics}


def of_words(*between):
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 5, mask_zero=True)(inputs)
    for layer in between:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def read_twice():
    inputs = keras.Input((6,), dtype="int32")
    table = layers.Embedding(11, 5)
    x = Reading(table)(table(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    return of_words(
        layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.GRU(3, dropout=0.2, recurrent_dropout=0.2)
    )


def nested():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dropout(0.2)])
    inputs, shared = keras.Input((8,)), layers.Dense(8)
    return keras.Model(inputs, layers.Dense(1)(shared(shared(inner(inner(inputs))))))


def subclassed():
    model = Subclassed()
    model(np.zeros((2, 8), "float32"))
    return model


def frozen():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(7, "relu"), layers.Dense(5, "relu"), layers.Dense(1)])
    model.layers[0].trainable = False
    return model


def lora():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(7, "relu"), layers.Dense(1)])
    model.layers[0].enable_lora(2)
    return model


def regularized():
    both, across = keras.regularizers.L1L2(0.01, 0.02), keras.regularizers.OrthogonalRegularizer(0.1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(7, "relu", kernel_regularizer="l2", bias_regularizer=both),
            layers.Dense(7, "relu", kernel_regularizer=across, kernel_constraint=keras.constraints.UnitNorm(axis=0)),
            layers.Dense(1, activity_regularizer="l2"),
        ]
    )


def adding():
    return keras.Sequential([keras.Input((8,)), Adding(), layers.Dense(1)])


def stepping(cls):
    inputs = keras.Input((8,))
    return cls(inputs, layers.Dense(1)(layers.Dense(9, "tanh")(inputs)))


MODELS = {
    "a table read twice": read_twice,
    "recurrent": recurrent,
    "nested": nested,
    "subclassed": subclassed,
    "frozen": frozen,
    "LoRA": lora,
    "regularized": regularized,
    "a layer that adds a loss": adding,
    "a step by hand": lambda: stepping(Stepping),
    "a step by hand, loss scaling": lambda: stepping(Scaling),
    "a loss for each row": lambda: stepping(Summing),
    "a penalty on gradients": lambda: stepping(Penalizing),
}


def made(name, replicas, **how):
    if replicas == 1:
        strategy = tfgpu.strategy("one_device", devices="CPU:0")
    else:
        strategy = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)])
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = MODELS[name]()
    if replicas > 1:
        model = shard(model, stage=3, **how)
    with strategy.scope():
        optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5)
        if "scaling" in name:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def rows_for(model):
    return WORDS if isinstance(model.layers[0], layers.InputLayer) and model.input_shape == (None, 6) else NUMBERS


def fit(model, epochs=5):
    x = rows_for(model)
    data = dict(sample_weight=WEIGHTS, validation_data=(x, Y))
    history = model.fit(x, Y, 16, epochs=epochs, shuffle=False, verbose=0, **data).history
    return history, model.predict(x, verbose=0)


FAST = ("nested", "a step by hand")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MODELS])
def test_any_model_learns_what_it_learns_on_one_device(name, tmp_path):
    one, model = made(name, 1), made(name, 3)
    (expected, predicted), (history, mine) = fit(one), fit(model)
    for a, b in zip(one.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mine, predicted, atol=1e-5)
    model.save_weights(tmp_path / "model.weights.h5")
    again = made(name, 1)
    again.load_weights(tmp_path / "model.weights.h5")
    x = rows_for(model)
    np.testing.assert_allclose(again.predict(x, verbose=0), mine, atol=1e-6)  # a LoRA layer saves one kernel


def test_each_replica_holds_its_part_of_the_parameters():
    whole, model = made("nested", 1), made("nested", 3)
    sizes = [-(-int(np.prod(v.shape)) // 3) for v in whole.trainable_variables]
    assert [[copy.shape[0] for copy in v.value.values] for v in model.trainable_variables] == [[n] * 3 for n in sizes]
    seeds = sum(int(np.prod(v.shape)) * v.value.dtype.size for v in whole.non_trainable_variables)
    found = memory_by_device(model)
    assert [kinds["weights"] for kinds in found.values()] == [4 * sum(sizes) + seeds] * 3
    assert all(kinds["pieces"] == 0 for kinds in found.values())
    assert model.count_params() == whole.count_params()
    kernel = model.layers[-1].kernel
    assert isinstance(kernel, gathered_variable.GatheredVariable) and kernel.shape == (8, 1)
    np.testing.assert_array_equal(kernel.numpy(), whole.layers[-1].kernel.numpy())


@pytest.mark.parametrize(("policy", "size"), [("float32", 4), ("mixed_float16", 2)])
def test_what_a_step_sends(policy, size):
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        block = [layers.Dense(8, dtype=policy), layers.Dense(8, use_bias=False, dtype=policy)]
        model = shard(keras.Sequential([keras.Input((8,)), *block]), stage=3)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(NUMBERS[:32], np.zeros((32, 8)), 16, verbose=0)
    pieces, whole = 36 + 32, 72 + 64
    gathered, scattered = 2 * size * pieces, 4 * whole  # forwards and backwards; gradients go as the variables are
    sent = model.train_function.traffic.bytes / model.train_function.done
    assert sent - gathered - scattered == pytest.approx(0, abs=16)  # the loss and its rows besides


def test_a_layer_gathers_its_parameters_while_the_layer_before_it_runs():
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8, name=f"dense{at}") for at in range(4))])
        model = shard(model, stage=3)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables)

    graph = tf.function(lambda x: strategy.run(step, args=(x,))).get_concrete_function(tf.ones((2, 8))).graph
    gathers = [op for op in graph.get_operations() if op.type == "Pack" and all(t.shape.rank == 1 for t in op.inputs)]

    def waited_for(gather):  # the matrix products of either replica, forward and backward
        names = [op.name for op in _ancestors(gather) if op.type == "MatMul"]
        backward = sum(name.startswith("gradient_tape") for name in names)
        return (len(names) - backward) // 2, backward // 2

    assert len(gathers) == 2 * 2 * 4  # replicas; forward and backward; layers
    assert [waited_for(gather) for gather in gathers[::2]] == [
        *[(0, 0), (0, 0), (1, 0), (2, 0)],  # each layer's once the inputs of the layer before it are there
        *[(3, 0), (3, 0), (3, 1), (3, 2)],
    ]


def _ancestors(op):
    found, waiting = set(), [op]
    while waiting:
        for before in [*(tensor.op for tensor in waiting[-1].inputs), *waiting.pop().control_inputs]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


@pytest.mark.slow
def test_all_parameters_never_exist_at_once():
    def peak(stage):
        model = dict(name="mlp", input_shape=(1024,), classes=10, options=dict(widths=(1024,) * 12))
        asked = dict(model=model, batch=8, optimizer="adam", policy="float32", pipeline=None, shard=stage)
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
        environment["TF_ENABLE_ONEDNN_OPTS"] = "0"  # With AVX-512, oneDNN's allocator keeps what was freed.
        script = [sys.executable, str(Path(__file__).with_name("peak.py")), json.dumps(asked)]
        done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])["bytes"]

    all_parameters = 2 * 12 * 4 * 2**20  # both replicas'; one layer's are 4 MiB
    # 50 to 76 MB and 116 to 143 MB: how far the replicas' threads are apart varies.
    assert peak(3) < 0.9 * all_parameters < peak(2)


@pytest.mark.slow
def test_a_mesh_that_has_data_alone_shards_a_model_that_was_made_elsewhere():
    expected = fit(made("nested", 1), epochs=1)[1]
    with tf.device("CPU:3"):
        keras.utils.set_random_seed(1)
        model = apply(nested(), Mesh(data=3), zero=3)
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=0.5), "mse", metrics=["mae"])
    np.testing.assert_allclose(fit(model, epochs=1)[1], expected, atol=1e-5)
    assert {copy.device[-5:] for v in model.variables for copy in v.value.values} == {"CPU:0", "CPU:1", "CPU:2"}
    with pytest.raises(tfgpu.InputError, match="zero=3 shards the parameters along `data`"):
        apply(nested(), Mesh(data=2, pipeline=2), zero=3)
    with pytest.raises(tfgpu.InputError, match="`zero` must be 0, 1, 2 or 3"):
        apply(nested(), Mesh(data=2), zero=4)


@pytest.mark.slow
def test_frozen_layers_and_lora_are_in_pieces_and_learn_what_one_device_learns():
    """As in fine-tuning: a layer whose weights are all frozen has no gradient at all."""

    def learned(replicas):
        keras.utils.set_random_seed(1)
        with tfgpu.strategy("mirrored", devices=replicas).scope():
            frozen, adapted, head = layers.Embedding(11, 8), layers.Dense(16, "relu"), layers.Dense(1)
            tokens = keras.Input((6,))
            model = keras.Model(tokens, head(layers.Flatten()(adapted(frozen(tokens)))))
            frozen.trainable = adapted.trainable = False
            adapted.trainable = True
            adapted.enable_lora(2)
            if replicas > 1:
                model = shard(model, 3)
            model.compile(keras.optimizers.AdamW(0.01), "mse")
        model.fit(WORDS, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model

    one, two = learned(1), learned(2)
    for expected, found in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    sizes = [each["weights"] for each in memory_by_device(two).values()]
    assert max(sizes) < 0.6 * sum(4 * v.size for v in one.get_weights())


@pytest.mark.slow
def test_what_is_exported_is_the_whole_model(tmp_path):
    model = made("nested", 3)
    predicted = fit(model, epochs=1)[1]
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.serve(NUMBERS), predicted, atol=1e-6)
    with pytest.raises(tfgpu.InputError, match="is sharded over replicas and has no graph"):
        made("subclassed", 2).export(tmp_path / "other")


def test_bad_input():
    model = made("nested", 2)
    with pytest.raises(tfgpu.InputError, match="has gradients within its replicas alone"), tf.GradientTape() as tape:
        tape.gradient(tf.reduce_sum(model(NUMBERS)), model.trainable_variables)
    with pytest.raises(tfgpu.InputError, match="`quantize` changes the variables"):
        model.layers[-1].quantize("int8")
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        normed = keras.Sequential([keras.Input((8,)), layers.SpectralNormalization(layers.Dense(3))])
        staged = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(8), layers.Dense(1)])
    with pytest.raises(tfgpu.InputError, match="assigns the kernel in each step"):
        shard(normed, stage=3)
    with pytest.raises(tfgpu.InputError, match="recomputed in blocks|already given to `recompute`"):
        shard(tfgpu.parallel.recompute(staged, "blocks"), stage=3)

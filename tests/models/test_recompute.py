"""A model with recomputation has the same variables, and the same weights after training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import models
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.arange(22) % 3


def build(recompute, replicas=1, policy="float32", **optimizer):
    tfgpu.repair_keras()
    keras.utils.set_random_seed(3)
    devices = [f"CPU:{i}" for i in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope(), tfgpu.precision.use(policy):
        model = models.mlp((6,), 3, widths=(8,), normalization="batch", dropout=0.3, recompute=recompute)
        optimizer = keras.optimizers.Adam(0.01, **optimizer)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(*model, **options):
    built = build(*model, **options)
    before = [v.numpy() for v in built.trainable_variables]
    built.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert all(np.abs(v.numpy() - w).max() > 1e-3 for v, w in zip(built.trainable_variables, before, strict=True))
    return [np.float64(v.numpy()) for v in built.variables]


def same(found):
    return all(np.abs(a - b).max() <= 1e-6 for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_the_same_weights_on_one_device_and_two():
    options = {"gradient_accumulation_steps": 2}
    plain = train(False, **options)
    assert same([plain, train(True, **options)])
    assert same([plain, train(True, 2, **options)])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_same_weights_in_half_precision(replicas):
    assert same([train(recompute, replicas, "mixed_float16") for recompute in (False, True)])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "shape", "options", "blocks"),
    [
        ("mlp", (4, 4, 1), {"widths": (8, 8, 8), "dropout": 0.1}, 3),
        ("cnn", (8, 8, 1), {"filters": (4, 8)}, 2),
        ("resnet", (8, 8, 3), {"depth": 14}, 6),
        ("vit", (8, 8, 3), {"width": 8, "heads": 2, "depth": 2, "dropout": 0.1}, 2),
        ("transformer", (6,), {"width": 8, "heads": 2, "depth": 2, "attention_dropout": 0.1}, 2),
    ],
)
def test_every_builder_has_the_same_variables_in_the_same_order(name, shape, options, blocks):
    found = []
    for recompute in (False, True):
        keras.utils.set_random_seed(1)
        given = {**options, "recompute": recompute}
        model = models.build(name, input_shape=shape, classes=5, options=given)
        found.append(model)
    plain, recomputed = found
    assert sum(isinstance(layer, models.Recompute) for layer in recomputed.layers) == blocks
    for a, b in zip(plain.variables, recomputed.variables, strict=True):
        assert a.name == b.name
        assert np.array_equal(a.numpy(), b.numpy())
    assert tfgpu.precision.advice(plain) == tfgpu.precision.advice(recomputed)


class Running(keras.layers.Layer):
    """A layer that stores a mean and a sum over the whole batch and uses them in its output."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
        self.total = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, aggregation="sum")
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        self.total.assign_add(keras.ops.sum(x, axis=0))
        return (x - self.mean) * self.scale + 0.01 * self.total


@pytest.mark.slow
def test_state_over_all_replicas_within_a_block():
    tfgpu.repair_keras()
    found = []
    for replicas, wrap in ((1, lambda layer: layer), (2, models.Recompute)):
        keras.utils.set_random_seed(3)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        with strategy.scope():
            running = Running(dtype="mixed_bfloat16")
            model = keras.Sequential([keras.Input((6,)), wrap(running), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(np.round(X), Y, batch_size=8, shuffle=False, verbose=0)
        assert np.array_equal(running.total, np.round(X).sum(axis=0))  # whole numbers, which bfloat16 holds
        found.append([v.numpy() for v in model.variables])
    for a, b in zip(*found, strict=True):
        assert np.abs(a - b).max() <= 0.02


@pytest.mark.slow
def test_it_saves_loads_and_exports(tmp_path):
    model = models.transformer((6,), 5, width=8, heads=2, depth=1, dropout=0.2, recompute=True)
    tokens = np.arange(12).reshape(2, 6) % 5
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.get_layer("block1"), models.Recompute)
    assert np.array_equal(model(tokens), loaded(tokens))
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    assert np.allclose(exported.serve(tf.constant(tokens, tf.int32)), model(tokens), atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_resumes_with_or_without_recomputation(tmp_path):
    plain, recomputed = build(False), build(True)
    plain.fit(X, Y, batch_size=8, verbose=0, callbacks=[tfgpu.callbacks.Checkpoint(tmp_path)])
    assert tfgpu.callbacks.Checkpoint(tmp_path).restore(recomputed).epoch == 1
    for a, b in ((plain, recomputed), (plain.optimizer, recomputed.optimizer)):
        assert all(np.array_equal(v.numpy(), w.numpy()) for v, w in zip(a.variables, b.variables, strict=True))


def test_the_layers_within_keep_their_dtype():
    with tfgpu.precision.use("mixed_float16"):
        layer = keras.layers.Dense(3, dtype="float32")
        assert np.array_equal(models.Recompute(layer)(X), layer(X))
        assert models.Recompute(layer)(keras.Input((6,))).dtype == "float32"


def grads_of(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def test_in_a_hand_written_loop():
    found = []
    for wrap in (lambda layer: layer, models.Recompute):
        keras.utils.set_random_seed(0)
        block = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])
        model = keras.Sequential([keras.Input((6,)), wrap(block)])

        @tf.function
        def steps(model, rows):
            total = [tf.zeros_like(v) for v in model.trainable_variables]
            for row in rows:  # autograph makes a loop of it
                total = [a + b for a, b in zip(total, grads_of(model, row[None]), strict=True)]
            return total

        found.append(steps(model, tf.constant(X)))
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert np.any(found[0][0] != 0)


def test_non_boolean_values_are_refused():
    with pytest.raises(InputError, match="`recompute` must be true or false. Received: recompute='yes'"):
        models.resnet((8, 8, 3), 10, depth=8, recompute="yes")
    with pytest.raises(InputError, match="'MobileNetV2' has no blocks to recompute. .* `tfgpu.models.Recompute`"):
        models.build("MobileNetV2", input_shape=(32, 32, 3), classes=2, options={"recompute": True})

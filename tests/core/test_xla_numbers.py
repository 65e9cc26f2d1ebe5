"""XLA's random numbers by TensorFlow's operations: as XLA makes them, and as one device trains with."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core.randomness import rng, row_draws, xla_numbers

SHAPES = [[], [5], [2, 1], [3, 7], [9, 64], [64, 33], [7, 5, 12], [7, 3, 5]]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
FEW = pytest.mark.sample("[]-float32", "[7, 5, 12]-float32", "[9, 64]-bfloat16", "[7, 3, 5]-float16")
SEED = tf.constant([7, 9])
ROUNDING = {"float32": 2e-6, "float64": 1e-14, "float16": 1e-2, "bfloat16": 1e-2}


def by_xla(function):
    return tf.function(function, jit_compile=True, autograph=False)().numpy().astype("float64")


def by_kernels(function, *given):
    return tf.function(function, autograph=False)(*given).numpy().astype("float64")


def ours(shape, dtype):
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    return xla_numbers.uniform(tf.convert_to_tensor(shape, tf.int32), key, counter, dtype)


@FEW
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniform_numbers(shape, dtype):
    given = by_xla(lambda: tf.random.stateless_uniform(shape, SEED, dtype=dtype))
    assert np.array_equal(by_kernels(lambda: ours(shape, dtype)), given)


@FEW
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normal_numbers_of_sizes_known_or_not(shape, dtype):
    given = by_xla(lambda: tf.random.stateless_normal(shape, SEED, dtype=dtype))
    as_tensor = tf.constant(shape, tf.int32)
    static = by_kernels(lambda: xla_numbers.normal(as_tensor, SEED, dtype))
    of_any_size = by_kernels(lambda shape: xla_numbers.normal(shape, SEED, dtype), as_tensor)
    assert np.abs(static - given).max() <= ROUNDING[dtype]
    assert np.array_equal(of_any_size, static)


@pytest.mark.parametrize("limit", [0.1, 0.25, 0.5, 2 / 3, 0.999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype, limit):
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=SEED)
    shape = tf.constant([200, 33])
    found = xla_numbers.is_uniform_at_least(limit, shape, key, counter, dtype)
    assert np.array_equal(found, ours(shape, dtype) >= limit)
    near = ours(shape, dtype).numpy().astype("float64").ravel()[5]  # the limit is one of the numbers
    found = xla_numbers.is_uniform_at_least(near, shape, key, counter, dtype)
    assert np.array_equal(found, ours(shape, dtype) >= tf.constant(near, dtype)) and found.numpy().ravel()[5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncated_numbers(dtype):
    given = by_xla(lambda: tf.random.stateless_truncated_normal([64, 33], SEED, dtype=dtype))
    found = by_kernels(
        lambda: xla_numbers.truncated_normal(ours([64, 33], xla_numbers.computed_dtype(dtype)), dtype),
    )
    assert np.abs(found - given).max() <= ROUNDING[dtype]


@pytest.mark.parametrize("count", [1, 3])
def test_classes(count):
    logits = tf.constant(np.random.default_rng(0).normal(size=(64, 5)), tf.float32)
    given = by_xla(lambda: tf.random.stateless_categorical(logits, count, SEED))
    found = by_kernels(lambda: xla_numbers.categorical(ours([64, count, 5], "float32"), logits))
    assert np.array_equal(found, given)


class Draws(keras.layers.Layer):
    """All that a layer can draw under XLA, by example and once a batch."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if not training:
            return x
        shape = keras.ops.shape(x)
        x = x + 0.1 * keras.random.normal(shape, seed=self.seed) + keras.random.uniform((), seed=self.seed)
        x = x + 0.1 * keras.random.truncated_normal(shape, seed=self.seed)
        x = x + 0.1 * keras.random.normal((x.shape[1],), seed=self.seed)
        classes = keras.random.categorical(x, 2, seed=self.seed)
        places = keras.random.randint((shape[0], 1), 0, 5, seed=self.seed)
        return x + 0.1 * keras.ops.cast(classes[:, :1] + classes[:, 1:] + places, x.dtype)


class Mixup(keras.Model):
    def train_step(self, data):
        x, y = data
        order = keras.random.shuffle(keras.ops.arange(keras.ops.shape(x)[0]), seed=self.seed)
        x, y = (x + tf.gather(x, order)) / 2, (y + tf.gather(y, order)) / 2
        return super().train_step((x, y))


def on_gpus(monkeypatch):
    """From here on, Keras takes the machine for one with a GPU."""
    found = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: found)


def two():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def spread(model, axis):
    return tfgpu.parallel.apply(model, tfgpu.parallel.Mesh(**{axis: 2}, devices=["CPU:0", "CPU:1"]))


def trained(strategy, kind, *, rows=22, axis=None, **compiled):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        given = keras.Input((6,))
        layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)] if kind == "layers" else []
        layers += [keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(4)] if kind == "spread" else []
        found = given
        for layer in [*layers, *([Draws()] if kind == "draws" else []), keras.layers.Dense(1)]:
            found = layer(found)
        model = (Mixup if kind == "mixup" else keras.Model)(given, found)
        model.seed = keras.random.SeedGenerator(5)
    with contextlib.nullcontext() if axis else strategy.scope():
        model = spread(model, axis) if axis else model
        model.compile(keras.optimizers.SGD(0.05), "mse", **compiled)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)  # the last one is uneven
    model.fit(data, epochs=2, verbose=0)
    return model.predict(x, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers", "draws", "mixup"])
def test_several_gpus_draw_by_keras_rule_as_one_that_xla_compiles(kind, monkeypatch):
    tfgpu.repair_keras()
    stock = trained(tf.distribute.get_strategy(), kind, jit_compile=True)
    on_gpus(monkeypatch)  # XLA on one, and not on several
    assert np.abs(trained(two(), kind) - stock).max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers", "draws", "mixup"])
def test_several_compiled_devices_draw_as_one(kind):
    tfgpu.repair_keras()
    stock = trained(tf.distribute.get_strategy(), kind, jit_compile=True)
    assert np.abs(trained(two(), kind, jit_compile=True) - stock).max() < 1e-6
    if kind == "layers":
        assert np.abs(trained(two(), kind, jit_compile=False) - stock).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, "auto"])
@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_a_model_over_several_devices_draws_as_one_that_xla_compiles(axis, jit, monkeypatch):
    tfgpu.repair_keras()
    stock = trained(tf.distribute.get_strategy(), "spread", jit_compile=True)
    on_gpus(monkeypatch)
    found = trained(tf.distribute.get_strategy(), "spread", axis=axis, jit_compile=jit)
    assert np.abs(found - stock).max() < 1e-6


def test_a_model_that_runs_eagerly_has_the_kernels_numbers(monkeypatch):
    tfgpu.repair_keras()
    on_gpus(monkeypatch)
    with two().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        assert row_draws.are_as_xla(model)
        model.compile("sgd", "mse", run_eagerly=True)
        assert not row_draws.are_as_xla(model)


def test_the_order_of_a_shuffle_is_keras_own_whatever_the_default_dtype(monkeypatch):
    tfgpu.repair_keras()
    monkeypatch.setattr(keras.config, "floatx", lambda: "float64")
    assert np.array_equal(rng._order(tf.constant(40), 3), keras.random.shuffle(tf.range(40), seed=3))

"""The concatenated draws of the replicas equal one device's, bit for bit."""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import repairs
from tfgpu.core import batch_rows, step_context

FLOATS = ("float32", "float16", "bfloat16", "float64")
# Rows of each replica: even, uneven, replicas without rows, one replica with all.
SPLITS = ((4, 4), (3, 2), (1, 0), (2, 2, 1), (4, 4, 4, 3), (2, 1, 1, 1), (3, 3, 1, 0), (1, 1, 0, 0), (0, 5))


@pytest.fixture(scope="module", autouse=True)
def installed():
    repairs.repair_keras()


@functools.cache
def mirrored(replicas):
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def spread(draw, values, split, *, run_eagerly=False, jit=False, static=False):
    """Runs `draw(rows of values)` on each replica and joins what comes back."""
    strategy = mirrored(len(split))
    ends = np.cumsum((0, *split))
    parts = [tf.constant(values[a:b]) for a, b in itertools.pairwise(ends)]
    given = strategy.experimental_distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])

    def step(x):
        if not static and not run_eagerly:
            x = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, *x.shape[1:]])
        facts = batch_rows.begin_step(tf.shape(x)[0], jit=jit)
        with step_context.scope(step=facts), step_context.xla_scope(facts):
            return draw(x)

    def run(x):
        return strategy.run(step, args=(x,))

    out = (run if run_eagerly else tf.function(run))(given)
    return np.concatenate([o.numpy() for o in strategy.experimental_local_results(out)])


def alone(draw, values, *, jit=False):
    return tf.function(draw, jit_compile=jit)(tf.constant(values)).numpy()


def same(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def rows(count, *rest):
    size = count * int(np.prod(rest, dtype=int))
    return np.linspace(0.5, 2, size, dtype="float32").reshape(count, *rest)


def shape_of(x, *rest):
    return (tf.shape(x)[0], *rest)


def wide(x, dtype):
    """Keras takes the parameters of a bfloat16 draw in float32."""
    return tf.cast(x, "float32" if dtype == "bfloat16" else dtype)


DRAWS = {
    "uniform": lambda x, d: keras.random.uniform(shape_of(x, 5), -1, 3, dtype=d, seed=3),
    "uniform aligned": lambda x, d: keras.random.uniform(shape_of(x, 2, 4), dtype=d, seed=3),
    "uniform of one number": lambda x, d: keras.random.uniform(shape_of(x), dtype=d, seed=3),
    "normal": lambda x, d: keras.random.normal(shape_of(x, 3), 1.0, 0.5, dtype=d, seed=4),
    "truncated_normal": lambda x, d: keras.random.truncated_normal(shape_of(x, 3), 1.0, 2.0, dtype=d, seed=5),
    "dropout": lambda x, d: keras.random.dropout(tf.cast(x, d), 0.4, seed=6),
    "dropout with a noise shape": lambda x, d: keras.random.dropout(tf.cast(x, d), 0.4, noise_shape=(None, 1), seed=6),
    "gamma": lambda x, d: keras.random.gamma(shape_of(x, 3), 1.5, dtype=d, seed=7),
    "gamma by row": lambda x, d: keras.random.gamma(shape_of(x, 3), wide(x, d), dtype=d, seed=7),
    "beta": lambda x, d: keras.random.beta(shape_of(x), 0.5, 2.0, dtype=d, seed=8),
    "beta by row": lambda x, d: keras.random.beta(shape_of(x, 3), wide(x[:, :1], d), 2.0, dtype=d, seed=8),
    "binomial": lambda x, d: keras.random.binomial(shape_of(x, 3), 10.0 * x, 0.3, dtype=d, seed=9),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", DRAWS)
def test_each_distribution_equals_one_device(name, dtype):
    split = (2, 1, 3, 0)
    same(
        spread(lambda x: DRAWS[name](x, dtype), rows(6, 3), split),
        alone(lambda x: DRAWS[name](x, dtype), rows(6, 3)),
    )


@pytest.mark.parametrize("dtype", ("int32", "int64", "uint8"))
def test_randint_equals_one_device(dtype):
    def draw(x):
        return keras.random.randint(shape_of(x, 3), 2, 200, dtype=dtype, seed=1)

    same(spread(draw, rows(6, 3), (3, 0, 2, 1)), alone(draw, rows(6, 3)))


@pytest.mark.parametrize("dtype", ("int32", "int64"))
def test_categorical_equals_one_device(dtype):
    def draw(x):
        return keras.random.categorical(x, 5, dtype=dtype, seed=1)

    same(spread(draw, rows(7, 3), (3, 0, 2, 2)), alone(draw, rows(7, 3)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ("normal", "dropout"))
def test_each_split_equals_one_device(name, split):
    values = rows(sum(split), 3)
    same(
        spread(lambda x: DRAWS[name](x, "float32"), values, split),
        alone(lambda x: DRAWS[name](x, "float32"), values),
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", ({"run_eagerly": True}, {"static": True}))
@pytest.mark.parametrize("name", ("uniform", "normal", "dropout", "gamma by row", "beta"))
def test_known_batch_sizes_equal_one_device(name, mode):
    values = rows(8, 3)
    expected = alone(lambda x: DRAWS[name](x, "float32"), values)
    same(spread(lambda x: DRAWS[name](x, "float32"), values, (2, 2, 2, 2), **mode), expected)


COMPILED = {
    "uniform": lambda x, d, g: keras.random.uniform(shape_of(x, 5), -1, 1, dtype=d, seed=g),
    "normal": lambda x, d, g: keras.random.normal(shape_of(x, 5), dtype=d, seed=g),
    "truncated_normal": lambda x, d, g: keras.random.truncated_normal(shape_of(x, 5), dtype=d, seed=g),
    "dropout": lambda x, d, g: keras.random.dropout(tf.cast(x, d), 0.5, seed=g),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", COMPILED)
def test_xla_draws_what_one_device_with_xla_draws(name, dtype):
    def draw(generator):
        return lambda x: COMPILED[name](x, dtype, generator)

    reference = keras.random.SeedGenerator(5)
    with mirrored(3).scope():
        generator = keras.random.SeedGenerator(5)
    got = spread(draw(generator), rows(6, 3), (2, 1, 3), jit=True)
    expected = alone(draw(reference), rows(6, 3), jit=True)
    if name in ("normal", "truncated_normal"):  # XLA's inverse error function rounds by a number's place in a vector
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.astype("float32"), expected.astype("float32"), rtol=1e-6)
    else:
        same(got, expected)


def test_a_generator_with_state_advances_once_per_step():
    with mirrored(2).scope():
        inside = keras.random.SeedGenerator(5)
    reference = keras.random.SeedGenerator(5)

    def draw(generator):
        return lambda x: tf.concat([keras.random.uniform(shape_of(x, 3), seed=generator) for _ in range(3)], 1)

    same(spread(draw(inside), rows(5, 3), (3, 2)), alone(draw(reference), rows(5, 3)))
    assert [c.numpy().tolist() for c in inside.state.value.values] == [[5, 3], [5, 3]]


def test_a_generator_made_outside_the_scope_advances_once_per_step():
    outside, reference = keras.random.SeedGenerator(5), keras.random.SeedGenerator(5)

    def draw(generator):
        return lambda x: keras.random.uniform(shape_of(x, 3), seed=generator)

    same(spread(draw(outside), rows(5, 3), (2, 2, 1)), alone(draw(reference), rows(5, 3)))
    assert outside.state.numpy().tolist() == [5, 1]


@pytest.mark.parametrize("made_before", (False, True))
def test_draws_without_a_seed_follow_set_random_seed(made_before):
    def draw(x):
        return tf.concat([keras.random.normal(shape_of(x, 3)) for _ in range(2)], 1)

    results = []
    for run in (lambda: alone(draw, rows(5, 3)), lambda: spread(draw, rows(5, 3), (3, 1, 1))):
        keras.utils.set_random_seed(11)
        if made_before:
            keras.random.normal(())
        results.append(np.concatenate([run(), [keras.random.normal((6,)).numpy()] * 5], 1))
    same(results[1], results[0])


def test_draws_that_are_not_by_example_are_the_same_on_all_replicas():
    def draw(x):
        shared = [keras.random.normal(shape, seed=2) for shape in ((), (1, 3), (6, 3))]
        return tf.stack([shared[0], shared[1][0, 0], shared[2][5, 2]])[None] + tf.zeros_like(x)

    same(spread(draw, rows(6, 3), (3, 2, 1)), alone(draw, rows(6, 3)))


@pytest.mark.parametrize("static", (False, True))
def test_rows_flattened_batch_first_are_by_example(static):
    noise, reference = (keras.layers.GaussianNoise(1.0, seed=3) for _ in range(2))

    def draw(layer):
        def flattened(x):
            flat = tf.reshape(x, [tf.shape(x)[0] * 3, 2])
            return tf.reshape(keras.random.dropout(flat, 0.5, seed=1) + layer(flat, training=True), tf.shape(x))

        return flattened

    same(spread(draw(noise), rows(8, 3, 2), (4, 4), static=static), alone(draw(reference), rows(8, 3, 2)))


def test_a_batch_size_known_beside_an_unknown_length_is_by_example():
    def draw(x):
        x = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[x.shape[0], None])
        facts = batch_rows.begin_step(tf.shape(x)[0]) if step_context.rows() is not None else None
        with step_context.scope(step=facts) if facts else contextlib.nullcontext():
            return keras.random.dropout(x, 0.5, seed=1) + keras.random.uniform(keras.ops.shape(x), seed=1)

    same(spread(draw, rows(8, 3), (4, 4), static=True), alone(draw, rows(8, 3)))


def test_shuffle_moves_rows_between_replicas():
    def draw(x):
        return keras.random.shuffle(x, seed=5)

    same(spread(draw, rows(7, 3), (3, 3, 1)), alone(draw, rows(7, 3)))


def test_initial_values_are_the_same_on_all_replicas():
    class Lazy(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(3, 3), initializer=keras.initializers.RandomNormal(seed=1))

        def call(self, x):
            return tf.matmul(x, self.w)

    expected = alone(Lazy(), rows(6, 3))
    strategy = mirrored(2)
    with strategy.scope():
        layer = Lazy()
        layer.build((None, 3))
    got = spread(layer, rows(6, 3), (3, 3), run_eagerly=True)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_outside_a_step_keras_is_unchanged():
    strategy = mirrored(2)
    masks = strategy.run(lambda: keras.random.dropout(tf.ones([4, 8]), 0.5, seed=1))
    first, second = strategy.experimental_local_results(masks)
    assert (first.numpy() == second.numpy()).all()
    assert (first.numpy() == keras.random.dropout(tf.ones([4, 8]), 0.5, seed=1).numpy()).all()


LAYERS = {
    "Dropout": lambda: keras.layers.Dropout(0.5, seed=1),
    "Dropout by channel": lambda: keras.layers.Dropout(0.5, noise_shape=(None, 1, 1, None), seed=1),
    "SpatialDropout2D": lambda: keras.layers.SpatialDropout2D(0.5, seed=1),
    "GaussianNoise": lambda: keras.layers.GaussianNoise(0.5, seed=1),
    "GaussianDropout": lambda: keras.layers.GaussianDropout(0.5, seed=1),
    "AlphaDropout": lambda: keras.layers.AlphaDropout(0.5, seed=1),
    "RandomFlip": lambda: keras.layers.RandomFlip(seed=1),
    "RandomRotation": lambda: keras.layers.RandomRotation(0.3, seed=1),
    "RandomZoom": lambda: keras.layers.RandomZoom(0.3, seed=1),
    "RandomTranslation": lambda: keras.layers.RandomTranslation(0.3, 0.3, seed=1),
    "RandomShear": lambda: keras.layers.RandomShear(0.3, 0.3, seed=1),
    "RandomBrightness": lambda: keras.layers.RandomBrightness(0.3, value_range=(0, 2), seed=1),
    "RandomContrast": lambda: keras.layers.RandomContrast(0.3, value_range=(0, 2), seed=1),
    "RandomHue": lambda: keras.layers.RandomHue(0.3, value_range=(0, 2), seed=1),
    "RandomSaturation": lambda: keras.layers.RandomSaturation(0.3, value_range=(0, 2), seed=1),
    "RandomSharpness": lambda: keras.layers.RandomSharpness(0.3, value_range=(0, 2), seed=1),
    "RandomGrayscale": lambda: keras.layers.RandomGrayscale(0.5, seed=1),
    "RandomInvert": lambda: keras.layers.RandomInvert(0.5, value_range=(0, 2), seed=1),
    "RandomPosterization": lambda: keras.layers.RandomPosterization(3, value_range=(0, 2), seed=1),
    "RandomErasing": lambda: keras.layers.RandomErasing(0.9, value_range=(0, 2), seed=1),
    "RandomGaussianBlur": lambda: keras.layers.RandomGaussianBlur(0.9, value_range=(0, 2), seed=1),
    "RandomPerspective": lambda: keras.layers.RandomPerspective(0.9, seed=1),
    "RandomCrop": lambda: keras.layers.RandomCrop(3, 4, seed=1),
    "Solarization": lambda: keras.layers.Solarization(0.3, 0.3, value_range=(0, 2), seed=1),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_equals_one_device(name):
    values = rows(7, 6, 5, 3)
    reference = LAYERS[name]()
    expected = alone(lambda x: reference(x, training=True), values)
    with mirrored(4).scope():
        layer = LAYERS[name]()
    got = spread(lambda x: layer(x, training=True), values, (3, 3, 1, 0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_a_blur_draws_its_strength_once_where_replicas_have_two_rows(eagerly):
    values, reference = rows(8, 6, 5, 3), LAYERS["RandomGaussianBlur"]()
    expected = reference(values, training=True)
    strategy = mirrored(4)
    with strategy.scope():
        layer = LAYERS["RandomGaussianBlur"]()

    def run(x):
        return strategy.run(lambda part: layer(part, training=True), args=(x,))

    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[2 * context.replica_id_in_sync_group :][:2])
    )
    got = (run if eagerly else tf.function(run))(parts)
    np.testing.assert_allclose(np.concatenate([part.numpy() for part in got.values]), expected, atol=1e-5)


@pytest.mark.slow
def test_rnn_dropout_equals_one_device():
    def make():
        keras.utils.set_random_seed(1)
        layer = keras.layers.LSTM(4, dropout=0.3, recurrent_dropout=0.4, seed=1)
        layer.build((None, 5, 3))
        return layer

    values, layer = rows(6, 5, 3), make()
    expected = alone(lambda x: layer(x, training=True), values)
    with mirrored(4).scope():
        spread_layer = make()
    got = spread(lambda x: spread_layer(x, training=True), values, (2, 2, 2, 0))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_attention_dropout_equals_one_device():
    def make():
        keras.utils.set_random_seed(1)
        layer = keras.layers.MultiHeadAttention(2, 4, dropout=0.4, seed=1)
        layer.build((None, 5, 4), (None, 5, 4))
        return layer

    values, layer = rows(6, 5, 4), make()
    expected = alone(lambda x: layer(x, x, training=True), values)
    with mirrored(4).scope():
        spread_layer = make()
    got = spread(lambda x: spread_layer(x, x, training=True), values, (2, 2, 1, 1))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [
        lambda: [keras.layers.Dropout(0.5, seed=1)],
        lambda: [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)],
        lambda: [keras.layers.GaussianNoise(0.5, seed=1), keras.layers.GaussianDropout(0.2, seed=2)],
        lambda: [keras.layers.AlphaDropout(0.3, seed=1)],
    ],
    ids=["dropout", "after BatchNormalization", "normal", "alpha"],
)
def test_a_compiled_step_with_an_uneven_batch_draws_what_one_device_draws(noise):
    """XLA's clusters leave out draws whose size is known only at run time; TensorFlow's kernels draw other numbers."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(37, 6)).astype("float32"), rng.normal(size=(37, 1)).astype("float32")

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), *noise(), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=True)
        losses = model.fit(x, y, 16, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [*model.get_weights(), np.asarray(losses)]

    one = trained(tfgpu.strategy("one_device", devices="CPU:0"))
    for devices in (2, 3):
        for a, b in zip(trained(tfgpu.strategy("mirrored", devices=devices)), one, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

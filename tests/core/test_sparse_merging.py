"""Tables that one device looks up once, and replicas each for their rows: Adam squares what one device squares."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu

LENGTH, WIDTH = 5, 4


class Tables(layers.Layer):
    """Tables, each looked up in a way of its own; of all but `rows` and `repeated` replicas hold slices apart."""

    def build(self, shape):
        size = {"shape": (LENGTH, WIDTH), "initializer": "uniform"}
        names = ("position", "first", "stored", "measured", "both", "unique", "repeated", "rows")
        self.tables = {name: self.add_weight(name=name, **size) for name in names}
        self.places = self.add_weight(shape=(LENGTH,), dtype="int32", initializer="zeros", trainable=False)
        self.places.assign([4, 2, 2, 0, 1])

    def call(self, x):
        def take(name, indices):
            return ops.take(self.tables[name], indices, axis=0)

        rows, length = ops.shape(x)[0], ops.shape(x)[1]
        ids = ops.cast(ops.abs(x[:, :, 0]) * 3, "int32") % LENGTH
        numbers, at = tf.unique(ops.reshape(ids, (-1,)))
        return (
            x
            + take("position", ops.arange(LENGTH))
            + take("first", ops.zeros((1, 1), "int32"))
            + tf.gather(self.tables["stored"].value, self.places.value)
            + tf.nn.embedding_lookup(self.tables["measured"].value, tf.range(length))
            + take("both", ops.arange(LENGTH)[None])
            + take("both", ids) * take("both", ops.zeros((rows, 1), "int32"))
            + ops.reshape(tf.gather(take("unique", numbers), at), (-1, LENGTH, WIDTH))
            + take("repeated", ops.broadcast_to(ops.arange(LENGTH)[None], (rows, LENGTH)))
            + take("rows", ids)
        )


def numbers(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, LENGTH, WIDTH)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def trained(strategy, *, rows=8, batch=4, make=Tables, length=LENGTH, wrap=lambda model: model, **options):
    """The weights, in the model's order, after two epochs of Adam."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        stack = [keras.Input((length, WIDTH)), make(), layers.GlobalAveragePooling1D(), layers.Dense(2)]
        model = wrap(keras.Sequential(stack))
        model.compile(keras.optimizers.Adam(0.05), "mse", **options)
    model.fit(*numbers(rows), batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return dict(enumerate(model.get_weights()))


def differing(found, expected):
    return {
        name: float(np.abs(found[name] - value).max())
        for name, value in expected.items()
        if not np.allclose(found[name], value, rtol=0, atol=2e-6)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "length"), [(rows, length) for rows in (8, 9, 5) for length in (None, LENGTH)], ids=lambda v: str(v)
)
def test_each_table_is_one_devices(rows, length, caplog):
    """8 rows in batches of a static size, 9 and 5 with a last batch of one row: one replica has none."""
    alone = trained(tfgpu.strategy("one_device", "CPU:0"), rows=rows, length=length)
    found = trained(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), rows=rows, length=length)
    assert not differing(found, alone)
    assert "looked up" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tables_in_shards(stage):
    alone = trained(tfgpu.strategy("one_device", "CPU:0"), rows=9)
    strategy = tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"])
    assert not differing(trained(strategy, rows=9, wrap=lambda m: tfgpu.parallel.shard(m, stage=stage)), alone)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "replicas"), [(8, 1), (9, 2)])
def test_tables_in_a_pipeline(rows, replicas):
    """Its micro-batches hold slices apart, too."""
    alone = trained(tfgpu.strategy("one_device", "CPU:0"), rows=rows)
    keras.utils.set_random_seed(1)
    stack = [keras.Input((LENGTH, WIDTH)), Tables(), layers.GlobalAveragePooling1D(name="cut"), layers.Dense(2)]
    mesh = tfgpu.parallel.Mesh(replicas, 2, devices=[f"CPU:{at}" for at in range(2 * replicas)])
    model = tfgpu.parallel.pipeline(keras.Sequential(stack), 2, 2, mesh=mesh, cuts=["cut"])
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(*numbers(rows), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert not differing(dict(enumerate(model.get_weights())), alone)


class Mixing(layers.Layer):
    """Compares the rows of a batch, so every replica computes it on all rows, and looks a table up by each."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH, WIDTH), initializer="uniform", name="table")

    def call(self, x):
        ids = ops.cast(ops.abs(x[:, :, 0]) * 3, "int32") % LENGTH
        mixed = x - ops.mean(x, axis=0, keepdims=True)
        return mixed + ops.take(self.table, ids, axis=0) * ops.max(x, axis=0, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 9])
def test_a_layer_that_is_computed_on_all_rows(rows):
    alone = trained(tfgpu.strategy("one_device", "CPU:0"), rows=rows, make=Mixing)
    found = trained(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), rows=rows, make=Mixing)
    assert not differing(found, alone)


class Steps(keras.Sequential):
    """Clips by hand and looks a table up in the step, so the step sees the whole batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            ids = tf.cast(tf.abs(x[:, 0, 0]) * 3, "int32") % LENGTH
            bias = tf.gather(self.layers[0].tables["rows"].value, ids)[:, :2]
            error = tf.square(self(x, training=True) + bias - y)
            loss = tf.reduce_sum(error) / tf.reduce_sum(tf.abs(y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(tf.clip_by_global_norm(gradients, 0.1)[0], self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 9])
def test_a_step_that_sees_the_whole_batch(rows):
    def wrap(model):
        return Steps([keras.Input((LENGTH, WIDTH)), *model.layers])

    alone = trained(tfgpu.strategy("one_device", "CPU:0"), rows=rows, wrap=wrap)
    assert not differing(trained(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), rows=rows, wrap=wrap), alone)


class OneAxis(layers.Layer):
    """Looks a table up by as many equal indices as a replica has rows of a batch of 4: they may be one for each."""

    def build(self, shape):
        self.table = self.add_weight(shape=(LENGTH, WIDTH), initializer="uniform", name="table")

    def call(self, x):
        return x + ops.mean(ops.take(self.table, tf.constant([1, 1]), axis=0), axis=0)


@pytest.mark.sample("one-row")
@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (OneAxis, 4, "as many equal indices"),
        (lambda: Positions((1, LENGTH)), 2, "one row per replica"),
    ],
    ids=["equal", "one-row"],
)
def test_what_a_static_batch_does_not_tell_is_named_once(make, batch, words, caplog):
    trained(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), make=make, batch=batch)
    assert caplog.text.count("is looked up by") == 1
    assert words in caplog.text


class Positions(OneAxis):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def call(self, x):
        return x + ops.take(self.table, ops.reshape(ops.arange(LENGTH), self.shape), axis=0)


def test_an_eager_step_names_the_table(caplog):
    trained(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]), make=lambda: Positions((LENGTH,)), run_eagerly=True, rows=4)
    assert caplog.text.count("A table with rows of 4 is looked up by indices that may depend") == 1


@pytest.mark.slow
def test_a_hand_written_loop():
    def run(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((LENGTH, WIDTH)), Tables(), layers.Flatten(), layers.Dense(2)])
            optimizer = keras.optimizers.Adam(0.05)
        data = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(numbers(8)).batch(4, drop_remainder=True)
        )

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(tf.reduce_mean(tf.square(model(x) - y), -1), global_batch_size=4)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )

        @tf.function
        def train(batch):
            strategy.run(step, args=batch)

        for batch in data:
            train(batch)
        return dict(enumerate(model.get_weights()))

    alone = run(tfgpu.strategy("one_device", "CPU:0"))
    assert not differing(run(tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"])), alone)


def test_adam_squares_each_slice_before_it_adds_those_of_a_row():
    # Keras on JAX squares their sum: `python -m benchmarks.beside_jax`.
    table, optimizer = keras.Variable(np.zeros((2, 2))), keras.optimizers.Adam(beta_2=0.0)
    optimizer.build([table])
    optimizer.apply([tf.IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [1, 1], [2, 2])], [table])
    found = next(each for each in optimizer.variables if "velocity" in each.path)
    np.testing.assert_allclose(found, [[0, 0], [1 + 9, 4 + 16]])

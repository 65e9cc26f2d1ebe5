"""What a layer assigns from variables that differ between replicas: the replicas still agree on it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

X = np.array([[0.1], [0.3], [0.6], [0.4]], "float32")


@tfgpu.by_rows
class FromOnRead(keras.layers.Layer):
    """Copies a variable of which each replica has its own part."""

    def build(self, shape):
        self.part = keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")
        self.copy = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.part.assign_add(keras.ops.sum(x))
        self.copy.assign(0.5 * self.part)
        return x


@tfgpu.by_rows
class FromStates(keras.layers.Layer):
    """Keeps the mean of a stateful layer's states, which belong to single rows."""

    def build(self, shape):
        self.rnn = keras.layers.SimpleRNN(1, stateful=True, kernel_initializer="ones", use_bias=False)
        self.rnn.build((2, 1, 1))
        self.copy = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.rnn(x[:, None])
        self.copy.assign(keras.ops.mean(keras.ops.convert_to_tensor(self.rnn.states[0])))
        return x


@pytest.mark.sample("part-1", "states-2")
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize(
    ("kind", "expected"), [(FromOnRead, 0.5 * (0.4 + 1.0) / 2), (FromStates, np.tanh(X).mean())], ids=["part", "states"]
)
def test_replicas_agree_on_what_is_made_of_variables_that_differ(kind, expected, steps_per_execution):
    strategy = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = kind()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    model.fit(X, X, batch_size=4, shuffle=False, verbose=0)
    copies = [float(copy) for copy in strategy.experimental_local_results(layer.copy.value)]
    assert copies == pytest.approx([expected] * 2, abs=1e-6)


def _cond(when, then):
    tf.cond(when, then, lambda: tf.constant(0.0))


def _keras_cond(when, then):
    keras.ops.cond(when, then, lambda: tf.constant(0.0))


def _switch(when, then):
    keras.ops.switch(tf.cast(when, tf.int32), [lambda: tf.constant(0.0), then])


def _while(when, then):
    tf.while_loop(lambda i: i < tf.cast(when, tf.int32), lambda i: (then(), i + 1)[1:], (tf.constant(0),))


INSIDE = [_keras_cond, _cond, _switch, _while]


class Table(keras.layers.Layer):
    """Keeps the mean of each class's rows in a plain variable, and takes it from them."""

    def build(self, shape):
        self.table = tf.Variable(tf.ones((3, 1)), trainable=False)
        self.grid = tf.Variable(tf.ones((2, 3)), trainable=False)

    def call(self, x, training=False):
        places = tf.constant([[0], [2]])
        if training:
            self.table.scatter_nd_update(places, tf.stack([tf.reduce_mean(x, 0), tf.reduce_max(x, 0)]))
            self.table.scatter_nd_add(places[:1], [[1.0]])
            self.table.scatter_nd_sub(places[1:], [[0.5]])
            self.table.batch_scatter_update(tf.IndexedSlices([[0.1 * tf.reduce_sum(x)]], [1]))
            self.grid.batch_scatter_update(tf.IndexedSlices([[tf.reduce_min(x), 2.0], [3.0, 4.0]], [[2, 0], [1, 2]]))
        return x - self.table.gather_nd([[0]]) - self.table.sparse_read([2])


def test_rows_of_a_variable_of_tensorflow():
    def kept(strategy):
        with strategy.scope():
            table = Table()
            model = keras.Sequential([keras.Input((1,)), table, keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile("sgd", "mse")
        model.fit(X, X, batch_size=4, shuffle=False, verbose=0)
        return [*np.ravel(table.table), *np.ravel(table.grid), *np.ravel(model.layers[-1].kernel)]

    one = kept(tf.distribute.get_strategy())
    assert kept(tfgpu.strategy(devices=["CPU:0", "CPU:1"])) == pytest.approx(one, abs=1e-6)


class FromInside(keras.layers.Layer):
    """Assigns a mean of its rows within a graph in which replicas cannot meet, and reads it after."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def build(self, shape):
        self.mean, self.copy, self.on = (
            self.add_weight(shape=(), initializer=value, trainable=False) for value in ("zeros", "zeros", "ones")
        )

    def call(self, x, training=False):
        if training:
            self.note(x)
        return x

    def note(self, x):
        self.inside(self.on > 0.5, lambda: self.mean.assign(keras.ops.mean(x)))
        self.copy.assign(0.5 * self.copy + self.mean)


class StepFromInside(keras.Model):
    def train_step(self, data):
        self.kept.note(data[0])
        return super().train_step(data)


def kept_by_two_steps(strategy, inside, *, is_layer):
    with strategy.scope():
        given, layer = keras.Input((1,)), FromInside(inside)
        layer.build((1,))
        outputs = keras.layers.Dense(1)(layer(given) if is_layer else given)
        model = (keras.Model if is_layer else StepFromInside)(given, outputs)
        model.kept = layer
        model.compile("sgd", "mse")
    model.fit(X, X, batch_size=4, epochs=2, shuffle=False, verbose=0)
    results = strategy.experimental_local_results
    return [float(copy) for each in (layer.mean, layer.copy) for copy in results(each.value)]


@pytest.mark.sample("_keras_cond-True")
@pytest.mark.parametrize("is_layer", [True, False])
@pytest.mark.parametrize("inside", INSIDE, ids=lambda inside: inside.__name__)
def test_what_is_assigned_within_a_graph_in_a_step_is_of_all_rows(inside, is_layer):
    one = kept_by_two_steps(tf.distribute.get_strategy(), inside, is_layer=is_layer)
    two = kept_by_two_steps(tfgpu.strategy(devices=["CPU:0", "CPU:1"]), inside, is_layer=is_layer)
    assert two == pytest.approx(np.repeat(one, 2).tolist(), abs=1e-6)

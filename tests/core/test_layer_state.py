"""What a layer assigns from variables that differ between replicas: the replicas still agree on it."""

import keras
import numpy as np
import pytest

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

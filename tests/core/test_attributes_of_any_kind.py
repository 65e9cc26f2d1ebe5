"""What a model, or a loop's closure, may hold besides layers: training is tried and runs as on one device."""

import collections
import dataclasses
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

X = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
Two = collections.namedtuple("Two", "first second")


class Settings:
    """Names that it does not have are keys that it lacks, also for `hasattr`."""

    def __init__(self):
        self.__dict__["values"] = {"size": 3}

    def __getattr__(self, name):
        return self.__dict__["values"][name]


class Unequal:
    """Cannot be compared, counted or taken as true."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise ValueError("not comparable")

    def __bool__(self):
        raise ValueError("neither true nor false")

    def __len__(self):
        raise ValueError("not countable")


@dataclasses.dataclass
class Part:
    layer: keras.layers.Layer
    size: int = 3


KINDS = {
    "tuple": lambda: (keras.layers.Dense(2), [keras.layers.Dense(2)]),
    "namedtuple": lambda: Two(keras.layers.Dense(2), 1),
    "dataclass": lambda: Part(keras.layers.Dense(2)),
    "deque": lambda: collections.deque([keras.layers.Dense(2)], maxlen=2),
    "settings": Settings,
    "unequal": Unequal,
    "lock": threading.Lock,
    "generator": lambda: (each for each in [1, 2]),
    "array of objects": lambda: np.array([keras.layers.Dense(2), None], dtype=object),
    "metrics": lambda: (keras.metrics.Mean(), {"other": keras.metrics.Mean()}),
    "optimizers": lambda: (keras.optimizers.SGD(0.1),),
}


class Holds(keras.Model):
    def __init__(self, thing):
        super().__init__()
        self.dense, self.thing = keras.layers.Dense(1), thing

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        held = self.thing  # noqa: F841
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def by_fit(strategy, kind):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Holds(KINDS[kind]())
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, X[:, :1], batch_size=4, shuffle=False, verbose=0)
    return model.dense.get_weights()


def by_hand(strategy, kind):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        dense, optimizer, thing = keras.layers.Dense(1), keras.optimizers.SGD(0.1), KINDS[kind]()
        dense.build((None, 4))
        optimizer.build(dense.trainable_variables)

    def step(x):
        held = thing  # noqa: F841
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((dense(x) - x[:, :1]) ** 2) / 4
        weights = dense.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    @tf.function
    def run(x):
        strategy.run(step, args=(x,))

    for x in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(4)):
        run(x)
    return dense.get_weights()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trains", [by_fit, by_hand])
def test_what_is_held_does_not_matter(kind, trains):
    one = tfgpu.strategy("one_device", devices=["CPU:0"])
    two = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    for expected, found in zip(trains(one, kind), trains(two, kind), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)

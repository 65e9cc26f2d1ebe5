"""`optimizer.apply` in `tf.cond` on replicas: one device's result, or an error."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.errors import InputError

DATA = np.random.default_rng(0)
X, Y = DATA.random((14, 3), "float32"), DATA.random((14, 1), "float32")


class Accumulating(keras.Model):
    """Sums gradients in variables of TensorFlow's own, and applies them after each second batch."""

    def compile(self, **how):
        super().compile(**how)
        self.count = keras.Variable(0, trainable=False, dtype="int32")
        self.sums = [self.make(tf.zeros(variable.shape)) for variable in self.trainable_variables]

    def make(self, value):
        return tf.Variable(value, trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1)
        tf.cond(self.count % 2 == 0, self.update, lambda: None)
        return {"loss": loss}

    def update(self):
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
        for total in self.sums:
            total.assign(tf.zeros(total.shape))


class InKerasVariables(Accumulating):
    """Replicas agree on what is assigned to these, so that the step can see a replica's rows."""

    def make(self, value):
        return keras.Variable(value, trainable=False)


class Summing(Accumulating):
    """Replicas would sum what is added to these, which are sums of means."""

    def make(self, value):
        return keras.Variable(value, trainable=False, aggregation="sum")


class Clipping(InKerasVariables):
    """Mixes rows, but in the branch alone that the first batch does not take."""

    def train_step(self, data):
        def update():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(*data, self(data[0], training=True))
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
            self.optimizer.apply(gradients, self.trainable_variables)

        self.count.assign_add(1)
        tf.cond(self.count % 2 == 0, update, lambda: None)
        return {}


class ClippingAlone(InKerasVariables):
    """Mixes rows where one of two conditions alone takes the branch that the first batch does not take."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*data, self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.count.assign_add(1)
        gradients = tf.cond(self.count % 4 == 3, lambda: tf.clip_by_global_norm(gradients, 0.1)[0], lambda: gradients)
        gradients = tf.cond(self.count < 999, lambda: gradients, lambda: [each * 0.0 for each in gradients])
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class Autograph(InKerasVariables):
    """No trial can see the branch that the first batch does not take."""

    def step(self, data):
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*data, self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.count % 2 == 0:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {}

    @tf.function
    def train_step(self, data):
        return self.step(data)


class OfData(InKerasVariables):
    """Replicas may disagree on the condition."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*data, self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)

        def update():
            self.optimizer.apply(gradients, self.trainable_variables)

        tf.cond(loss > 0.01, update, lambda: None)
        return {}


class Normalized(InKerasVariables):
    """A gradient is taken of a condition in which replicas communicate."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            x = tf.cond(self.count == 0, lambda: self.layers[-1](self(x), training=True), lambda: self(x))
            loss = self.compute_loss(x, y, x)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {}


def trained(kind, replicas: int, **how) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with tfgpu.strategy(devices=[f"CPU:{number}" for number in range(replicas)]).scope():
        inputs = keras.Input((3,))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(2, "tanh")(inputs))
        if kind is Normalized:
            outputs = keras.layers.BatchNormalization()(outputs)
        model = kind(inputs, outputs)
        model.compile(optimizer=keras.optimizers.SGD(0.3, momentum=0.9), loss="mse", **how)
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.parametrize(
    "kind",
    [
        Accumulating,
        pytest.param(InKerasVariables, marks=pytest.mark.slow),
        pytest.param(Summing, marks=pytest.mark.slow),
        pytest.param(Clipping, marks=pytest.mark.slow),
        pytest.param(ClippingAlone, marks=pytest.mark.slow),
    ],
)
def test_replicas_update_in_a_condition_as_one_device(kind):
    for found, expected in zip(trained(kind, 3), trained(kind, 1), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_an_if_on_a_tensor_is_refused_or_sees_the_whole_batch():
    with pytest.raises(Exception, match="mark the step with `@tfgpu.on_all_rows`"):
        trained(Autograph, 2)

    class Marked(Autograph):
        @tfgpu.on_all_rows
        @tf.function
        def train_step(self, data):
            return self.step(data)

    for found, expected in zip(trained(Marked, 2), trained(Marked, 1), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.sample("Normalized")
@pytest.mark.parametrize("kind", [OfData, Normalized])
def test_a_condition_into_which_replicas_cannot_go_together_is_refused(kind):
    with pytest.raises(InputError, match="Replicas cannot communicate inside tf.cond"):
        trained(kind, 2)


class Differing(InKerasVariables):
    """Each replica has a value of its own of the variable that the condition reads."""

    def compile(self, **how):
        super().compile(**how)
        self.mine = tf.Variable(0, trainable=False)
        for number, copy in enumerate(self.distribute_strategy.experimental_local_results(self.mine)):
            copy.assign(number)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*data, self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        tf.cond(self.mine == 0, lambda: self.optimizer.apply(gradients, self.trainable_variables), lambda: None)
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_replicas_that_disagree_on_a_condition_fail(jit_compile):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Replicas disagree on the condition"):
        trained(Differing, 2, jit_compile=jit_compile)

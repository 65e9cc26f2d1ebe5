"""Optimizers and metrics that were made outside the scope: the same objects, and one device's training."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X[:, :1]


class Slowing(keras.optimizers.SGD):
    """Has a plain variable, and arguments that its configuration does not hold."""

    def __init__(self, first, by):
        super().__init__(first, momentum=0.5)
        self.by, self.factor = by, tf.Variable(1.0, trainable=False)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * self.factor)

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        self.factor.assign(self.factor * self.by)


class Adversaries(keras.Model):
    """Keeps its optimizers where Keras does not look."""

    def compile(self, first, others):
        super().compile(loss="mse")
        self.first, self.others = first, others

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients, variables = tape.gradient(loss, self.trainable_variables), self.trainable_variables
        self.first.apply(gradients[:2], variables[:2])
        self.others["second"].apply(gradients[2:], variables[2:])
        return {"loss": loss}


def make(kind=keras.Model):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    return kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(inputs)))


def on_two(kind=keras.Model):
    tfgpu.repair_keras()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return make(kind)


def placed():
    return tfgpu.parallel.place(make(), {"*": ("CPU:0", "CPU:1"), "dense*": ("CPU:2", "CPU:3")})


def sharded():
    return tfgpu.parallel.shard(on_two(), stage=1)


def built(model):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    return optimizer


OPTIMIZERS = {
    "AdamW": lambda _: keras.optimizers.AdamW(0.1, use_ema=True, global_clipnorm=1.0),
    "float16": lambda _: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), dynamic_growth_steps=2),
    "schedule": lambda _: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 8), momentum=0.9),
    "accumulation": lambda _: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "subclass": lambda _: Slowing(0.5, 0.7),
    "built": built,
}


def fit(model, **options):
    return model.fit(X, Y, batch_size=5, shuffle=False, verbose=0, **options).history


def trained(model, name):
    optimizer, metric = OPTIMIZERS[name](model), keras.metrics.MeanAbsoluteError()
    model.compile(optimizer, "mse", metrics=[metric])
    assert model.optimizer is optimizer
    history = fit(model, epochs=2)
    if name != "schedule":
        getattr(optimizer, "inner_optimizer", optimizer).learning_rate = 0.01  # the script's own object still counts
    later = fit(model)
    return [*history.values(), *later.values(), *model.get_weights()]


def check(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


CASES = [(name, on_two) for name in OPTIMIZERS] + [("AdamW", placed), ("AdamW", sharded), ("float16", sharded)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), CASES, ids=[f"{name}-{where.__name__}" for name, where in CASES])
def test_an_optimizer_and_a_metric_that_were_made_outside_the_scope_train(name, where):
    check(trained(where(), name), trained(make(), name))


def test_one_that_was_built_before_the_variables_moved_is_refused():
    model = make()
    optimizer = built(model)
    model = tfgpu.parallel.place(model, {"*": ("CPU:0", "CPU:1")})
    with pytest.raises(InputError, match="is built"):
        model.compile(optimizer, "mse")


def test_one_that_has_trained_is_refused():
    one, two, optimizer = make(), on_two(), keras.optimizers.Adam()
    one.compile(optimizer, "mse")
    optimizer.apply([tf.ones_like(v) for v in one.trainable_variables], one.trainable_variables)
    with pytest.raises(InputError, match=r"iterations: 1.*model\.distribute_strategy\.scope"):
        two.compile(optimizer, "mse")


@pytest.mark.slow
def test_optimizers_that_a_model_keeps_itself():
    found = []
    for model in (make(Adversaries), on_two(Adversaries)):
        model.compile(keras.optimizers.Adam(0.1), {"second": keras.optimizers.SGD(0.1)})
        found.append([*fit(model, epochs=2).values(), *model.get_weights()])
    check(*found)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_a_callback_compiles(hook):
    class Compiles(keras.callbacks.Callback):
        def change(self, epoch, logs=None):
            if epoch == 1:
                self.model.compile(keras.optimizers.AdamW(0.1), "mse", metrics=["mae"])

    setattr(Compiles, hook, Compiles.change)
    found = []
    for model in (make(), on_two()):
        with model.distribute_strategy.scope():
            model.compile("sgd", "mse")
        found.append([*fit(model, epochs=3, callbacks=[Compiles()]).values(), *model.get_weights()])
    check(*found)
    assert len(found[0][0]) == 3


@pytest.mark.parametrize("kind", [keras.Model, pytest.param(Adversaries, marks=pytest.mark.slow)])
def test_one_device_trains_with_what_is_compiled_outside(kind):
    def trained(scope):
        strategy = tfgpu.strategy("one_device", devices=["CPU:0"])
        with strategy.scope():
            model = make(kind)
        with scope(strategy):
            first = Slowing(0.1, 0.9)
            if kind is Adversaries:
                model.compile(first, {"second": keras.optimizers.Adam(0.01)})
            else:
                model.compile(first, "mse", metrics=["mae"])
        return model.fit(X, Y, epochs=2, verbose=0).history, model.get_weights()

    logs, weights = trained(lambda strategy: contextlib.nullcontext())
    expected, others = trained(lambda strategy: strategy.scope())
    assert logs == expected
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(mine, other)


class Lookahead(keras.optimizers.SGD):
    """Its slow weights begin where the weights do, by an assignment in `build`."""

    def build(self, variables):
        super().build(variables)
        self.slow = [self.add_variable_from_reference(each, "slow") for each in variables]
        for slow, each in zip(self.slow, variables, strict=True):
            slow.assign(each)


@pytest.mark.parametrize(("optimizer", "is_named"), [(Lookahead, True), (keras.optimizers.SGD, False)])
def test_an_optimizer_that_assigns_in_build_is_named(optimizer, is_named, caplog):
    with tfgpu.strategy("mirrored", ["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer(0.1), "mse")
    with caplog.at_level("WARNING", logger="tfgpu"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert ("assigns to variables in `build`" in caplog.text) is is_named


class Pair(keras.Model):
    """Holds layers, and a metric made outside the scope, in tuples and a dictionary, which TensorFlow wraps."""

    def __init__(self, metric):
        super().__init__()
        self.layers_of = keras.layers.Dense(3, "tanh"), {"head": (keras.layers.Dense(1),)}
        self.seen = (metric,)

    def call(self, x):
        first, others = self.layers_of
        return others["head"][0](first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.seen[0].update_state(tf.abs(y))
        return {"seen": self.seen[0].result()}


def test_what_a_model_holds_in_tuples():
    def trained(strategy):
        metric = keras.metrics.Mean("seen")
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = Pair(metric)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return [*model.fit(X, Y, batch_size=6, shuffle=False, verbose=0).history["seen"], *model.get_weights()]

    two = tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    for one, other in zip(trained(tf.distribute.get_strategy()), trained(two), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_model_that_was_built_outside_the_scope_is_named(is_forgotten, caplog):
    strategy = tfgpu.strategy("mirrored", 2)
    with contextlib.nullcontext() if is_forgotten else tfgpu.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)
    said = f"not on the {strategy.num_replicas_in_sync} replicas" if is_forgotten else ""
    assert said in caplog.text and is_forgotten == ("outside `strategy.scope()`" in caplog.text)


def test_a_model_of_another_scope_is_refused():
    with tfgpu.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with tfgpu.strategy("mirrored", 2).scope(), pytest.raises(InputError, match=r"scope of a OneDeviceStrategy"):
        model.predict(np.ones((4, 2)), verbose=0)


@pytest.mark.parametrize("way", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_a_step_by_hand_that_no_replica_runs_is_named(way):
    def step(model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        return tape.gradient(loss, model.trainable_variables)

    with tfgpu.strategy("mirrored", 2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        with pytest.raises(InputError, match=r"strategy\.run\(step, args"):
            way(step)(model, np.ones((4, 2)))

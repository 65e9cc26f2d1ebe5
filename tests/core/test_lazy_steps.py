"""Steps that make things in their first call: the trial leaves none of them, and the first step makes its own."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.errors import InputError

X = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(11, 3)).astype("float32")
CACHE, METRIC = {}, None
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


@functools.cache
def metric(name):
    return keras.metrics.Mean(name=name)


class Lazy(keras.Model):
    """Takes gradients by a tape; subclasses make something the first time."""

    def loss_of(self, x, y):
        return ops.mean(ops.square(y - self(x, training=True)))

    def updated(self):
        return self.optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        self.updated().apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"mean": loss, **self.logged(x, loss)}

    def logged(self, x, loss):
        return {}

    def mean_of(self, metric, loss):
        metric.update_state(loss)
        return {"late": metric.result()}


class Attribute(Lazy):
    def logged(self, x, loss):
        if not hasattr(self, "late"):
            self.late = keras.metrics.Mean(name="late")
        return self.mean_of(self.late, loss)


class InContainers(Lazy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.found, self.all = {}, []

    def logged(self, x, loss):
        if not self.found:
            self.found["late"] = keras.metrics.Mean(name="late")
            self.all.append(keras.metrics.Sum(name="total"))
        self.all[0].update_state(ops.sum(x, 1))
        return {"total": self.all[0].result(), **self.mean_of(self.found["late"], loss)}


class InModule(Lazy):
    def logged(self, x, loss, kept={}):  # noqa: B006
        global METRIC
        if METRIC is None:
            METRIC = CACHE["other"] = kept["other"] = keras.metrics.Mean(name="late")
        metric("cached").update_state(loss)
        assert METRIC is CACHE["other"] is kept["other"]
        return {"cached": metric("cached").result(), **self.mean_of(METRIC, loss)}


class InClass(Lazy):
    late = None

    def logged(self, x, loss):
        if InClass.late is None:
            InClass.late = keras.metrics.Mean(name="late")
        return self.mean_of(InClass.late, loss)


class Layer(Lazy):
    def loss_of(self, x, y):
        if not hasattr(self, "head"):
            self.head = keras.layers.Dense(3, kernel_initializer="ones")
        return ops.mean(ops.square(y - self.head(self(x, training=True))))


class Optimizer(Lazy):
    def updated(self):
        if not hasattr(self, "second"):
            self.second = keras.optimizers.SGD(0.1, momentum=0.9)
        return self.second


class Counter(Lazy):
    def logged(self, x, loss):
        if not hasattr(self, "steps"):
            self.steps, self.rows = (tf.Variable(0, aggregation=FIRST) for _ in range(2))
        self.steps.assign_add(1)
        self.rows.assign_add(tf.shape(x)[0])
        return {"steps": ops.cast(self.steps, "float32"), "rows": ops.cast(self.rows, "float32")}


class Earlier(Counter):
    """The variables are there, and have a copy on each replica."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps, self.rows = (tf.Variable(0, aggregation=FIRST) for _ in range(2))


class Queue(Lazy):
    """Compares rows with those of the last batch."""

    def loss_of(self, x, y):
        outputs = self(x, training=True)
        loss = ops.mean(ops.square(y - outputs))
        if not hasattr(self, "last"):
            self.last = tf.Variable(ops.zeros((3,)), trainable=False, aggregation=FIRST)
        loss = loss + ops.mean(ops.square(outputs - self.last))
        self.last.assign(ops.mean(outputs, 0))
        return loss


def fitted(kind, devices, *, inside=False, eager=False):
    global METRIC
    CACHE.clear()
    metric.cache_clear()
    InModule.logged.__defaults__[0].clear()
    METRIC = InClass.late = None
    keras.utils.set_random_seed(0)
    strategy = tfgpu.strategy("mirrored", devices=devices) if devices else tf.distribute.get_strategy()

    def fit():
        return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    with strategy.scope():
        inputs = keras.Input((5,))
        model = kind(inputs, keras.layers.Dense(3)(inputs))
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
        logs = fit() if inside else None
    return logs if inside else fit(), model.get_weights()


KINDS = Attribute, InContainers, InModule, InClass, Layer, Optimizer, Counter, Earlier, Queue
WAYS = {"in_scope": {"inside": True}, "outside": {}, "eager": {"eager": True}}


@pytest.mark.sample("Attribute-in_scope")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_what_a_step_makes_the_first_time(kind, way):
    one, two = (fitted(kind, devices, **WAYS[way]) for devices in (None, ["CPU:0", "CPU:1"]))
    assert one[0].keys() == two[0].keys() and len(one[1]) == len(two[1])
    for name, values in one[0].items():
        np.testing.assert_allclose(two[0][name], values, rtol=1e-5, err_msg=name)
    for mine, other in zip(two[1], one[1], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


OUTSIDE = tf.Variable(0.0)


class Adds(Lazy):
    def logged(self, x, loss):
        OUTSIDE.assign_add(1.0)
        return {}


class Hidden(Lazy):
    """Makes up the name under which it keeps what it makes."""

    def logged(self, x, loss):
        name = "_".join(["made", "up"])
        if name not in globals():
            globals()[name] = keras.metrics.Mean(name="late")
        return self.mean_of(globals()[name], loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"), [(Adds, "outside `strategy.scope"), (Hidden, "'late/total'.*cannot remove them")]
)
@pytest.mark.parametrize("way", ["outside", "eager"])
def test_what_cannot_be_one_device_s_is_refused(kind, why, way):
    globals().pop("made_up", None)
    with pytest.raises(InputError, match=why):
        fitted(kind, ["CPU:0", "CPU:1"], **WAYS[way])


class Sets(Lazy):
    def logged(self, x, loss):
        OUTSIDE.assign(2.0)
        return {}


@pytest.mark.slow
def test_each_replica_may_assign_the_same(caplog):
    with caplog.at_level(logging.WARNING, logger="tfgpu"):
        fitted(Sets, ["CPU:0", "CPU:1"])
    assert float(OUTSIDE) == 2 and "Sets" not in caplog.text

"""Code of the user's whose settings change between two trainings is tried again: it may mix rows now."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.core.row_mixing.trials import run_trial

X = np.random.default_rng(0).normal(size=(22, 5)).astype("float32")
Y = X[:, :2] / 2
SWITCHES = {"global": False}


def mixed(values, switch):
    """Multiplied by the mean of the batch, if the switch is on."""
    return values * ops.mean(ops.square(values)) if switch else values


class LayerOfAttribute(keras.layers.Layer):
    on = False

    def call(self, x):
        return mixed(x, self.on)


class LayerOfGlobal(keras.layers.Layer):
    def call(self, x):
        return mixed(x, SWITCHES["global"])


class LayerOfObject(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.settings = types.SimpleNamespace(on=False)

    def call(self, x):
        return mixed(x, self.settings.on)


class LossOfAttribute(keras.losses.Loss):
    on = False

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, y_true, y_pred):
        self.calls += 1
        return ops.mean(mixed(ops.square(y_pred - y_true), self.on), -1)


class LossOfGlobal(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(mixed(ops.square(y_pred - y_true), SWITCHES["global"]), -1)


class LossOfObject(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.settings = types.SimpleNamespace(on=False)

    def call(self, y_true, y_pred):
        return ops.mean(mixed(ops.square(y_pred - y_true), self.settings.on), -1)


class MetricOfAttribute(keras.metrics.Metric):
    on = False

    def __init__(self):
        super().__init__(name="own")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(mixed(ops.square(y_pred - y_true), self.on)))

    def result(self):
        return self.total + 0.0


class StepOfAttribute(keras.Model):
    on = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(mixed(ops.square(self(x) - y), self.on))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class LossMethodOfAttribute(keras.Model):
    on = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(mixed(ops.square(y_pred - y), self.on))


def function_of_global(y_true, y_pred):
    return ops.mean(mixed(ops.square(y_pred - y_true), SWITCHES["global"]), -1)


def switch(things, is_on):
    SWITCHES["global"] = is_on
    for thing in things:
        for owner in (thing, getattr(thing, "settings", None)):
            if hasattr(owner, "on"):
                owner.on = is_on


def made(strategy, own, rate, *, is_eager):
    """A model with `own`, a function that compiles it, and what has the switch."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        thing = own() if isinstance(own, type) and not issubclass(own, keras.Model) else own
        inputs = keras.Input((5,))
        hidden = thing(inputs) if isinstance(thing, keras.layers.Layer) else inputs
        make = own if isinstance(own, type) and issubclass(own, keras.Model) else keras.Model
        model = make(inputs, keras.layers.Dense(2)(hidden))
    loss = thing if isinstance(thing, keras.losses.Loss) or own is function_of_global else "mse"
    metrics = [thing] if isinstance(thing, keras.metrics.Metric) else None

    def compiled():
        with strategy.scope():
            model.compile(keras.optimizers.SGD(rate), loss, metrics=metrics, run_eagerly=is_eager)

    return model, compiled, (thing, model)


def numbers(model, logs):
    return np.concatenate([*[each.ravel() for each in model.get_weights()], np.ravel(logs)])


def trained(strategy, own, *, is_eager, compiles_again):
    """Weights and logs after a training with the switch off, and another one with it on."""
    model, compiled, things = made(strategy, own, 0.1, is_eager=is_eager)
    logs = []
    for is_on in (False, True):
        switch(things, is_on)
        if compiles_again or not is_on:
            compiled()
        logs += model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history.values()
    return numbers(model, logs)


OWN = [
    LayerOfAttribute,
    LayerOfGlobal,
    LayerOfObject,
    LossOfAttribute,
    LossOfGlobal,
    LossOfObject,
    MetricOfAttribute,
    StepOfAttribute,
    LossMethodOfAttribute,
    function_of_global,
]
WAYS = {"compiled": (False, True), "eager": (True, False), "eager-compiled-again": (True, True)}
FAST = {
    (LayerOfObject, "compiled"),
    (LossOfObject, "eager"),
    (MetricOfAttribute, "compiled"),
    (StepOfAttribute, "eager"),
}
AT_ONCE = {(StepOfAttribute, "begin"), (LayerOfObject, "end"), (StepOfAttribute, "batch"), (LossOfObject, "batch")}


@pytest.mark.parametrize(
    ("own", "is_eager", "compiles_again"),
    [
        pytest.param(own, *WAYS[way], id=f"{own.__name__}-{way}", marks=[pytest.mark.slow] * ((own, way) not in FAST))
        for own in OWN
        for way in WAYS
    ],
)
def test_a_setting_that_changes_between_trainings_is_noticed(own, is_eager, compiles_again):
    how = {"is_eager": is_eager, "compiles_again": compiles_again}
    expected = trained(tfgpu.strategy("one_device"), own, **how)
    np.testing.assert_allclose(trained(tfgpu.strategy("mirrored", 2), own, **how), expected, rtol=1e-5, atol=1e-5)


class SwitchesOn(keras.callbacks.Callback):
    """Switches on in the second of two epochs, or within the first."""

    def __init__(self, hook, *things):
        super().__init__()
        self.things = things
        if hook == "batch":
            self.on_train_batch_end = lambda batch, logs=None: self.act(batch)
        elif hook == "begin":
            self.on_epoch_begin = lambda epoch, logs=None: self.act(epoch - 1)
        else:
            self.on_epoch_end = lambda epoch, logs=None: self.act(epoch)

    def act(self, at):
        if at == 0:
            switch(self.things, True)


def trained_at_once(strategy, own, hook):
    """Weights and logs of one training in eager steps, in which a callback turns the switch."""
    model, compiled, things = made(strategy, own, 0.01, is_eager=True)
    switch(things, False)
    compiled()
    turns = SwitchesOn(hook, *things)
    logs = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[turns]).history
    return numbers(model, [*logs.values()])


@pytest.mark.parametrize(
    ("own", "hook"),
    [
        pytest.param(own, hook, id=f"{own.__name__}-{hook}", marks=[pytest.mark.slow] * ((own, hook) not in AT_ONCE))
        for own in OWN
        for hook in ("begin", "end", "batch")
    ],
)
def test_a_setting_that_a_callback_changes_is_noticed(own, hook):
    expected = trained_at_once(tfgpu.strategy("one_device"), own, hook)
    found = trained_at_once(tfgpu.strategy("mirrored", 2), own, hook)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class Options:
    on = False


class Holder:
    def __init__(self):
        self.options = types.SimpleNamespace(on=False)
        self.on = False

    @property
    def is_on(self):
        return self.options.on

    def of_method(self, x):
        return step_of_run(x, self.on)

    def of_property(self, x):
        return step_of_run(x, self.is_on)


HELD = Holder()
MODULE = types.ModuleType("switches_of_tests")


def step_of_run(x, is_on):
    return ops.sum(mixed(x, is_on))


def of_global(x):
    return step_of_run(x, SWITCHES["global"])


def of_class(x):
    return step_of_run(x, Options.on)


def of_module(x):
    return step_of_run(x, MODULE.on)


def of_weight(x):
    return step_of_run(x, HELD.options.weight)


def turn(is_on):
    SWITCHES["global"] = Options.on = MODULE.on = HELD.on = HELD.options.on = is_on
    HELD.options.weight = 0.5 if is_on else 0.0


OF_RUN = [of_global, of_class, of_module, of_weight, HELD.of_method, HELD.of_property]


@pytest.fixture
def switched_off():
    turn(False)
    yield
    turn(False)


def rows_of(strategy, rows):
    return next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(rows))))


@pytest.mark.usefixtures("switched_off")
@pytest.mark.parametrize("function", OF_RUN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
def test_a_setting_of_a_function_of_run_that_changes_is_noticed(function, is_traced, caplog):
    strategy = tfgpu.strategy("mirrored", 2)

    def run(rows):
        strategy.run(function, (rows,))

    run = tf.function(run, reduce_retracing=False) if is_traced else run
    run(rows_of(strategy, 8))
    assert "mixes rows" not in caplog.text
    turn(True)
    run(rows_of(strategy, 6))  # traces again
    assert caplog.text.count("mixes rows") == 1
    run(rows_of(strategy, 4))
    turn(False)
    run(rows_of(strategy, 2))
    assert caplog.text.count("mixes rows") == 1


def test_what_changes_in_each_step_is_no_setting(monkeypatch):
    held, tries = types.SimpleNamespace(step=0, rate=0.5, name=""), []
    trial = run_trial._RunTrial
    monkeypatch.setattr(run_trial, "_RunTrial", lambda *given: tries.append(held.step) or trial(*given))
    strategy = tfgpu.strategy("mirrored", 2)
    rows = rows_of(strategy, 8)
    for step in range(12):
        held.step, held.rate, held.name = step, 0.5 / (1 + step), f"step-{step}"
        strategy.run(lambda x: x * held.rate + held.step + len(held.name), (rows,))
    assert 1 <= len(tries) <= 6


class Bank(keras.layers.Layer):
    """Remembers what it has seen in an array that is too large for the trial to copy."""

    def __init__(self):
        super().__init__()
        self.rows = np.zeros((1 << 20, 5), "float32")
        self.count = 0

    def call(self, x):
        if tf.executing_eagerly():
            self.rows[self.count] = np.mean(x, 0)
            self.count += 1
        return x


def test_an_array_that_is_too_large_to_be_put_back_is_not_changed_by_the_trial(caplog):
    with tfgpu.strategy("mirrored", 2).scope():
        inputs, bank = keras.Input((5,)), Bank()
        model = keras.Model(inputs, keras.layers.Dense(2)(bank(inputs)))
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X[:8], Y[:8], batch_size=8, shuffle=False, verbose=0)
    assert "could not be tried" in caplog.text and "assignment destination is read-only" in caplog.text
    np.testing.assert_allclose(bank.rows[0], X[:8].mean(0), rtol=1e-5)
    assert not bank.rows[bank.count :].any()

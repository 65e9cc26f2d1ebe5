"""Layers on chosen devices: each tensor is where it was placed, and training equals one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.parallel import place

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 8)).astype("float32"), RNG.normal(size=(50, 1)).astype("float32")
WHERE = {"first": "CPU:1", "drop*": "CPU:2", "second": "CPU:2", "norm": "CPU:2", "last": "CPU:3"}
ON_TWO = {"first": ("CPU:0", "CPU:1"), "*": ("CPU:2", "CPU:3")}


def make(policy="float32"):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    first = keras.layers.Dense(16, "relu", name="first", dtype=policy)(inputs)
    x = keras.layers.Dropout(0.3, name="dropout", dtype=policy)(first)
    x = keras.layers.Dense(16, "relu", name="second", dtype=policy)(x)
    x = keras.layers.BatchNormalization(name="norm", dtype=policy)(x) + first
    return keras.Model(inputs, keras.layers.Dense(1, name="last", dtype="float32")(x))


def fit(model, *callbacks, epochs=3, policy="float32", **options):
    with model.distribute_strategy.scope():
        optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=True, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=["mae"])
    arguments = dict(epochs=epochs, shuffle=False, verbose=0, validation_data=(X, Y), callbacks=list(callbacks))
    return model.fit(X, Y, 16, **arguments).history


def on_one_device(**how):
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        model = make(how.get("policy", "float32"))
    return model, fit(model, **how)


def on_two_replicas(policy):
    with tfgpu.strategy("mirrored", devices=ON_TWO["first"]).scope():
        return make(policy)


def devices_of(variable) -> list[str]:
    return [copy.device.rpartition("device:")[2] for copy in variable.value.values]


def assert_close(one, other, tolerance=1e-5):
    for mine, others in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=tolerance)


HOWS = {"plain": {}, "accumulation": {"gradient_accumulation_steps": 2}, "float16": {"policy": "mixed_float16"}}
FAST = (2, "plain"), (1, "float16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        pytest.param(
            replicas, how, id=f"{name} on {replicas}", marks=() if (replicas, name) in FAST else pytest.mark.slow
        )
        for name, how in HOWS.items()
        for replicas in (1, 2)
    ],
)
def test_the_training_is_one_devices(replicas, how):
    one, expected = on_one_device(**how)
    policy = how.get("policy", "float32")
    model = place(make(policy), WHERE) if replicas == 1 else place(on_two_replicas(policy), ON_TWO)
    history = fit(model, **how)
    tolerance = 2e-3 if how.get("policy") else 1e-5
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=tolerance)
    assert_close(one, model, tolerance)
    np.testing.assert_allclose(one.predict(X, verbose=0), model.predict(X, verbose=0), atol=10 * tolerance)
    np.testing.assert_allclose(one.evaluate(X, Y, verbose=0), model.evaluate(X, Y, verbose=0), rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_part_is_where_it_was_put(replicas):
    where = {name: (device,) for name, device in WHERE.items()} if replicas == 1 else ON_TWO
    model = place(make() if replicas == 1 else on_two_replicas("float32"), where)
    fit(model, epochs=1)
    homes = {name: where.get(name, where.get("*")) for name in ("first", "second", "norm", "last")}
    for name, devices in homes.items():
        for variable in model.get_layer(name).variables:
            assert devices_of(variable) == list(devices), variable.path
    assert devices_of(model.get_layer("dropout").seed_generator.state) == list(homes["second"])
    kinds = "_momentum", "_velocity", "_average"
    slots = [v for v in model.optimizer.variables if v.path.endswith(kinds)]
    assert len(slots) == 3 * len(model.trainable_variables)
    for variable in slots:
        name = variable.path.rpartition("/")[2].partition("_")[0]
        assert devices_of(variable) == list(homes[name]), variable.path


def kinds_by_device(model, strategy) -> dict[str, set[str]]:
    """The kinds of operations of a training step, by device."""

    @tf.function(autograph=False)
    def train():
        return strategy.run(lambda: model.train_step((X[:16], Y[:16])))

    found = {}
    for op in train.get_concrete_function().graph.get_operations():
        for inputs in [tuple(value.shape.as_list() or ()) for value in op.inputs if value.shape.rank is not None]:
            found.setdefault(op.device.rpartition("device:")[2], set()).add((op.type, inputs))
    return found


def test_forward_backward_and_update_run_there():
    model = place(make(), WHERE)
    fit(model, epochs=1)
    ran = kinds_by_device(model, model.distribute_strategy)

    def devices(kind, shape):
        return {device for device, kinds in ran.items() if (kind, shape) in kinds}

    assert devices("MatMul", (8, 16)) == {"CPU:1"}  # `first` forward; its kernel's gradient has other shapes
    assert devices("ReluGrad", (16, 16)) == {"CPU:1", "CPU:2"}
    assert devices("Sub", (16, 1)) == {"CPU:3"}  # of the loss, of the metric, and of what the last layer learns
    assert devices("Sqrt", (8, 16)) == {"CPU:1"} and devices("Sqrt", (16, 16)) == {"CPU:2"}
    assert devices("Sqrt", (16, 1)) == {"CPU:3"}
    assert "AddV2" not in {kind for kind, shape in ran.get("CPU:0", ()) if shape == (16, 16)}


@pytest.mark.slow
def test_a_model_resumes_and_opens_anywhere(tmp_path):
    one, _ = on_one_device()
    fit(place(make(), WHERE), Checkpoint(tmp_path / "run"), epochs=2)
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        again = make()
    fit(again, Checkpoint(tmp_path / "run"))
    assert_close(one, again)
    model = place(make(), WHERE)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert not hasattr(opened.get_layer("first").kernel.value, "values")
    np.testing.assert_allclose(opened.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)


def test_auto_spreads_bytes_and_prints_what_it_did(capsys):
    keras.utils.set_random_seed(3)
    wide = [keras.layers.Dense(64, name=f"wide_{at}") for at in range(4)]
    model = keras.Sequential([keras.Input((64,)), *wide, keras.layers.Dense(1, name="last")])
    before = [weight.copy() for weight in model.get_weights()]
    place(model, "auto", devices=2)
    printed = capsys.readouterr().out
    assert "CPU:0" in printed and "CPU:1" in printed and "KiB" in printed and "wide_0 to wide_" in printed
    devices = [devices_of(layer.kernel) for layer in model.layers]
    assert devices[0] == ["CPU:0"] and devices[-1] == ["CPU:1"] and devices == sorted(devices)
    assert 1 < devices.count(["CPU:0"]) < 4
    assert all(one.tobytes() == other.tobytes() for one, other in zip(before, model.get_weights(), strict=True))
    with model.distribute_strategy.scope():
        model.compile("adam", "mse")
    model.fit(np.ones((8, 64), "float32"), np.ones((8, 1), "float32"), verbose=0)


class Own(keras.Model):
    """A model without a known graph, with a nested layer; its variables are created from the data."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.layers.Dense(4, name="inner"), keras.layers.Dense(4)], name="body")
        self.head = keras.layers.Dense(1, name="head")

    def call(self, x):
        return self.head(self.body(x))


@pytest.mark.slow
def test_a_model_without_a_graph_and_layers_within_layers():
    def trained(model):
        with model.distribute_strategy.scope():
            model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(X, Y, 16, epochs=2, shuffle=False, verbose=0)
        return model

    keras.utils.set_random_seed(2)
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        one = trained(Own())
    keras.utils.set_random_seed(2)
    model = trained(place(Own(), {"body/inner": "CPU:1", "body": "CPU:2", "head": "CPU:3"}))
    assert devices_of(model.body.layers[0].kernel) == ["CPU:1"] and devices_of(model.body.layers[1].kernel) == ["CPU:2"]
    assert devices_of(model.head.kernel) == ["CPU:3"]
    assert_close(one, model)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"furst": "CPU:0"}, "No layer .* is called 'furst'. There are first"),
        ({"first": "GPU:7"}, "GPU:7"),
        ({"first": ("CPU:0", "CPU:1")}, "needs one device for each of the 2 replica|CPU:0, CPU:1"),
        ({}, "names no layer"),
        ({3: "CPU:0"}, "A pattern is a string"),
        ("CPU:0", "or 'auto'; only"),
        ({"first": "CPU:0", "last": ("CPU:1", "CPU:2")}, "'last' needs one device for each of the 1 replica"),
    ],
)
def test_bad_input(where, message):
    model = make()
    if where == {"first": ("CPU:0", "CPU:1")}:
        with tfgpu.strategy("mirrored", devices=3).scope():
            model = make()
        message = "needs one device for each of the 3 replica"
    with pytest.raises(tfgpu.InputError, match=message):
        place(model, where)


def test_late_and_invalid_calls_are_reported():
    model = make()
    model.compile("adam", "mse")
    with pytest.raises(tfgpu.InputError, match="Place it before `compile`"):
        place(model, WHERE)
    model = place(make(), WHERE)
    model.compile("adam", "mse", jit_compile="auto")
    assert model.jit_compile is False

"""A model in stages learns what it learns on one device."""

import keras
import numpy as np
import pytest
from spread_models import assert_equal, cnn, data_for, fit, made, masked, mlp, on_one_device, tied, transformer

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.parallel import Mesh, pipeline

CASES = {
    "1f1b": (mlp, {}, dict(stages=4, microbatches=3, cuts=["drop", "third", "last"])),
    "gpipe": (mlp, {}, dict(stages=2, microbatches=4, cuts=["third"], schedule="gpipe")),
    "kept": (mlp, {}, dict(stages=2, microbatches=4, cuts=["third"], schedule="gpipe", recompute=False)),
    "interleaved": (
        mlp,
        {},
        dict(stages=4, microbatches=4, cuts=["drop", "third", "last"], schedule="interleaved", devices=2),
    ),
    "two replicas": (
        mlp,
        {},
        dict(stages=2, microbatches=3, cuts=["third"], mesh=Mesh(2, 2, devices=[f"CPU:{at}" for at in range(4)])),
    ),
    "accumulation": (mlp, {"gradient_accumulation_steps": 2}, dict(stages=2, microbatches=4, cuts=["third"])),
    "float16": (mlp, {"policy": "mixed_float16"}, dict(stages=2, microbatches=4, cuts=["third"])),
    "batch normalization": (cnn, {}, dict(stages=3, microbatches=4)),
    "transformer": (transformer, {"weights": None}, dict(stages=4, microbatches=4)),
    "tied table": (tied, {"weights": None}, dict(stages=2, microbatches=3, cuts=["last"])),
    "mask": (masked, {"weights": None}, dict(stages=3, microbatches=4, cuts=["lstm", "last"])),
}
FAST = "1f1b", "mask"


@pytest.mark.sample("1f1b")
@pytest.mark.parametrize(
    ("make", "how", "settings"),
    [pytest.param(*case, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, case in CASES.items()],
)
def test_the_training_is_one_devices(make, how, settings):
    one, expected = on_one_device(make, **how)
    pipe = pipeline(made(make, how.get("policy", "float32")), **settings)
    history = fit(make, pipe, **how)
    assert_equal(make, one, history, pipe, expected, 2e-3 if "policy" in how else 1e-5)


class Counts(keras.layers.Layer):
    """Keeps the rows that it has seen, as a float and as a whole number, and a running mean of its input."""

    def build(self, shape):
        self.rows = self.add_weight(initializer="zeros", trainable=False, aggregation="sum", name="rows")
        self.whole = self.add_weight(
            initializer="zeros", dtype="int32", trainable=False, aggregation="sum", name="whole"
        )
        self.mean = self.add_weight(initializer="zeros", trainable=False, name="mean")

    def call(self, x, training=None):
        if training:
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            self.whole.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int32"))
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_layer_counts_is_one_devices(replicas):
    x = np.random.default_rng(2).normal(size=(14, 4)).astype("float32")  # the last batch: 2 rows, 3 micro-batches

    def counted(spread):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), Counts(name="counts"), keras.layers.Dense(1, name="last")])
        spread(model)
        with model.distribute_strategy.scope():
            model.compile("sgd", "mse", jit_compile=False)
        model.fit(x, x[:, :1], 6, epochs=2, shuffle=False, verbose=0)
        layer = model.get_layer("counts")
        copies = getattr(layer.mean.value, "values", [layer.mean.value])
        return float(layer.rows.numpy()), int(layer.whole.numpy()), [float(copy.numpy()) for copy in copies]

    mesh = Mesh(replicas, 2, devices=[f"CPU:{at}" for at in range(2 * replicas)])
    rows, whole, means = counted(lambda model: pipeline(model, 2, 3, cuts=["last"], mesh=mesh))
    expected = counted(lambda model: None)
    assert (rows, whole) == expected[:2] == (28.0, 28)
    np.testing.assert_allclose(means, expected[2] * replicas, rtol=1e-5)


@pytest.mark.slow
def test_a_layout_resumes_in_another_and_opens_anywhere(tmp_path):
    one, _ = on_one_device(mlp)
    pipe = pipeline(made(mlp), 4, 3, cuts=["drop", "third", "last"])
    fit(mlp, pipe, Checkpoint(tmp_path / "run"), epochs=1)
    mesh = Mesh(data=2, pipeline=2, devices=[f"CPU:{at}" for at in range(4)])
    again = pipeline(made(mlp), 2, 4, cuts=["third"], mesh=mesh, schedule="gpipe")
    fit(mlp, again, Checkpoint(tmp_path / "run"))
    for mine, other in zip(again.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    again.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    x, _ = data_for(mlp)
    np.testing.assert_allclose(opened.predict(x, verbose=0), again.predict(x, verbose=0), atol=1e-6)


def test_stages_are_where_they_were_put():
    model = pipeline(made(mlp), 2, 4, cuts=["third"], devices=["CPU:2", "CPU:3"])
    devices = {
        layer.name: layer.kernel.value.values[0].device[-5:] for layer in model.layers if hasattr(layer, "kernel")
    }
    assert devices == {"first": "CPU:2", "second": "CPU:2", "third": "CPU:3", "last": "CPU:3"}


def test_a_table_of_two_stages_is_where_the_logits_are():
    model = pipeline(made(tied), 2, 4, cuts=["last"], devices=["CPU:2", "CPU:3"])
    table, middle = (model.get_layer(name).weights[0].value.values[0].device[-5:] for name in ("table", "middle"))
    assert (table, middle) == ("CPU:3", "CPU:2")


def fixed():
    return keras.Sequential([keras.Input((8,), batch_size=4), keras.layers.Dense(8), keras.layers.Dense(8)])


def shared():
    inputs = keras.Input((8,))
    layer, other = keras.layers.Dense(8, name="twice"), keras.layers.Dense(8, name="between")
    return keras.Model(inputs, layer(other(layer(inputs))))


def without_rows():
    inputs = keras.Input((8,))
    mean = keras.ops.mean(keras.layers.Dense(8, name="first")(inputs), axis=0)
    return keras.Model(inputs, keras.layers.Dense(8, name="last")(inputs) + mean)


class Own(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (mlp, dict(stages=0, microbatches=2), "`stages` must be a whole number"),
        (mlp, dict(stages=2, microbatches=2.0), "`microbatches` must be"),
        (mlp, dict(stages=2, microbatches=2, schedule="1f2b"), "1f1b"),
        (mlp, dict(stages=2, microbatches=2, recompute=False), "runs each forward pass again"),
        (mlp, dict(stages=9, microbatches=2, devices=4), "needs several stages per device"),
        (fixed, dict(stages=2, microbatches=2, devices=2), "Make it without `batch_size`"),
        (mlp, dict(stages=5, microbatches=2), "devices"),
        (mlp, dict(stages=2, microbatches=2, cuts=["thrid"]), "No layer is called 'thrid'. A stage can begin at: drop"),
        (mlp, dict(stages=3, microbatches=2, cuts=["third", "second"]), "in the order of the layers"),
        (mlp, dict(stages=2, microbatches=2, cuts=["first"]), "after the first one"),
        (mlp, dict(stages=2, microbatches=2, mesh=Mesh(pipeline=2), devices=2), "not both"),
        (mlp, dict(stages=2, microbatches=2, mesh=Mesh(pipeline=2, tensor=2)), "takes no mesh with an axis `tensor`"),
        (shared, dict(stages=2, microbatches=2, cuts=["between"]), "'twice' is called in the stages 0 and 1"),
        (shared, dict(stages=2, microbatches=2), "can be cut at 0 places, into 1 stages at most"),
        (without_rows, dict(stages=2, microbatches=2, cuts=["last"]), "no batch axis"),
        (Own, dict(stages=2, microbatches=2), "has no graph to split"),
    ],
)
def test_bad_input(make, settings, message):
    with pytest.raises(tfgpu.InputError, match=message):
        pipeline(make(), **settings)


@pytest.mark.slow
def test_late_calls_are_reported():
    model = pipeline(made(mlp), 2, 2, cuts=["third"])
    with pytest.raises(tfgpu.InputError, match="placed before"):
        pipeline(model, 2, 2, cuts=["third"])
    model = made(mlp)
    model.compile("adam", "mse")
    with pytest.raises(tfgpu.InputError, match="compiled outside any strategy"):
        pipeline(model, 2, 2, cuts=["third"])
    with tfgpu.strategy("mirrored", devices=["CPU:1"]).scope():
        model = made(mlp)
    with pytest.raises(tfgpu.InputError, match="was made for replicas on .*CPU:1"):
        pipeline(model, 2, 2, cuts=["third"])

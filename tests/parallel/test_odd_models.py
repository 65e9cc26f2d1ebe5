"""Unusual models: in every layout each learns what it learns on one device, or is refused."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.parallel import Mesh, apply, pipeline, place, recompute, tensor
from tfgpu.parallel.pipeline import execution

layers = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(50, 8)).astype("float32"), RNG.normal(size=(50, 1)).astype("float32")


def made(make):
    keras.utils.set_random_seed(1)
    return make()


def in_a_row(*middle):
    ends = layers.Dense(8, "relu", name="first"), layers.Dense(8, "relu", name="third"), layers.Dense(1, name="last")
    return keras.Sequential([keras.Input((8,)), ends[0], *middle, *ends[1:]])


def trained(model, epochs=5):
    """Losses and metrics of batches of 16 rows and a last one of 2: fewer than micro-batches."""
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.01), "mse", jit_compile=False)
    return model.fit(X, Y, 16, epochs=epochs, shuffle=False, verbose=0).history


def on_one_device(make):
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        return made(make)


def assert_alike(model, one, history, expected):
    assert history.keys() == expected.keys() and len(expected["loss"]) > 0
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for mine, other in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


class Watched(layers.Layer):
    """Has a metric, a loss, and draws of its own."""

    def __init__(self, **how):
        super().__init__(**how)
        self.seed, self.mean = keras.random.SeedGenerator(5), keras.metrics.Mean(name="watched")

    def call(self, x, training=None):
        self.add_loss(0.1 * keras.ops.mean(x**2))
        self.mean.update_state(keras.ops.mean(x, axis=-1))
        return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seed) if training else x


class Centered(layers.Layer):
    """Takes the mean of all rows from each."""

    def call(self, x):
        return x * x - keras.ops.mean(x, axis=0, keepdims=True)


class Backwards(layers.Layer):
    """The rows in the other order, in training alone."""

    def call(self, x, training=None):
        return keras.ops.flip(x, axis=0) if training else x


def of_models():
    """All layers are within models, which cannot hold a loss."""
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu", activity_regularizer="l2")], name="inner")
    other = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(1)], name="other")
    inputs = keras.Input((8,))
    return keras.Model(inputs, other(inner(inputs)))


def folded():
    """Each row is four rows in the middle, across the cut."""
    inputs = keras.Input((8,))
    x = layers.Dense(4, "relu", name="narrow")(keras.ops.reshape(inputs, (-1, 2)))
    x = layers.Dense(2, name="narrower")(x)
    return keras.Model(inputs, layers.Dense(1)(keras.ops.reshape(x, (-1, 8))))


MODELS = {
    "a layer's metric": lambda: in_a_row(Watched()),
    "a layer that mixes rows": lambda: in_a_row(Centered()),
    "one that does so in training": lambda: in_a_row(Backwards()),
    "spectral normalization": lambda: in_a_row(layers.SpectralNormalization(layers.Dense(8))),
    "models alone": of_models,
    "folded rows": folded,
}


FAST = ("a layer that mixes rows",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "recomputes"),
    [
        pytest.param(make, again, id=f"{name}, {again}", marks=() if again and name in FAST else pytest.mark.slow)
        for name, make in MODELS.items()
        for again in (True, False)
    ],
)
def test_a_pipeline_learns_what_one_device_learns(make, recomputes):
    one = on_one_device(make)
    model = pipeline(made(make), 2, 3, schedule="1f1b" if recomputes else "gpipe", recompute=recomputes)
    assert_alike(model, one, trained(model), trained(one))


@pytest.mark.slow
def test_rows_that_are_counted_over_replicas():
    one = on_one_device(lambda: in_a_row(Watched()))
    mesh = Mesh(2, 2, devices=[f"CPU:{at}" for at in range(4)])
    model = pipeline(made(lambda: in_a_row(Watched())), 2, 3, mesh=mesh)
    assert_alike(model, one, trained(model), trained(one))


@pytest.mark.parametrize(("layer", "whole"), [(Centered, True), (Backwards, True), (Watched, False)])
def test_only_what_mixes_rows_sees_the_whole_batch(layer, whole):
    model = pipeline(in_a_row(layers.Dropout(0.2), layer(name="middle")), 2, 3, cuts=["third"])
    found = [
        [call.name for calls in section.stages.values() for call in calls]
        for section in execution.program_of(model).sections
        if section.needs_whole_batch
    ]
    assert found == ([["middle"]] if whole else [])


class Refuses(layers.Layer):
    """Cannot run on the rows that are tried."""

    def call(self, x, training=None):
        if training and x.shape[0] == 4:
            raise ValueError("not these")
        return x


def test_rows_that_cannot_be_tried_are_reported(caplog):
    pipeline(in_a_row(Refuses()), 2, 3, cuts=["third"])
    assert "Could not find out whether" in caplog.text and "not these" in caplog.text and "`batch`" in caplog.text


def test_outside_of_replicas_a_call_is_one_devices():
    one = made(lambda: in_a_row(layers.Dropout(0.5)))
    model = pipeline(made(lambda: in_a_row(layers.Dropout(0.5))), 2, 3, cuts=["last"])
    np.testing.assert_allclose(model(X, training=True), one(X, training=True), atol=1e-6)


LAYOUTS = [
    lambda model: place(model, {"third": "CPU:1", "*": "CPU:0"}),
    pytest.param(lambda model: pipeline(model, 2, 3), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_that_was_frozen_before_the_layout_learns_again(layout):
    def frozen():
        model = in_a_row()
        model.get_layer("first").trainable = False
        return model

    one, model = on_one_device(frozen), layout(made(frozen))
    for each in (one, model):
        trained(each, 1)
        each.get_layer("first").trainable = True
    assert_alike(model, one, trained(model, 4), trained(one, 4))


@pytest.mark.slow
def test_lora_after_the_layout():
    def adapted(model):
        with model.distribute_strategy.scope():
            model.get_layer("first").enable_lora(2)
        model.get_layer("first").lora_kernel_a.assign(np.ones((8, 2), "float32"))
        return model

    one = adapted(on_one_device(in_a_row))
    model = place(made(in_a_row), {"first": "CPU:1", "*": "CPU:0"})
    model.get_layer("first").enable_lora(2)
    model.get_layer("first").lora_kernel_a.assign(np.ones((8, 2), "float32"))
    assert_alike(model, one, trained(model), trained(one))
    assert model.get_layer("first").lora_kernel_a.value.values[0].device.endswith("CPU:1")


@pytest.mark.slow
def test_scaled_and_with_arrays_in_parts():
    def make():
        inputs = keras.Input((8,))
        x = layers.Dense(8, name="wide")(inputs) * np.arange(8, dtype="float32")
        x = layers.Dense(8, "relu", name="up")(x) * 0.5
        return keras.Model(inputs, layers.Dense(1, name="down")(x))

    one, model = on_one_device(make), tensor(made(make), devices=2)
    assert [len(model.get_layer(name).trainable_weights) for name in ("wide", "up", "down")] == [2, 4, 3]
    assert_alike(model, one, trained(model), trained(one))


def test_attention_that_returns_its_scores_returns_those_of_all_heads(capsys):
    inputs = keras.Input((6, 4))
    x, scores = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs, return_attention_scores=True)
    model = keras.Model(inputs, [layers.Dense(4)(layers.Dense(4)(x)), scores])
    batch = np.random.default_rng(0).normal(size=(5, 6, 4)).astype("float32")
    expected = model.predict(batch, verbose=0)
    model = tensor(model, devices=2, plan={"attention": "heads"})
    assert "attention/query" in capsys.readouterr().out
    for a, b in zip(model.predict(batch, verbose=0), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_table_has_each_layer_s_whole_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "a_layer_of_a_pretrained_model_that_has_another_name_than_the_next_only_at_its_end"
    tensor(in_a_row(layers.Dense(8, name=name)), devices=2)
    cells = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert name in "".join(cells)


def output_of_other_rows():
    inputs = keras.Input((8,))
    x = layers.Dense(4, name="first")(keras.ops.reshape(inputs, (-1, 2)))
    return keras.Model(inputs, layers.Dense(2, name="last")(x))


def with_sparse_input():
    inputs = keras.Input((8,), sparse=True)
    return keras.Model(inputs, layers.Dense(1, name="last")(layers.Dense(4)(inputs)))


def saved_as_h5(path):
    tensor(in_a_row(), devices=2).save(path / "model.h5")


def placed():
    return place(in_a_row(), {"first": "CPU:1", "*": "CPU:0"})


def placed_around():
    inputs = keras.Input((8,))
    place(keras.Model(inputs, layers.Dense(1)(placed()(inputs))), {"*": "CPU:1"})


def trained_around():
    inputs = keras.Input((8,))
    trained(keras.Model(inputs, layers.Dense(1)(placed()(inputs))), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: pipeline(output_of_other_rows(), 2, 2, cuts=["last"]),
            "has another number of rows than the batch",
        ),
        (lambda path: pipeline(with_sparse_input(), 2, 2, cuts=["last"]), "is sparse or ragged"),
        (lambda path: placed().add(layers.Dense(2)), "Call `add` and `pop` before"),
        (lambda path: pipeline(in_a_row(), 2, 2).pop(), "Call `add` and `pop` before"),
        (saved_as_h5, "ends with .keras or .weights.h5"),
        (lambda path: placed_around(), "or a model within it, was placed before"),
        (lambda path: trained_around(), "the model that trains it here was not"),
        (
            lambda path: trained(recompute(in_a_row(layers.SpectralNormalization(layers.Dense(8))), "layers"), 1),
            "is trainable, and its layer assigns it",
        ),
    ],
)
def test_invalid_settings_are_reported(make, message, tmp_path):
    with pytest.raises(tfgpu.InputError, match=message):
        make(tmp_path)


class Balanced(layers.Layer):
    """Adds a loss that is no mean over rows."""

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.mean(x, axis=0) ** 2))
        return x


class Block(layers.Layer):
    def __init__(self, **how):
        super().__init__(**how)
        self.dense, self.balanced = layers.Dense(4, name="dense"), Balanced(name="balanced")

    def call(self, x):
        return self.balanced(self.dense(x))


def within_a_layer():
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(1)(Block(name="block")(inputs)))


@pytest.mark.slow
def test_a_layer_that_mixes_rows_within_a_spread_layer_gets_all(caplog):
    one = on_one_device(within_a_layer)
    model = apply(made(within_a_layer), Mesh(data=2))
    with caplog.at_level("WARNING", logger="tfgpu"):
        assert_alike(model, one, trained(model, 1), trained(one, 1))
    assert "'balanced' (Balanced) mixes rows of the batch" in caplog.text
    assert "its inputs are sent in every step (256 bytes a step)" in caplog.text

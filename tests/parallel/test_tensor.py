"""A model with split layers learns what it learns on one device."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from spread_models import assert_equal, cnn, convolved, data_for, fit, made, masked, mlp, on_one_device, transformer

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.parallel import Mesh, apply, pipeline, tensor
from tfgpu.parallel.tensor import collectives, losses


def mesh(**sizes):
    return Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])


CASES = {
    "mlp": (mlp, {}, {}, mesh(tensor=2)),
    "4 ways": (mlp, {}, {}, mesh(tensor=4)),
    "clipnorm": (mlp, {"clip": {"clipnorm": 0.1}}, {}, mesh(tensor=2)),
    "accumulation": (mlp, {"gradient_accumulation_steps": 2}, {}, mesh(tensor=2)),
    "accumulation, clipnorm": (
        mlp,
        {"gradient_accumulation_steps": 2, "clip": {"clipnorm": 0.1}},
        {},
        mesh(tensor=2),
    ),
    "float16": (mlp, {"policy": "mixed_float16"}, {}, mesh(tensor=2)),
    "channels and batch normalization": (cnn, {}, {}, mesh(tensor=2)),
    "convolutions with biases": (convolved, {}, {}, mesh(tensor=2)),
    "convolutions in float16": (convolved, {"policy": "mixed_float16"}, {}, mesh(tensor=2)),
    "transformer": (transformer, {"weights": None}, {}, mesh(tensor=2)),
    "mask": (masked, {"weights": None}, {"plan": {"last": "column"}}, mesh(tensor=2)),
    "data x tensor": (cnn, {}, {}, mesh(data=2, tensor=2)),
    "pipeline x tensor": (transformer, {"weights": None}, {}, mesh(pipeline=2, tensor=2)),
}
FAST = ("mlp",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "how", "settings", "devices"),
    [pytest.param(*case, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, case in CASES.items()],
)
def test_the_training_is_one_devices(make, how, settings, devices):
    one, expected = on_one_device(make, epochs=5, **how)
    model = apply(made(make, how.get("policy", "float32")), devices, **settings)
    history = fit(make, model, epochs=5, **how)  # 20 steps
    assert_equal(make, one, history, model, expected, 2e-3 if "policy" in how else 1e-5)


def gated(width=8):
    """Two columns, their product, one row; a layer of another equation; a head with more outputs than inputs."""
    inputs = keras.Input((5, width))
    gate = keras.layers.Dense(12, "silu", name="gate")(inputs)
    x = keras.layers.Dense(12, name="up")(inputs)
    x = keras.ops.multiply(gate, x)
    x = keras.layers.Dropout(0.2, seed=3, name="drop")(x)
    x = keras.layers.Dense(width, "tanh", name="down")(x) + inputs
    x = keras.layers.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de", name="wide")(x)
    x = keras.layers.EinsumDense("abde,dec->abc", (None, width), bias_axes="c", name="narrow")(x)
    return keras.Model(inputs, keras.layers.Dense(40, name="head")(x))


def trained(model, steps=5, metrics=()):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5, 8)).astype("float32"), rng.integers(0, 40, (12, 5))
    with model.distribute_strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics), jit_compile=False)
    return model.fit(x, y, 6, epochs=steps, shuffle=False, verbose=0).history["loss"]


def graph_of(model):
    """The operations of the compiled step."""
    x, y = np.zeros((6, 5, 8), "float32"), np.zeros((6, 5), "int32")
    strategy = model.distribute_strategy

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, args=((x, y),))

    return step.get_concrete_function(x, y).graph.get_operations()


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [(), ("accuracy",)])
def test_products_other_equations_and_logits_in_parts(metrics):
    keras.utils.set_random_seed(0)
    one = gated()
    keras.utils.set_random_seed(0)
    model = tensor(gated(), devices=2)
    assert model.get_layer("head").kernel.shape == (8, 40)
    expected, found = trained(one, metrics=metrics), trained(model, metrics=metrics)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for mine, other in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.slow
def test_a_pair_needs_one_sum_each_way():
    keras.utils.set_random_seed(0)
    model = tensor(gated(), devices=2)
    trained(model, steps=1)
    names = [op.name.rpartition("/")[2] for op in graph_of(model)]
    pairs = 2  # gate, up and down; wide and narrow

    def count(name):
        return sum(
            found == name or found.startswith(f"{name}_") and found[len(name) + 1 :].isdigit() for found in names
        )

    assert count(collectives.SUM) == pairs
    assert count(collectives.SUM_BACK) == 2  # into the second pair and the head; the first pair's input is the data
    assert count(losses.CROSS_ENTROPY_SUM) == 2


@pytest.mark.slow
def test_parts_and_their_slots_are_on_their_devices():
    model = tensor(gated(), devices=["CPU:2", "CPU:3"])
    trained(model, steps=1)
    layer = model.get_layer("up")
    assert [tuple(v.shape) for v in layer.weights] == [(8, 6), (8, 6), (6,), (6,)]
    assert [v.value.values[0].device[-5:] for v in layer.weights] == ["CPU:2", "CPU:3"] * 2
    slots = [v for v in model.optimizer.variables if "up_kernel" in v.path]
    assert [(tuple(v.shape), v.value.values[0].device[-5:]) for v in slots] == [
        ((8, 6), "CPU:2"),
        ((8, 6), "CPU:2"),
        ((8, 6), "CPU:3"),
        ((8, 6), "CPU:3"),
    ]


def test_a_pair_by_hand():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(2, "relu", name="a"), keras.layers.Dense(1, name="b")]
    )
    model.set_weights(
        [np.array([[1.0, -1.0], [2.0, 3.0]]), np.array([0.5, 0.0]), np.array([[2.0], [10.0]]), np.array([1.0])]
    )
    model = tensor(model, devices=2)
    # (1, 1): relu(1 + 2 + 0.5) * 2 + relu(-1 + 3) * 10 + 1
    assert float(model.predict(np.ones((1, 2)), verbose=0)[0, 0]) == 28.0
    np.testing.assert_array_equal(model.get_layer("b").weights[0].numpy(), [[2.0]])
    model.set_weights([np.zeros((2, 2)), np.ones(2), np.ones((2, 1)), np.zeros(1)])
    assert float(model.predict(np.ones((1, 2)), verbose=0)[0, 0]) == 2.0


def test_eagerly():
    keras.utils.set_random_seed(0)
    one = gated()
    keras.utils.set_random_seed(0)
    model = tensor(gated(), devices=2)
    for each in (one, model):
        with each.distribute_strategy.scope():
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            each.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=True)
        each.train_on_batch(np.ones((4, 5, 8), "float32"), np.ones((4, 5)))
    for mine, other in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_lora_is_refused_where_a_kernel_lies_in_parts():
    model = tensor(gated(), devices=2)
    with pytest.raises(tfgpu.InputError, match="`enable_lora` changes the kernel of 'up'"):
        model.get_layer("up").enable_lora(2)


@pytest.mark.slow
def test_lora_from_before_is_split_with_its_kernel():
    def made():
        keras.utils.set_random_seed(0)
        model = gated()
        for name in ("gate", "down", "wide", "narrow", "head"):
            layer = model.get_layer(name)
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(np.random.default_rng(1).normal(size=layer.lora_kernel_b.shape) * 0.1)
        return model

    one, model = made(), tensor(made(), devices=2)
    assert tuple(model.get_layer("gate").lora_kernel_b.shards[0].shape) == (2, 6)
    assert tuple(model.get_layer("down").lora_kernel_a.shards[0].shape) == (6, 2)
    np.testing.assert_allclose(trained(model), trained(one), rtol=1e-5)
    for mine, other in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.slow
def test_a_frozen_layer_and_a_layer_without_decay_stay_so():
    def built(spread):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(4, name=name) for name in "abc"]])
        model.get_layer("a").trainable = model.get_layer("b").trainable = False
        spread(model)
        with model.distribute_strategy.scope():
            optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
            optimizer.exclude_from_weight_decay([model.get_layer("c").kernel])
            model.compile(optimizer, "mse", jit_compile=False)
        model.fit(np.ones((4, 4)), np.ones((4, 4)), epochs=2, verbose=0)
        model.get_layer("a").trainable = model.get_layer("b").trainable = True
        assert len(model.trainable_variables) == len(model.weights)
        return model.get_weights()

    expected = built(lambda model: None)
    found = built(lambda model: tensor(model, devices=2, plan={"a": "column", "b": "row", "c": "column"}))
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_a_layer_of_two_graphs_stays_whole():
    shared, inputs = keras.layers.Dense(4, name="shared"), keras.Input((4,))
    inner = keras.Sequential([keras.Input((4,)), shared, keras.layers.Dense(4, name="last")], name="inner")
    model = keras.Model(inputs, keras.layers.Dense(4, name="end")(shared(inner(inputs))))
    with pytest.raises(tfgpu.InputError, match="'shared' cannot be split by its outputs: it is called several times"):
        tensor(model, devices=2, plan={"shared": "column"})


def test_a_label_outside_all_shards_gives_nan():
    model = tensor(gated(), devices=2)
    with model.distribute_strategy.scope():
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    loss = model.evaluate(np.ones((2, 5, 8), "float32"), np.full((2, 5), 40), verbose=0)
    assert np.isnan(loss)


@pytest.mark.slow
def test_a_layout_resumes_in_another_and_opens_anywhere(tmp_path):
    one, _ = on_one_device(mlp)
    model = tensor(made(mlp), devices=2)
    fit(mlp, model, Checkpoint(tmp_path / "run"), epochs=1)
    other = pipeline(made(mlp), 2, 4, cuts=["third"], devices=2)
    fit(mlp, other, Checkpoint(tmp_path / "run"), epochs=2)
    again = apply(made(mlp), mesh(data=2, tensor=2))
    fit(mlp, again, Checkpoint(tmp_path / "run"), epochs=2)  # nothing left to do
    for mine, theirs in zip(again.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    again.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    x, _ = data_for(mlp)
    np.testing.assert_allclose(opened.predict(x, verbose=0), again.predict(x, verbose=0), atol=1e-6)
    mine, theirs = again.optimizer.variables, opened.optimizer.variables
    assert len(theirs) < len(mine)  # whole again
    again.save_weights(tmp_path / "model.weights.h5")
    fresh = made(mlp)
    fresh.load_weights(tmp_path / "model.weights.h5")
    for mine, theirs in zip(again.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    model.load_weights(tmp_path / "model.weights.h5")
    for mine, theirs in zip(model.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_pending_gradients_are_on_their_devices_and_whole_in_files(tmp_path):
    """Of replicas whose layers lie in parts, in the middle of an update."""
    rows, labels = np.random.default_rng(0).normal(size=(8, 5, 8)).astype("float32"), np.ones((8, 5))
    by_eight = dict(batch_size=8, shuffle=False, verbose=0)

    def built(spread):
        keras.utils.set_random_seed(0)
        model = spread(gated())
        with model.distribute_strategy.scope():
            optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, jit_compile=False)
        return model

    one, model = built(lambda model: model), built(lambda model: apply(model, mesh(data=2, tensor=2)))
    again = built(lambda model: apply(model, mesh(pipeline=2, data=2), cuts=["wide"], microbatches=2))
    for each in (one, model):
        each.fit(rows, labels, epochs=3, **by_eight)
    waiting = [v for v in model.optimizer.variables if "up_kernel_1" in v.path and "accumulator" in v.path]
    assert [copy.device[-5:] for copy in waiting[0].value.values] == ["CPU:1", "CPU:3"]
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    assert len(opened.optimizer.variables) == len(one.optimizer.variables)
    for mine, other in zip(opened.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), atol=1e-6, err_msg=mine.path)
    model.fit(rows, labels, epochs=2, callbacks=[Checkpoint(tmp_path / "run")], **by_eight)  # five steps by now
    again.fit(rows, labels, epochs=4, callbacks=[Checkpoint(tmp_path / "run")], **by_eight)
    one.fit(rows, labels, epochs=4, **by_eight)
    for mine, other in zip(again.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def small(**how):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, name="a", **how), keras.layers.Dense(3, name="b")]
    )


class Subclassed(keras.Model):
    def call(self, x):
        return x


def called(model):
    model(np.ones((1, 2), "float32"))
    return model


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tensor(small(), devices=4), "6 outputs, which do not divide into 4 shards"),
        (
            lambda: tensor(small(), devices=2, plan={"b": "column"}),
            "3 outputs, which do not divide into 2 shards .2 or 4",
        ),
        (lambda: tensor(small(), devices=2, plan={"c": "column"}), "No layer of .* is called 'c'"),
        (lambda: tensor(small(), devices=2, plan={"a": "columns"}), "column"),
        (lambda: tensor(small(), devices=2, plan={"a": "heads"}), "a Dense like this cannot be split by heads"),
        (lambda: tensor(small(), devices=2, plan="all"), "`plan` must be 'auto', or patterns"),
        (lambda: tensor(small(activation="softmax"), devices=2), "depends on all outputs"),
        (
            lambda: tensor(small(kernel_constraint="max_norm"), devices=2, plan={"a": "column"}),
            "the constraint MaxNorm",
        ),
        (lambda: tensor(Subclassed(), devices=2), "is not built"),
        (lambda: tensor(called(Subclassed()), devices=2), "has no graph"),
        (lambda: tensor(small(), devices=1), "needs two devices or more"),
        (lambda: tensor(small(), "data", devices=2), "is called 'tensor'"),
        (lambda: tensor(small(), mesh=mesh(pipeline=2, tensor=2)), "parallel.apply"),
        (lambda: apply(small(), mesh(data=2), plan={"a": "column"}), "Give it tensor=2"),
        (lambda: apply(small(), mesh(data=2), cuts=["b"]), "`cuts` and `microbatches` describe a pipeline"),
        (lambda: apply(small(), Mesh(data=3, tensor=5)), "takes 15 devices"),
        (lambda: apply(small(), mesh(tensor=2), zero=1), "`zero` shards along `data`"),
    ],
)
def test_unsplittable_layers_are_reported(call, words):
    with pytest.raises(tfgpu.InputError, match=words):
        call()


def test_an_optimizer_that_looks_at_whole_variables_is_refused():
    model = tensor(small(), devices=2, plan={"a": "column", "b": "row"})
    with model.distribute_strategy.scope():
        model.compile("adafactor", "mse", jit_compile=False)
    with pytest.raises(tfgpu.InputError, match="Adafactor looks at each variable as a whole"):
        model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)


ALONG_ALL = """
import numpy as np, tfgpu
tfgpu.environment.set_logical_devices(8)
from spread_models import assert_equal, fit, made, on_one_device, transformer
from tfgpu.parallel import Mesh, apply
one, expected = on_one_device(transformer, epochs=5, weights=None)
model = apply(made(transformer), Mesh(data=2, pipeline=2, tensor=2, devices=[f"CPU:{at}" for at in range(8)]))
history = fit(transformer, model, epochs=5, weights=None)
assert_equal(transformer, one, history, model, expected)
homes = {copy.device[-5:] for variable in model.trainable_variables for copy in variable.value.values}
assert homes == {f"CPU:{at}" for at in range(8)}, homes
"""


@pytest.mark.slow
def test_data_pipeline_and_tensor_on_eight_devices():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    child = subprocess.run(
        [sys.executable, "-c", ALONG_ALL],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]


def with_sums(jit_compile, is_split):
    """What a model predicts after a training: a sum of a layer's input and output, and one of the model's input."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    first = keras.layers.Dense(8, "relu")(inputs)
    hidden = keras.layers.Dense(16, "relu")(first + keras.layers.Dense(8)(first))
    outputs = keras.layers.Dense(2)(keras.layers.Dense(8, name="row")(hidden) + inputs)
    model = keras.Model(inputs, outputs)
    if is_split:
        model = tfgpu.parallel.tensor(model, devices=["CPU:0", "CPU:1"])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
    return model.predict(x, verbose=0)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sums_of_layers_that_feed_each_other(jit_compile):
    expected = with_sums(False, is_split=False)
    np.testing.assert_allclose(with_sums(jit_compile, is_split=True), expected, rtol=1e-5, atol=1e-6)

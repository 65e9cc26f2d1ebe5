"""A grown head keeps the old logits bit for bit, and the optimizer's state."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.training import incremental

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 7)).astype("float32")
Y = RNG.integers(0, 3, 40)


def small(classes=3, activation=None, optimizer="adam", eager=True, **head):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((7,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(classes, activation, name="head", **head),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None)
    model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=eager)  # tracing takes longer than these steps
    return model


@pytest.mark.sample(4)
@pytest.mark.parametrize("width", [4, 100, 512])
@pytest.mark.parametrize(("classes", "more"), [(2, 1), (3, 7), (10, 2), (100, 1)])
def test_old_logits_are_the_same_bits(width, classes, more):
    old = keras.Sequential([keras.Input((width,)), keras.layers.Dense(classes)])
    new = incremental.grow(old, classes + more)
    for rows in (1, 7, 32):
        x = RNG.normal(size=(rows, width)).astype("float32")
        assert np.array_equal(old.predict_on_batch(x), new.predict_on_batch(x)[:, :classes])
        assert np.array_equal(old(x), new(x)[:, :classes])


def test_grown_again_and_through_a_file(tmp_path):
    old = small()
    old.fit(X, Y, batch_size=20, verbose=0)
    twice = incremental.grow(incremental.grow(old, 5), 6)
    assert twice.get_layer("head").parts == (3, 2, 1)
    twice.save(tmp_path / "twice.keras")
    loaded = keras.models.load_model(tmp_path / "twice.keras")
    assert np.array_equal(old.predict(X, verbose=0), loaded.predict(X, verbose=0)[:, :3])
    plain = keras.layers.Dense(6)
    plain.build((None, 16))
    plain.set_weights(twice.get_layer("head").get_weights())  # it is one kernel, as Dense has it
    assert incremental.grow(loaded, 8).get_layer("head").parts == (3, 2, 1, 2)


def test_a_softmax_head_keeps_the_ratios_of_old_classes():
    old = small(activation="softmax")
    new = incremental.grow(old, 5)
    before, after = old.predict(X, verbose=0), new.predict(X, verbose=0)
    assert after.shape == (40, 5) and np.allclose(after.sum(1), 1)
    assert np.allclose(after[:, :3] / after[:, :3].sum(1, keepdims=True), before, rtol=1e-5)
    body = keras.Model(old.inputs, old.layers[-1].input)(X)
    kernel, bias = old.get_layer("head").get_weights()
    wide, wider_bias = new.get_layer("head").get_weights()
    assert np.array_equal(wide[:, :3], kernel) and np.array_equal(wider_bias[:3], bias)
    assert body.shape == (40, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
        pytest.param(
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3), marks=pytest.mark.slow
        ),
        pytest.param(lambda: keras.optimizers.Adafactor(0.01), marks=pytest.mark.slow),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01, centered=True)),
    ],
    ids=["adam, ema", "momentum, accumulation", "adafactor", "loss scale, rmsprop"],
)
def test_slots_of_old_weights_go_along(make):
    old = small(optimizer=make())
    old.fit(X, Y, verbose=0, batch_size=10)
    new = incremental.grow(old, 5)
    for before, after in zip(old.optimizer.variables, new.optimizer.variables, strict=True):
        known = tuple(slice(0, size) for size in before.shape)
        assert np.array_equal(before.numpy(), after.numpy()[known]), before.path
    assert int(new.optimizer.iterations) == int(old.optimizer.iterations) > 0
    inner = getattr(new.optimizer, "inner_optimizer", new.optimizer)
    if inner.use_ema:  # else the new columns would be averaged with zeros
        average = next(v for v in inner.variables if "head" in v.path and "kernel_average" in v.path)
        assert np.array_equal(average.numpy()[:, 3:], new.get_layer("head").kernel.numpy()[:, 3:])
    new.fit(X, Y + 2, verbose=0)
    assert np.isfinite(new.get_weights()[0]).all()


def test_what_is_left_out_of_weight_decay_stays_so():
    old = small(optimizer=keras.optimizers.AdamW(0.0, weight_decay=0.5))
    old.optimizer.learning_rate = 0.1
    old.optimizer.exclude_from_weight_decay(var_list=[old.layers[0].kernel])
    old.fit(X, Y, batch_size=20, verbose=0)
    new = incremental.grow(old, 4)
    zeros = [np.zeros(v.shape, "float32") for v in new.trainable_variables]
    for v in new.optimizer.variables:
        if v.path.endswith(("momentum", "velocity")):
            v.assign(np.zeros(v.shape))
    before = [v.numpy() for v in new.trainable_variables]
    new.optimizer.apply(zeros, new.trainable_variables)
    moved = [not np.array_equal(b, v.numpy()) for b, v in zip(before, new.trainable_variables, strict=True)]
    assert moved[0] is False and moved[2] is True


def test_frozen_layers_and_random_draws_go_along():
    old = small()
    old.layers[0].trainable = False
    old.fit(X, Y, batch_size=20, verbose=0)
    new = incremental.grow(old, 4)
    assert [v.trainable for v in new.weights] == [v.trainable for v in old.weights]
    assert np.array_equal(old.layers[1].seed_generator.state, new.layers[1].seed_generator.state)


def test_what_cannot_grow_is_refused():
    with pytest.raises(tfgpu.InputError, match="more than the 3 of head"):
        incremental.grow(small(), 3)
    einsum = keras.Sequential([keras.Input((4, 2)), keras.layers.EinsumDense("abc,cd->abd", (None, 5))])
    convolution = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Conv2D(3, 4)])
    for model in (einsum, convolution):
        with pytest.raises(tfgpu.InputError, match="must be a Dense layer"):
            incremental.grow(model, 9)
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(2, name=name)(inputs) for name in ("a", "b")]
    several = keras.Model(inputs, outputs)
    with pytest.raises(tfgpu.InputError, match="head=NAME"):
        incremental.grow(several, 3)
    assert [tuple(o.shape) for o in incremental.grow(several, 3, head="b").outputs] == [(None, 2), (None, 3)]

    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(tfgpu.InputError, match="Sequential or functional"):
        incremental.grow(Own(), 3)

"""The second run equals the first: masks, state, training, dtype, losses; and nothing but the input is kept for it."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.errors import InputError
from tfgpu.parallel.rematerialization.remat import remat

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
Y = np.arange(6) % 3


@pytest.fixture(autouse=True)
def mended():
    tfgpu.repair_keras()


def gradients(layer, call, *inputs, training=True):
    """What comes of one step: the output, the gradients of inputs and weights, and the state afterward."""
    inputs = [tf.constant(value) for value in inputs]
    with tf.GradientTape() as tape:
        tape.watch([value for value in inputs if value.dtype.is_floating])
        out = call(*inputs, training=training)
        loss = tf.add_n([tf.reduce_sum(tf.cast(out, "float32") ** 2), *layer.losses])
    sources = [value for value in inputs if value.dtype.is_floating] + [v.value for v in layer.trainable_variables]
    return [out, *tape.gradient(loss, sources), *(v.value for v in layer.non_trainable_variables)]


def same(made, *inputs, **call):
    """Compares a plain and a recomputed step of two equal layers; returns what the step came to."""
    found = []
    for wrap in (lambda layer: layer, remat):
        keras.utils.set_random_seed(0)
        layer = made()
        layer(*(tf.constant(value) for value in inputs))
        found.append(gradients(layer, wrap(layer), *inputs, **call))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert np.array_equal(tf.convert_to_tensor(a), tf.convert_to_tensor(b))
    return found[1]


def block(**dense):
    return keras.Sequential(
        [keras.layers.Dense(4, "tanh", **dense), keras.layers.BatchNormalization(), keras.layers.Dropout(0.4)]
    )


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_batch_normalization(training):
    *_, mean, variance, seed = same(block, X, training=training)
    assert int(seed[1]) == int(training)  # the mask was drawn once
    assert bool(np.any(mean != 0)) == training


def test_losses_that_a_layer_adds_have_their_gradient():
    with_loss = same(lambda: block(activity_regularizer="l2"), X)
    without = same(block, X)
    assert not np.array_equal(with_loss[2], without[2])


def test_mixed_precision_within_a_call():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        out, *_ = same(block, X)
    finally:
        keras.config.set_dtype_policy("float32")
    assert out.dtype == tf.bfloat16


def test_a_layer_of_whole_numbers_and_a_mask():
    def made():
        embedding = keras.layers.Embedding(5, 3, mask_zero=True)
        return keras.Sequential([embedding, keras.layers.LSTM(2, dropout=0.3)])

    same(made, np.array([[1, 2, 0], [4, 0, 0]]))
    embedding, lstm = keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.LSTM(2)
    x = remat(embedding)(tf.constant([[1, 2, 0], [4, 0, 0]]))
    shorter = embedding(tf.constant([[1, 2]]))
    assert np.allclose(remat(lstm)(x)[0], lstm(shorter)[0], atol=1e-6)  # the mask came out, and went in


def test_several_inputs_and_outputs_within_one_another():
    class Pair(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = keras.layers.Dense(4), keras.layers.Dropout(0.5)

        def call(self, x, scale=1.0):
            first, count = remat(lambda v: (self.drop(self.inner(v)), tf.shape(v)[0]))(x)
            return first * scale + tf.cast(count, first.dtype)

    same(Pair, X)


def test_state_of_its_own_that_the_output_depends_on():
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(), initializer="ones", trainable=False)
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            self.seen.assign_add(1.0)
            y = x * self.scale / self.seen
            self.seen.assign(self.seen * 2.0)
            return y

    assert float(same(Counting, X)[-1]) == 10.0  # ((1 + 1) * 2 + 1) * 2: a call that builds it, and one step


def test_a_stateless_call_has_gradients_for_what_it_was_given():
    layer = block()
    layer.build((None, 4))
    given = [tf.identity(v.value) for v in layer.trainable_variables]
    kept = [tf.identity(v.value) for v in layer.non_trainable_variables]
    outer = tfgpu.models.Recompute(layer)
    outer.build((None, 4))
    found = []
    for each in (layer, outer):
        with tf.GradientTape() as tape:
            tape.watch(given)
            out, state = each.stateless_call(given, kept, X, training=True)
            loss = tf.reduce_sum(out**2)
        found.append([*tape.gradient(loss, given), *state])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert all(np.array_equal(v, k) for v, k in zip(layer.non_trainable_variables, kept, strict=True))


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(InputError, match="dense tensors of floats. Received: RaggedTensor"):
        remat(lambda x: x)(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    dense = keras.layers.Dense(2, activity_regularizer="l2")
    with pytest.raises(InputError, match="adds a loss but belongs to no layer"):
        remat(lambda x: dense(x))(X)

    class Fickle(keras.layers.Layer):
        times = 0

        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.times += 1
            if self.times > 1:
                self.count.assign_add(1.0)
            return x * 2.0

    fickle = Fickle()
    fickle.build((None, 4))
    with tf.GradientTape() as tape:
        tape.watch(x := tf.constant(X))
        y = remat(fickle)(x)
    with pytest.raises(InputError, match="in its second run, but not in its first"):
        tape.gradient(y, x)


def fit(scope, **compiled):
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.4)])
        model.add(keras.layers.BatchNormalization())
        model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    model.fit(X, X, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [v.numpy() for v in model.variables]


def test_keras_s_own_scope_in_fit():
    """Stock Keras fails: `training=True` is an argument by name."""
    plain = fit(tf.name_scope("plain"))
    for a, b in zip(plain, fit(keras.RematScope("full")), strict=True):
        assert np.abs(np.float64(a) - np.float64(b)).max() <= 1e-6


def train_step(recompute: bool, *between, blocks=4):
    """A step of a model of blocks of three layers: the gradients."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((8,))
    for _ in range(blocks):
        each = keras.Sequential([keras.layers.Dense(8, "tanh") for _ in range(3)] + [make() for make in between])
        x = (tfgpu.models.Recompute(each) if recompute else each)(x)
    model = keras.Model(inputs, x)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2, name="the_loss")
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return step


def kept(step) -> int:
    """Batch-sized tensors that the forward pass makes and the backward pass reads."""
    graph = tf.function(step).get_concrete_function(tf.TensorSpec((16, 8))).graph
    loss = next(op for op in graph.get_operations() if op.name.endswith("the_loss"))
    forward, waiting = set(), [loss]
    while waiting:
        op = waiting.pop()
        if op not in forward:
            forward.add(op)
            waiting += [tensor.op for tensor in op.inputs]
    tensors = [tensor for op in forward - {loss} for tensor in op.outputs if tensor.shape == (16, 8)]
    sources = {of_identity(tensor) for tensor in tensors if {*tensor.consumers()} - forward}
    return len(sources)


def of_identity(tensor):
    """The tensor that was handed on under other names: one piece of memory."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.op.outputs.index(tensor)]
    return tensor.name


def test_only_the_inputs_of_blocks_are_kept():
    assert kept(train_step(False)) == 1 + 12  # the input and every layer's tanh
    assert kept(train_step(True)) == 1 + 4  # the input and every block's output


@pytest.mark.slow
def test_xla_recomputes_too():
    found = []
    for recompute in (False, True):
        step = train_step(recompute, lambda: keras.layers.Dropout(0.5), keras.layers.BatchNormalization, blocks=2)
        compiled = tf.function(step, jit_compile=True)
        found.append(compiled(tf.ones((16, 8))))
    text = compiled.experimental_get_compiler_ir(tf.ones((16, 8)))(stage="optimized_hlo")
    assert len(re.findall(r" tanh\(", text)) == 12  # 6 layers, twice
    for a, b in zip(*found, strict=True):
        assert np.abs(a - b).max() <= 1e-6


class DrawsGlobally(keras.layers.Layer):
    """Draws from Keras's global seed generator."""

    def call(self, x):
        return keras.random.dropout(x, 0.5)


def test_a_global_generator_must_exist_before():
    x = tf.ones((64,))
    keras.utils.set_random_seed(3)  # and forgets the generator
    with pytest.raises(InputError, match=r"draw once before the training \(`keras.random.uniform\(\(1,\)\)`\)"):
        remat(DrawsGlobally())(x)
    keras.utils.set_random_seed(3)
    keras.random.uniform((1,))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = remat(DrawsGlobally())(x)
    assert bool(tf.reduce_all(tape.gradient(y, x) == y))  # the same mask in both runs
    keras.utils.set_random_seed(3)
    keras.random.uniform((1,))
    np.testing.assert_array_equal(y, DrawsGlobally()(tf.ones((64,))))


class Recomputed(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(4)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=None):
        return keras.remat(lambda x: self.dense(self.norm(x, training=training)))(x)


@pytest.mark.slow
def test_no_weight_is_updated_before_the_second_run_has_read_it():
    """The loop that `fit` compiles on one device, where no collective parts the gradients from the updates."""
    strategy = tfgpu.strategy("one_device")
    x = np.random.default_rng(0).normal(3, 2, (26, 6, 4)).astype("float32")
    found = []
    for run in range(4):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.Input((6, 4)), Recomputed(), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False, run_eagerly=run == 0)
        model.fit(x, x.sum((1, 2))[:, None] / 10, batch_size=26, verbose=0)
        found.append(model.get_weights())
    for weights in found[1:]:
        for expected, ours in zip(found[0], weights, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-3)

"""Layers written by hand that look at several rows: two and four replicas are one device; others send nothing."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfgpu
from tfgpu import InputError

X = np.random.default_rng(1).normal(size=(22, 5)).astype("float32")
Y = X[:, :1]


class Seen(layers.Layer):
    """Counts the rows that it has seen."""

    def build(self, shape):
        self.n = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.n.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x / (1.0 + self.n)


class Balance(layers.Layer):
    """A router with the penalty of a mixture of experts."""

    def build(self, shape):
        self.gates = self.add_weight(shape=(shape[-1], 3), name="gates")

    def call(self, x):
        probabilities = ops.softmax(x @ self.gates)
        fractions = ops.mean(ops.one_hot(ops.argmax(probabilities, -1), 3), 0)
        self.add_loss(0.1 * ops.sum(fractions * ops.mean(probabilities, 0)))
        return probabilities


class Queue(layers.Layer):
    """Compares rows with those of earlier batches."""

    def build(self, shape):
        self.queue = self.add_weight(shape=(4, shape[-1]), initializer="zeros", trainable=False)

    def call(self, x):
        found = ops.matmul(x, ops.transpose(self.queue))
        self.queue.assign(ops.concatenate([x, self.queue], 0)[:4])
        return ops.concatenate([x, found], -1)


class Largest(layers.Layer):
    def build(self, shape):
        self.most = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x):
        self.most.assign(ops.maximum(self.most, ops.max(ops.abs(x), 0)))
        return x / (1e-3 + self.most)


class PlainVariable(layers.Layer):
    def __init__(self):
        super().__init__()
        self.sum = tf.Variable(0.0, trainable=False)

    def call(self, x):
        self.sum.assign_add(tf.reduce_sum(x))
        return x + 0.01 * self.sum


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Contrast(layers.Layer):
    """A row's likeness to all rows, in a tf.function."""

    @tf.function
    def call(self, x):
        return x + 0.1 * tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


class OwnNorm(layers.Layer):
    """A batch normalization as people write it."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if not training:
            return x - self.mean
        mean = ops.mean(x, 0)
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return (x - mean) / ops.sqrt(ops.var(x, 0) + 1e-3)


class Keeping(layers.Layer):
    """Leaves all rows' distances from their center in an attribute, and uses it in a penalty."""

    def call(self, x):
        self.kept = x - ops.mean(x, 0)
        self.add_loss(0.1 * ops.mean(ops.square(self.kept)))
        return x


class Totals(layers.Layer):
    """A metric within a layer that looks at all rows."""

    def __init__(self):
        super().__init__()
        self.spread = keras.metrics.Mean(name="spread")

    def call(self, x):
        self.spread.update_state(ops.max(x) - ops.min(x))
        return x - ops.mean(x, 0)


class Normed(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=False):
        return self.norm(x, training=training)


class Halves(Normed):
    """Normalizes each half of the batch by itself, as ghost batch normalization does."""

    def call(self, x, training=False):
        half = ops.shape(x)[0] // 2
        return ops.concatenate([self.norm(part, training=training) for part in (x[:half], x[half:])], 0)


MIXING = Seen, Balance, Queue, Largest, PlainVariable, Penalty, Contrast, OwnNorm, Keeping, Totals, Halves


class Subclassed(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.first, self.own, self.last = layers.Dense(4), kind(), layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.own(self.first(x)))


def functional(kind):
    return keras.Sequential([keras.Input((5,)), layers.Dense(4), kind(), layers.Dense(1)])


def trained(strategy, make, data=X, *, batch=8, rows=22, **how):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **how)
    take = lambda count: keras.tree.map_structure(lambda each: each[:count], data)  # noqa: E731
    settings = {"batch_size": batch, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(take(rows), Y[:rows], validation_data=(take(9), Y[:9]), **settings)
    return model, history.history


def check(make, data=X, *, replicas=(2, 4), close=3e-6, **how):
    """Batches of 8, 8 and 6 rows; of the last, four replicas have 2, 2, 1 and 1."""
    one, expected = trained(tfgpu.strategy("one_device", devices=["CPU:0"]), make, data, **how)
    for count in replicas:
        model, found = trained(tfgpu.strategy("mirrored", devices=count), make, data, **how)
        for a, b in zip(one.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(b, a, atol=close, rtol=close)
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=10 * close, abs=10 * close), (count, name)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXING, ids=lambda kind: kind.__name__)
def test_replicas_are_one_device(kind):
    check(lambda: functional(kind), replicas=(4,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXING, ids=lambda kind: kind.__name__)
def test_replicas_are_one_device_in_a_model_of_ones_own(kind):
    check(lambda: Subclassed(kind), replicas=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}], ids=str)
def test_ways_of_running(how):
    check(lambda: functional(OwnNorm), replicas=(2,), close=2e-5, **how)


@pytest.mark.slow
def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        check(lambda: functional(OwnNorm), replicas=(2,), close=0.05)
    finally:
        keras.config.set_dtype_policy("float32")


@tfgpu.by_rows
class Counts(layers.Layer):
    """Counts and sums by rows, and a running mean: what a row that stands in must not move."""

    def build(self, shape):
        total = {"initializer": "zeros", "trainable": False, "aggregation": "sum"}
        self.n, self.total = self.add_weight(shape=(), **total), self.add_weight(shape=(shape[-1],), **total)
        self.most = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.n.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.total.assign_add(ops.sum(x, 0))
            self.most.assign(0.9 * self.most + 0.1 * ops.mean(x, 0))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counts, Seen, Queue, Largest, PlainVariable, OwnNorm], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("rows", "batch", "replicas"), [(9, 8, 4), (7, 3, 4), (1, 8, 2)])
def test_rows_that_stand_in(kind, rows, batch, replicas):
    """Batches of fewer rows than replicas: the others compute a row that stands in, which no state counts."""
    model = check(lambda: functional(kind), replicas=(replicas,), batch=batch, rows=rows)
    if kind in (Counts, Seen):
        assert float(model.layers[1].n) == 2 * rows


class Block(layers.Layer):
    """What transformers are made of, with a normalization of its own."""

    def __init__(self):
        super().__init__()
        self.attend, self.dense = layers.MultiHeadAttention(2, 4), layers.Dense(4, "gelu")
        self.drop = layers.Dropout(0.3, seed=3)

    def build(self, shape):
        self.attend.build(shape, shape)
        self.dense.build(shape)
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x, training=False):
        x = x + self.drop(self.attend(x, x, use_causal_mask=True), training=training)
        x = self.dense(x)
        return self.scale * x * ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + 1e-3)


class Places(layers.Layer):
    """Adds a table over positions, and counts its calls."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(ops.mean(ops.square(x)))
        return x + self.table


class Moving(layers.Layer):
    """A running mean of rows' means, and a sum by `aggregation`: rules that hold by rows."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
        self.rows.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return x


class Cell(layers.Layer):
    state_size = 3

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1] + 3, 3), name="kernel")

    def call(self, x, states):
        out = ops.tanh(ops.concatenate([x, states[0]], -1) @ self.kernel)
        return out, [out]


class Named(layers.Layer):
    """Takes inputs by name, one of them whole numbers."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 4)

    def build(self, shape):
        self.table.build()

    def call(self, inputs):
        return inputs["x"] + self.table(inputs["id"])


def in_sequence(*own):
    wide = [layers.Dense(12), layers.Reshape((3, 4)), *own, layers.Flatten(), layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *wide])


def shared():
    inputs, own = keras.Input((5,)), Places()
    first = layers.Dense(4)(inputs)
    return keras.Model(inputs, layers.Dense(1)(own(ops.tanh(own(first)))))


BY_ROWS = {
    "block": lambda: in_sequence(Block(), Block()),
    "places": lambda: in_sequence(Places()),
    "moving": lambda: functional(Moving),
    "cell": lambda: in_sequence(layers.RNN(Cell(), return_sequences=True)),
    "norm": lambda: functional(Normed),
    "shared": shared,
    "lambda": lambda: functional(lambda: layers.Lambda(lambda x: x * 2)),
    "model": lambda: Subclassed(Moving),
}


@pytest.fixture
def gathered(monkeypatch):
    """The bytes gathered from all replicas while steps were traced."""
    from tfgpu.core.row_mixing import row_sums

    found, stock = [], row_sums.all_rows
    monkeypatch.setattr(row_sums, "all_rows", lambda rows, **how: found.append(rows) or stock(rows, **how))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BY_ROWS))
def test_what_gives_each_row_its_own_number_sends_nothing(name, gathered, caplog):
    check(BY_ROWS[name], replicas=(2,))
    assert not gathered
    assert not [each for each in caplog.records if each.name.startswith("tfgpu.core.row_mixing")]


@pytest.mark.slow
def test_the_gathered_layer_is_the_one_that_mixes_rows(gathered, caplog):
    """The model around it goes on by rows: four numbers a row travel, and not five."""
    check(lambda: Subclassed(OwnNorm), replicas=(2,))
    assert {rows.shape[-1] for rows in gathered} == {4}
    (told,) = [each.getMessage() for each in caplog.records if each.name == "tfgpu.core.row_mixing.own_layers"]
    assert "'own_norm" in told and "(OwnNorm)" in told and "128 bytes a step" in told


@pytest.mark.slow
def test_inputs_by_name():
    inputs = {"x": keras.Input((4,), name="x"), "id": keras.Input((), dtype="int32", name="id")}
    data = {"x": X[:, :4], "id": (np.arange(22) % 6).astype("int32")}
    check(lambda: keras.Model(inputs, layers.Dense(1)(Named()(inputs))), data, replicas=(2,))


@pytest.mark.slow
def test_equal_layers_are_tried_once(monkeypatch):
    from tfgpu.core.row_mixing.trials.layer_trial import LayerTrial

    class Fresh(Block):
        pass

    tried, stock = [], LayerTrial.run
    monkeypatch.setattr(LayerTrial, "run", lambda self: tried.append(self) or stock(self))
    with tfgpu.strategy("mirrored", devices=2).scope():
        model = in_sequence(Fresh(), Fresh(), Fresh())
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert len(tried) == 1


def test_a_trial_leaves_no_trace():
    class Traced(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = [], 0
            self.seeds, self.plain = keras.random.SeedGenerator(3), tf.Variable(0.0, trainable=False)

        def call(self, x):
            if tf.executing_eagerly():
                self.calls.append(1)
                self.seen += 1
                self.plain.assign_add(1.0)
                self.kept = x
            return x + 0.0 * keras.random.uniform(ops.shape(x), seed=self.seeds)

    with tfgpu.strategy("mirrored", devices=2).scope():
        model = functional(Traced)
        model.compile("sgd", "mse")
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    own = model.layers[1]
    assert not own.calls and not own.seen and not hasattr(own, "kept") and float(own.plain.values[0]) == 0.0


class NotOnDrawn(layers.Layer):
    """Works in a graph alone, so that no trial can run it."""

    def call(self, x):
        if tf.executing_eagerly() and not isinstance(x, keras.KerasTensor):
            raise RuntimeError("only in a graph")
        return x - ops.mean(x, 0)


@pytest.mark.slow
def test_what_cannot_be_tried_is_gathered(caplog):
    check(lambda: functional(NotOnDrawn), replicas=(2,))
    assert "could not be tried (RuntimeError" in caplog.text


@pytest.mark.slow
def test_what_cannot_be_tried_is_refused_or_warned_about(caplog, gathered):
    with pytest.raises(InputError, match=r"'not_on_drawn.*by_rows"):
        trained(tfgpu.strategy("mirrored", devices=2, unproven="refuse"), lambda: functional(NotOnDrawn))
    with caplog.at_level(logging.WARNING):
        trained(tfgpu.strategy("mirrored", devices=2, unproven="warn"), lambda: functional(NotOnDrawn))
    assert "each replica computes it from its own rows" in caplog.text and not gathered


class FromSparse(layers.Layer):
    """A dense layer of sparse rows, as people write it."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(5, 4), name="kernel")

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        return tf.sparse.sparse_dense_matmul(x, kernel) if isinstance(x, tf.SparseTensor) else x @ kernel


@pytest.mark.slow
def test_sparse_rows_are_computed_by_rows_and_warned_about(caplog, monkeypatch):
    def trained_on(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((5,), sparse=True)
            model = keras.Model(inputs, layers.Dense(1)(FromSparse()(inputs)))
            model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(tf.sparse.from_dense(X), Y, batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    expected = trained_on(tfgpu.strategy("one_device", devices=["CPU:0"]))
    for a, b in zip(expected, trained_on(tfgpu.strategy("mirrored", devices=2)), strict=True):
        np.testing.assert_allclose(b, a, atol=3e-6)
    assert "could not be tried (its inputs are ragged or sparse" in caplog.text and "from its own rows" in caplog.text
    monkeypatch.setattr("tfgpu.core.row_mixing.choices.of", lambda thing: "on_all_rows")
    with pytest.raises(InputError, match=r"'from_sparse.*strings, ragged or sparse"):
        trained_on(tfgpu.strategy("mirrored", devices=2))


@pytest.mark.slow
def test_marks_settle_it(gathered, monkeypatch):
    from tfgpu.core.row_mixing.trials.layer_trial import LayerTrial

    monkeypatch.delattr(LayerTrial, "run")

    @tfgpu.by_rows
    class Kept(Penalty):
        pass

    trained(tfgpu.strategy("mirrored", devices=2), lambda: functional(Kept))
    assert not gathered
    check(lambda: functional(lambda: tfgpu.on_all_rows(OwnNorm())), replicas=(2,))
    assert gathered


def test_a_layer_that_mixes_rows_in_a_loop_is_refused():
    class Looped(keras.Model):
        def __init__(self):
            super().__init__()
            self.own, self.last = tfgpu.on_all_rows(OwnNorm()), layers.Dense(1)

        def build(self, shape):
            self.own.build(shape)
            self.last.build(shape)

        def call(self, x, training=False):
            _, x = tf.while_loop(lambda n, x: n < 2, lambda n, x: (n + 1, self.own(x, training=False)), (0, x))
            return self.last(x)

    with pytest.raises(InputError, match=r"'own_norm.*a loop"):
        trained(tfgpu.strategy("mirrored", devices=2), Looped)


@pytest.mark.slow
class Likeness(layers.Layer):
    """A softmax over the cosines of rows, at a low temperature: of rows that differ, each is like itself alone."""

    def call(self, x):
        unit = tf.math.l2_normalize(x, -1)
        return x + tf.matmul(tf.nn.softmax(tf.matmul(unit, unit, transpose_b=True) / 0.03), x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Contrast, Likeness], ids=lambda kind: kind.__name__)
def test_rows_that_mix_only_if_they_are_small_or_alike(kind):
    check(lambda: keras.Sequential([keras.Input((5,)), layers.Dense(256), kind(), layers.Dense(1)]), replicas=(2,))


@pytest.mark.slow
def test_operations_between_the_layers_of_a_functional_model():
    def make():
        inputs = keras.Input((5,))
        found = layers.Dense(4)(inputs)
        return keras.Model(inputs, layers.Dense(1)(found - ops.mean(found, 0)))

    check(make, replicas=(2,))


@pytest.mark.slow
def test_a_gather_of_ones_own_in_a_layer(gathered):
    class Centered(layers.Layer):
        def call(self, x):
            return x - ops.mean(tfgpu.gather(x), 0)

    check(lambda: functional(Centered), replicas=(2,))
    assert {rows.shape[-1] for rows in gathered} == {4}

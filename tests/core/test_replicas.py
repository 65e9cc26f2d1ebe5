"""Numbers worked out by hand: what replicas with unequal rows must learn and log."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

pytestmark = pytest.mark.sample("4 replicas")


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n} replicas")
def strategy(request):
    tfgpu.repair_keras()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


def line(optimizer, loss="mse", **compiled):
    """y = w x with w = 1: a model of one number."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(optimizer, loss, **compiled)
    return model


X = np.array([[1.0], [2.0], [3.0]], "float32")
Y = np.zeros((3, 1), "float32")


def weight(model):
    return model.get_weights()[0].item()


def test_three_rows_are_one_mean(strategy):
    # d/dw mean((w x)^2) = 2 mean(x^2) w = 2 * 14/3; one step of 0.03 leaves 1 - 0.28.
    with strategy.scope():
        model = line(keras.optimizers.SGD(0.03))
    history = model.fit(X, Y, batch_size=3, shuffle=False, verbose=0).history
    assert weight(model) == pytest.approx(1 - 0.03 * 28 / 3, abs=1e-6)
    assert history["loss"] == pytest.approx([14 / 3], abs=1e-6)


def test_one_row_on_many_replicas(strategy):
    with strategy.scope():
        model = line(keras.optimizers.SGD(0.1))
    model.fit(X[1:2], Y[1:2], batch_size=4, verbose=0)
    assert weight(model) == pytest.approx(1 - 0.1 * 8, abs=1e-6)  # 2 x^2 = 8


def test_clipping_sees_the_whole_gradient(strategy):
    with strategy.scope():
        model = line(keras.optimizers.SGD(1.0, global_clipnorm=0.25))
    model.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
    assert weight(model) == pytest.approx(0.75, abs=1e-6)  # the gradient, 28/3, is cut to 0.25


def test_accumulation_averages_the_batches(strategy):
    # Batches (1, 2) and (3): gradients 2 * 5/2 = 5 and 2 * 9 = 18; their mean is 11.5.
    with strategy.scope():
        model = line(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2))
    model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    assert weight(model) == pytest.approx(1 - 0.115, abs=1e-6)


def test_weights_of_a_weighted_mean_are_summed_over_replicas(strategy):
    # (1*1 + 4*0 + 9*3) / (1 + 0 + 3) = 7; the gradient is 2 * 7.
    with strategy.scope():
        model = line(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError("mean_with_sample_weight"))
    model.fit(X, Y, sample_weight=np.array([1.0, 0.0, 3.0], "float32"), batch_size=3, shuffle=False, verbose=0)
    assert weight(model) == pytest.approx(1 - 0.14, abs=1e-6)


def test_a_sum_stays_a_sum(strategy):
    with strategy.scope():
        model = line(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError("sum"))
    model.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
    assert weight(model) == pytest.approx(1 - 0.28, abs=1e-6)  # 2 * 14


def test_rows_of_an_embedding_that_no_replica_saw_stay(strategy):
    # Words 1, 1 and 3, targets 0: d/de mean(e[w]^2) is 2 * 2/3 for word 1 and 2 * 1/3 for word 3.
    with strategy.scope():
        table = keras.layers.Embedding(5, 1, embeddings_initializer="ones")
        model = keras.Sequential([keras.Input((), dtype="int32"), table])
        model.compile(keras.optimizers.SGD(0.3), "mse")
    model.fit(np.array([1, 1, 3]), Y, batch_size=3, shuffle=False, verbose=0)
    assert table.get_weights()[0].ravel().tolist() == pytest.approx([1, 1 - 0.4, 1, 1 - 0.2, 1], abs=1e-6)


def test_two_tapes_and_two_optimizers_each_average_once(strategy):
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            self.b = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

        def build(self, shape):
            self.a.build(shape)
            self.b.build(shape)

        def compile(self, other):
            super().compile(keras.optimizers.SGD(0.01))
            self.other = other

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape(persistent=True) as tape:
                first = self.optimizer.scale_loss(tf.reduce_mean(self.a(x) ** 2))
                second = tf.reduce_mean(self.b(x) ** 2)
            self.optimizer.apply(tape.gradient(first, self.a.trainable_variables), self.a.trainable_variables)
            self.other.apply(tape.gradient(second, self.b.trainable_variables), self.b.trainable_variables)
            return {"first": first, "second": second}

        def call(self, x):
            return self.a(x) + self.b(x)

    with strategy.scope():
        model = Two()
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(0.03))
    logs = model.fit(X, Y, batch_size=3, shuffle=False, verbose=0).history
    a, b = (value.item() for value in model.get_weights())
    assert (a, b) == (pytest.approx(1 - 0.01 * 28 / 3, abs=1e-6), pytest.approx(1 - 0.03 * 28 / 3, abs=1e-6))
    assert logs["first"] == logs["second"] == pytest.approx([14 / 3], abs=1e-5)


def test_an_overflow_on_the_last_replica_skips_the_step_on_all(strategy):
    with strategy.scope():
        inner = keras.optimizers.SGD(0.01)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        model = line(optimizer)
    x = np.ones((8, 1), "float32")
    x[-1] = np.inf
    model.fit(x, np.zeros((8, 1), "float32"), batch_size=8, shuffle=False, verbose=0)
    scales = {float(v) for v in strategy.experimental_local_results(optimizer.dynamic_scale.value)}
    assert (weight(model), scales, int(inner.iterations.numpy())) == (1.0, {4.0}, 0)
    model.fit(np.ones((8, 1), "float32"), np.zeros((8, 1), "float32"), batch_size=8, verbose=0)
    assert weight(model) == pytest.approx(1 - 0.01 * 2, abs=1e-6)


def test_batch_norm_takes_the_mean_of_all_rows(strategy):
    with strategy.scope():
        norm = keras.layers.BatchNormalization(momentum=0.0)
        model = keras.Sequential([keras.Input((1,)), norm])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
    assert norm.moving_mean.numpy() == pytest.approx([2.0], abs=1e-6)
    assert norm.moving_variance.numpy() == pytest.approx([2 / 3], abs=1e-6)


def test_state_of_a_metric_is_put_together_as_its_variables_say(strategy):
    class Counts(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="counts")
            self.rows = self.add_variable((), "zeros", dtype="int64", name="rows")
            self.steps = self.add_variable((), "zeros", name="steps", aggregation="only_first_replica")
            self.one = self.add_variable((), "zeros", name="one", aggregation="mean")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(tf.shape(y_true, out_type=tf.int64)[0])
            self.steps.assign_add(1.0)
            self.one.assign(1.0)

        def result(self):
            return {"rows": self.rows, "steps": self.steps, "one": self.one}

    with strategy.scope():
        model = line("sgd", metrics=[Counts()])
    logs = model.evaluate(np.ones((9, 1)), np.ones((9, 1)), batch_size=4, return_dict=True, verbose=0)
    assert (logs["rows"], logs["steps"]) == (9, 3)


def test_predict_on_batch_gives_each_row_once_and_in_order(strategy):
    with strategy.scope():
        model = line("sgd")
    assert model.predict_on_batch(X).ravel().tolist() == [1.0, 2.0, 3.0]


def test_a_second_strategy_in_the_process_is_a_fresh_one():
    tfgpu.repair_keras()
    for width in (3, 5, 7):  # stock TensorFlow meets the first one's shapes under the same key
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        total = tf.function(
            lambda strategy=strategy, width=width: strategy.run(
                lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([width]))
            )
        )()
        assert strategy.experimental_local_results(total)[1].numpy().tolist() == [2.0] * width


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [("Conv1D", "MaxPooling1D", "Conv1D"), ("Conv2D", "AveragePooling2D", "Conv2DTranspose")]
)
def test_replicas_without_rows_in_a_loop_of_one_s_own(kinds):
    # Two rows on four replicas. Without rows TensorFlow's pooling ends the process, and its convolutions fail.
    tfgpu.repair_keras()
    rank = int(kinds[0][-2])
    x = np.random.default_rng(0).normal(size=(2, *[9] * rank, 2)).astype("float32")
    found = {}
    for name, strategy in (
        ("one", tf.distribute.get_strategy()),
        ("four", tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])),
    ):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            first, pool, last = (getattr(keras.layers, kind) for kind in kinds)
            model = keras.Sequential([keras.Input(x.shape[1:]), first(4, 3, activation="relu"), pool(2), last(3, 3)])
            optimizer = keras.optimizers.Nadam(0.1)  # not built: its variables are made inside the first step

        def step(batch, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(batch, training=True))) / 2
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        train = tf.function(lambda batch, strategy=strategy, step=step: strategy.run(step, args=(batch,)))
        for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(x).repeat(3)):
            train(batch)
        found[name] = model.get_weights()
    assert all(np.abs(a - b).max() <= 1e-5 for a, b in zip(found["one"], found["four"], strict=True))


@pytest.mark.slow
def test_a_layer_that_was_made_outside_the_scope_is_refused(strategy):
    outside = keras.layers.Dense(2)
    outside.build((None, 1))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), outside, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(tfgpu.InputError, match="'dense.*kernel' was made outside `strategy.scope()"):
        model.fit(X, Y, verbose=0)
    outside.trainable = False
    with strategy.scope():
        model.compile("sgd", "mse")
    before = outside.get_weights()
    model.fit(X, Y, verbose=0)
    assert all((a == b).all() for a, b in zip(before, outside.get_weights(), strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_optimizer_that_was_made_outside_the_scope_is_refused_in_a_loop(strategy, name):
    # Stock Keras counts one step a replica with SGD, so that schedules run ahead, and cannot build Adam.
    outside = getattr(keras.optimizers, name)(0.1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    def step():
        outside.apply_gradients([(tf.ones_like(v), v) for v in model.trainable_variables])

    with pytest.raises(tfgpu.InputError, match=r"iteration' was made outside `strategy\.scope"):
        strategy.run(step)

"""Numbers worked out by hand: losses that mix the rows of a batch, and the state that layers keep."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.compat import keras as private
from tfgpu.core import step_context
from tfgpu.core.step_context import RowRange, Step


@pytest.fixture
def strategy():
    """Four replicas: three rows leave one without any."""
    tfgpu.repair_keras()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])


X = np.array([[0.2], [0.4], [0.8]], "float32")
Y = np.array([[1.0], [0.0], [1.0]], "float32")


class Line(keras.Model):
    """y = w x with w = 1, trained by Keras's step or by one written by hand."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.by_hand = by_hand
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        if not self.by_hand:
            return super().train_step(data)
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"now": loss}


def trained(strategy, loss, *, x=X, y=Y, weights=None, by_hand=False, rate=0.1):
    """Weight and logged loss after one step on all rows."""
    with strategy.scope():
        model = Line(by_hand)
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(rate), loss)
    logs = model.fit(x, y, sample_weight=weights, batch_size=len(x), shuffle=False, verbose=0).history
    return model.get_weights()[0].item(), logs["now" if by_hand else "loss"][0]


# Dice of w x: with both = 1.0 w, true = 2 and found = 1.4 w, 1 - 2 w / (2 + 1.4 w) is 1 - 2/3.4 at w = 1,
# and its slope there is -(2 * 3.4 - 2 * 1.4) / 3.4^2 = -4 / 11.56.
DICE, SLOPE = 1 - 2 / 3.4, -4 / 11.56


CASES = [("dice", False), (keras.losses.Dice(), True), (keras.losses.Tversky(0.5, 0.5), False)]


@pytest.mark.sample("dice")
@pytest.mark.parametrize("loss, by_hand", CASES, ids=["dice", "by-hand", "tversky"])
def test_dice_of_three_rows_is_one_dice(strategy, loss, by_hand):
    weight, logged = trained(strategy, loss, by_hand=by_hand)
    assert logged == pytest.approx(DICE, abs=1e-6)
    assert weight == pytest.approx(1 - 0.1 * SLOPE, abs=1e-6)


@pytest.mark.slow
def test_a_dice_inside_a_custom_loss(strategy):
    weight, logged = trained(strategy, lambda y, p: 2 * keras.losses.dice(y, p))
    assert (weight, logged) == (pytest.approx(1 - 0.2 * SLOPE, abs=1e-6), pytest.approx(2 * DICE, abs=1e-6))


@pytest.mark.slow
def test_the_weights_of_a_dice_are_averaged(strategy):
    weights = np.array([1.0, 0.0, 5.0], "float32")  # one device multiplies the one number by each weight: by 2
    assert trained(strategy, keras.losses.Dice(), weights=weights)[1] == pytest.approx(2 * DICE, abs=1e-6)


@pytest.mark.slow
def test_a_dice_of_each_row_stays_with_its_row(strategy):
    rows = 1 - 2 * X * Y / (X + Y)
    assert trained(strategy, keras.losses.Dice(axis=-1))[1] == pytest.approx(rows.mean().item(), abs=1e-6)


@pytest.mark.slow
def test_circle_compares_every_row_with_every_other(strategy):
    labels = np.array([0, 1, 0, 1, 0])
    x = np.array([[0.9], [0.7], [0.5], [-0.3], [-0.8]], "float32")
    loss = keras.losses.Circle(gamma=2)
    with tf.GradientTape() as tape:
        w = tf.Variable(1.0)
        expected = loss(labels, w * x)
    slope = tape.gradient(expected, w).numpy()
    weight, logged = trained(strategy, loss, x=x, y=labels)
    assert logged == pytest.approx(float(expected), abs=1e-6)
    assert weight == pytest.approx(1 - 0.1 * slope, abs=1e-6)


@pytest.mark.slow
def test_circle_with_several_rows_per_example(strategy):
    def loss(y, p):
        return keras.losses.circle(tf.repeat(y, 2), tf.reshape(tf.stack([p, -p], 1), [-1, 1]), gamma=2)

    labels = np.array([0, 1, 0])
    expected = loss(tf.constant(labels), tf.constant(X))
    assert trained(strategy, loss, y=labels)[1] == pytest.approx(float(tf.reduce_mean(expected)), abs=1e-6)


class State(keras.layers.Layer):
    """One variable of each kind that the rule names."""

    def build(self, shape):
        def number(**options):
            return self.add_weight(shape=(), initializer="zeros", trainable=False, **options)

        self.mean, self.steps, self.halves = number(), number(dtype="int32"), number()
        self.count, self.sum = number(dtype="int64", aggregation="sum"), number(aggregation="sum")
        self.first, self.whole = number(aggregation="only_first_replica"), number(dtype="int32")
        self.kept = keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")
        self.local = number()

    def call(self, x):
        self.mean.assign(0.5 * self.mean + keras.ops.mean(x))
        self.steps.assign_add(1)
        self.halves.assign_add(0.1)
        self.count.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        self.sum.assign(keras.ops.sum(x))
        self.sum.assign_sub(keras.ops.sum(x) / 2)
        self.first.assign(keras.ops.sum(x[:1]))
        self.whole.assign(keras.ops.cast(10 * keras.ops.sum(x[:1]), "int32"))
        self.kept.assign_add(keras.ops.sum(x))
        tf.cond(keras.ops.sum(x) > -1, lambda: self.local.assign(1.0), lambda: self.local.assign(2.0))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_layer_s_own_state_is_one_device_s(strategy, eager):
    with strategy.scope():
        state = State()
        model = keras.Sequential([keras.Input((1,)), state, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=eager)
    model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)

    def on_all(variable):
        copies = strategy.experimental_local_results(variable.value)
        assert len({float(copy) for copy in copies}) == 1, "the replicas disagree"
        return float(copies[0])

    mean = X.mean()
    assert on_all(state.mean) == pytest.approx(1.5 * mean, abs=1e-6)
    assert (on_all(state.steps), on_all(state.count), on_all(state.local)) == (2, 6, 1)
    assert on_all(state.halves) == np.float32(0.1) + np.float32(0.1)
    assert on_all(state.sum) == pytest.approx(0.7, abs=1e-6)
    assert (on_all(state.first), on_all(state.whole)) == (pytest.approx(0.2), 2)
    assert state.kept.numpy() == pytest.approx(2 * X.sum(), abs=1e-6)


def test_a_running_sum_takes_the_sum_of_the_batch(strategy):
    from tfgpu.core.row_mixing import row_sums

    class Running(keras.layers.Layer):
        def build(self, shape):
            self.total = self.add_weight(shape=(), initializer="ones", trainable=False)

        def call(self, x):
            self.total.assign(0.5 * self.total + row_sums.of_batch(keras.ops.sum(x)))
            return x

    with strategy.scope():
        layer = Running()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=3, verbose=0)
    assert layer.total.numpy() == pytest.approx(0.5 + 1.4, abs=1e-6)


@pytest.mark.slow
def test_equal_values_stay_as_they_are_to_the_bit(strategy):
    class Odd(keras.layers.Layer):
        def build(self, shape):
            self.odd = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

        def call(self, x):
            self.odd.assign(tf.constant([0.1, 1 / 3, 16777215.0]) + 0 * tf.reduce_sum(x))
            return x

    with strategy.scope():
        layer = Odd()
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=3, verbose=0)
    assert layer.odd.numpy().tolist() == np.array([0.1, 1 / 3, 16777215.0], "float32").tolist()


def test_no_needless_collectives(monkeypatch):
    from tfgpu.core import collectives

    tfgpu.repair_keras()
    made = []
    stock = collectives.all_reduce

    def counted(values, **how):
        made.append(len(values))
        return stock(values, **how)

    monkeypatch.setattr(collectives, "all_reduce", counted)

    class Copies(keras.layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=shape[1:], initializer="ones")
            self.copy = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.copy.assign(0.9 * self.copy + 0.1 * self.weight)
            self.steps.assign_add(1.0)
            return x * self.weight

    def collectives(*layers):
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = keras.Sequential([keras.Input((1,)), *layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        made.clear()
        model.fit(X, Y, batch_size=3, verbose=0)
        return len(made)

    assert collectives(Copies()) == collectives()


def by_own_loop(strategy, loss, data, *, wrap=lambda call: call, eager=False):
    """Slope at w = 1 and loss, both summed over replicas, of one step by `strategy.run` that trusts the loss's mean."""
    with strategy.scope():
        w = tf.Variable(1.0)

    def step(x, y, *weights):
        with tf.GradientTape() as tape:
            value = wrap(loss)(y, w * x, *weights)
        return tape.gradient(value, w), value

    def both(batch):
        return [strategy.reduce("SUM", part, axis=None) for part in strategy.run(step, args=batch)]

    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data).batch(3))))
    return [float(part) for part in (both if eager else tf.function(both))(batch)]


# Squares of x - y: 0.64, 0.16, 0.04; their slopes 2 (x - y) x: -0.32, 0.32, -0.32.
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_hand_written_loop_may_trust_the_mean_of_a_loss(strategy, eager):
    slope, value = by_own_loop(strategy, keras.losses.MeanSquaredError(), (X, Y), eager=eager)
    assert (slope, value) == (pytest.approx(-0.32 / 3, abs=1e-6), pytest.approx(0.84 / 3, abs=1e-6))


def test_a_hand_written_loop_divides_by_all_weights(strategy):
    weights = np.array([[1.0], [0.0], [5.0]], "float32")
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    slope, value = by_own_loop(strategy, loss, (X, Y, weights[:, 0]))
    assert (slope, value) == (pytest.approx(-0.32, abs=1e-6), pytest.approx(0.84 / 6, abs=1e-6))
    slope, value = by_own_loop(strategy, keras.losses.MeanSquaredError(reduction="sum"), (X, Y, weights[:, 0]))
    assert (slope, value) == (pytest.approx(-1.92, abs=1e-6), pytest.approx(0.84, abs=1e-6))


def test_a_hand_written_loop_counts_what_no_mask_hides(strategy):
    def masked(y, prediction):
        private.set_mask(prediction, y[..., 0] > 0)
        return keras.losses.MeanSquaredError()(y, prediction)

    rows = np.stack([np.concatenate([X, X]), np.concatenate([Y, Y])], 1)  # pairs of steps; the second row is hidden
    x, y = rows[:, 0].reshape(3, 2, 1), rows[:, 1].reshape(3, 2, 1)
    slope, value = by_own_loop(strategy, masked, (x, y))
    kept = y > 0
    assert value == pytest.approx(((x - y) ** 2)[kept].mean(), abs=1e-6)
    assert slope == pytest.approx((2 * (x - y) * x)[kept].mean(), abs=1e-6)


@pytest.mark.parametrize("form", ["cond", "function"])
def test_a_loss_in_a_condition_or_a_function_knows_its_share_of_the_rows(strategy, form):
    def wrap(call):
        if form == "function":
            return tf.function(call)
        return lambda y, prediction: tf.cond(tf.reduce_sum(y) > -1, lambda: call(y, prediction), lambda: 0.0)

    _, value = by_own_loop(strategy, keras.losses.MeanSquaredError(), (X, Y), wrap=wrap)
    assert value == pytest.approx(0.84 / 3, abs=1e-6)


@pytest.mark.parametrize(("knows", "count"), [(False, 8.0), (True, 1.0)])
def test_a_number_of_rows_that_only_the_trace_knows_is_no_weight(strategy, knows, count):
    """Keras weights the logged loss of each output by `x.shape[0]`: the rows, or None on one device."""
    with strategy.scope():
        metric = keras.metrics.Mean()

    def update():
        rows = RowRange(*map(tf.constant, (2, 0, 8)))
        with step_context.scope(step=Step(rows, tf.constant(0.25), has_added_shapes=knows)):
            metric.update_state(tf.constant(3.0), sample_weight=2)

    tf.function(lambda: strategy.run(update))()
    assert float(metric.count) == count and float(metric.result()) == 3.0


def test_a_replica_without_rows_adds_what_keras_takes_for_a_bias(strategy):
    """Three rows on four replicas: on the last, [0, 1, 2] has no axis but the last that is longer than 1."""
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones((int(context.replica_id_in_sync_group < 3), 5, 2))
    )
    step = tf.function(lambda x: strategy.run(lambda x: tf.reduce_sum(keras.ops.add(x, x[:, :1])), (x,)))
    assert float(strategy.reduce("SUM", step(rows), axis=None)) == 60.0

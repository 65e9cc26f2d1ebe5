"""Metrics and whole losses written by hand: two and four replicas have one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu import InputError
from tfgpu.core.row_mixing.trials.loss_trial import LossTrial, Needs

X = np.random.default_rng(1).normal(size=(22, 5)).astype("float32")
Y = (X[:, :1] + X[:, 1:2] > 0).astype("float32")


class Own(keras.metrics.Metric):
    def __init__(self, initial="zeros", name=None):
        super().__init__(name=name or type(self).__name__)
        self.kept = self.add_variable((), initial, name="kept")

    def result(self):
        return self.kept


class Perplexity(Own):
    """Sums the losses of the rows by a loss of Keras's."""

    def __init__(self):
        super().__init__()
        self.loss = keras.losses.BinaryCrossentropy(reduction="sum")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign_add(self.loss(y_true, y_pred, sample_weight))
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self):
        return ops.exp(self.kept / self.count)


class WeightedMean(Own):
    """Adds the means that a loss of Keras's gives for batches."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        self.kept.assign_add(loss(y_true, y_pred, 1.0 + y_true[:, 0]))


class Largest(Own):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(ops.maximum(self.kept, ops.max(ops.abs(y_pred - y_true))))


class LargestOfOne(Largest):
    """Begins at another number than 0, which `reset_state` puts back."""

    def __init__(self):
        super().__init__("ones")

    def reset_state(self):
        self.kept.assign(1.0)


class Latest(Own):
    """The last batch's."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign(ops.mean(ops.square(y_pred - y_true)))


class Ratio(Own):
    """A ratio that is kept as such."""

    def __init__(self):
        super().__init__()
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)
        self.kept.assign(self.kept + (ops.mean(y_pred) - self.kept) / self.count)


class Right(Own):
    """A plain sum over rows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept.assign_add(ops.sum(ops.cast(ops.equal(y_true, ops.round(y_pred)), "float32")))


class OfMean(keras.metrics.Mean):
    """A mean of Keras's over numbers of rows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.mean(ops.square(y_true - y_pred), -1), sample_weight)


class Supervised(keras.losses.Loss):
    """A contrastive loss that reduces by itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), "float32")
        likeness = ops.exp(-ops.square(y_pred - ops.transpose(y_pred)))
        losses = -ops.log(ops.sum(likeness * same, 1) / ops.sum(likeness, 1))
        return ops.mean(losses if sample_weight is None else losses * sample_weight)


class Reduced(keras.losses.Loss):
    """A mean over rows that reduces by itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred))


def trained(strategy, loss=lambda: "mse", metrics=(), weights=None, **how):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss(), metrics=[each() for each in metrics], **how)
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, sample_weight=weights, validation_data=(X[:9], Y[:9]), **settings)
    return model, history.history


def check(*, replicas=(2, 4), close=3e-6, **how):
    """Batches of 8, 8 and 6 rows; of the last, four replicas have 2, 2, 1 and 1."""
    one, expected = trained(tfgpu.strategy("one_device", devices=["CPU:0"]), **how)
    for count in replicas:
        model, found = trained(tfgpu.strategy("mirrored", devices=count), **how)
        for a, b in zip(one.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(b, a, atol=close, rtol=close)
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=10 * close, abs=10 * close), (count, name)


@pytest.fixture
def gathered(monkeypatch):
    """The tensors gathered from all replicas while steps were traced."""
    from tfgpu.core.row_mixing import row_sums

    found, stock = [], row_sums.all_rows
    monkeypatch.setattr(row_sums, "all_rows", lambda rows, **how: found.append(rows) or stock(rows, **how))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WeightedMean, Largest, LargestOfOne, Latest, Ratio], ids=lambda kind: kind.__name__)
def test_metrics_that_keep_no_sum(kind):
    check(metrics=(kind,))


@pytest.mark.slow
def test_metrics_that_keep_sums_send_nothing(gathered):
    check(metrics=(Perplexity, Right, OfMean))
    assert not gathered


@pytest.mark.slow
def test_metrics_in_eager_mode():
    check(metrics=(Perplexity, Largest, Ratio), run_eagerly=True)


@pytest.mark.slow
def test_metrics_of_a_step_of_ones_own():
    """Batches with fewer rows than replicas, too."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.most = keras.layers.Dense(1), Largest()

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            self.most.update_state(y, self(x))
            return {"most": self.most.result()}

    found = []
    for strategy in (tfgpu.strategy("one_device", devices=["CPU:0"]), tfgpu.strategy("mirrored", devices=4)):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = Model()
            model.compile("sgd")
        found.append(model.fit(X[:11], Y[:11], batch_size=3, shuffle=False, verbose=0).history["most"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [keras.metrics.RootMeanSquaredError, keras.metrics.AUC, Largest])
def test_metrics_that_the_model_does_not_track(make):
    class Model(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            outside.update_state(data[1], self(data[0]))
            return logs | {"outside": outside.result()}

    found = []
    for strategy in (tfgpu.strategy("one_device", devices=["CPU:0"]), tfgpu.strategy("mirrored", devices=4)):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            outside, model = make(), Model([keras.layers.Dense(1, "sigmoid")])
            model.compile("sgd", "mse")
        found.append(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["outside"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.slow
def test_a_metric_that_cannot_be_tried():
    class Fussy(Largest):
        def update_state(self, y_true, y_pred, sample_weight=None):
            import tensorflow as tf

            if tf.executing_eagerly():
                raise RuntimeError("only in a graph")
            super().update_state(y_true, y_pred)

    check(metrics=(Fussy,), replicas=(2,))
    with pytest.raises(InputError, match=r"The metric 'Fussy'.*only in a graph"):
        trained(tfgpu.strategy("mirrored", devices=2, unproven="refuse"), metrics=(Fussy,))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "rows"])
def test_a_loss_that_reduces_by_itself(weights):
    rows = np.random.default_rng(3).uniform(0.2, 2.0, len(X)).astype("float32")
    check(loss=Supervised, weights=None if weights is None else rows)


@pytest.mark.slow
def test_a_loss_that_reduces_by_itself_to_a_mean_sends_nothing(gathered):
    check(loss=Reduced, replicas=(2,))
    assert not gathered


class Remembers(keras.losses.Loss):
    """Keeps a running sum of errors, which weighs the next batch: by rows but for what it keeps."""

    def __init__(self):
        super().__init__()
        self.kept = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        errors = ops.mean(ops.square(y_true - y_pred), -1)
        weight = self.kept + 0.0
        self.kept.assign(0.5 * self.kept + ops.sum(ops.stop_gradient(errors)))
        return weight * errors


@pytest.mark.slow
def test_a_loss_that_keeps_a_sum():
    check(loss=Remembers, replicas=(2,))


@pytest.mark.slow
def test_a_loss_that_was_made_before_the_repairs(monkeypatch):
    """Its class is held when the model is compiled."""
    loss = Supervised()
    check(loss=lambda: loss, replicas=(2,))


@pytest.mark.slow
def test_marks_settle_it(gathered, monkeypatch):
    from tfgpu.core.row_mixing.own_metrics import MetricTrial

    monkeypatch.delattr(LossTrial, "run")
    monkeypatch.delattr(MetricTrial, "run")
    marks = {"loss": lambda: tfgpu.by_rows(Supervised()), "metrics": (lambda: tfgpu.by_rows(Largest()),)}
    trained(tfgpu.strategy("mirrored", devices=2), **marks)
    assert not gathered
    marks = {"loss": lambda: tfgpu.on_all_rows(Supervised()), "metrics": (lambda: tfgpu.on_all_rows(Largest()),)}
    check(replicas=(2,), **marks)
    squares = tfgpu.on_all_rows(lambda y, p: ops.mean(ops.square(y - p), -1) + ops.mean(p))
    check(loss=lambda: squares, replicas=(2,))


class Outliers(keras.losses.Loss):
    """Compares rows where errors are larger than those of any ordinary drawn rows."""

    def call(self, y_true, y_pred):
        errors = ops.mean(ops.abs(y_true - y_pred), -1)
        far = ops.cast(errors > 50.0, "float32")
        return errors / (1.0 + ops.sum(far))


class Capped(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.minimum(ops.mean(ops.abs(y_true - y_pred), -1), 50.0)


@pytest.mark.parametrize(("kind", "needs"), [(Outliers, Needs.ALL_GIVES_ROWS), (Capped, Needs.ITS_ROWS)])
def test_a_loss_is_tried_with_large_numbers(kind, needs):
    loss, rows = kind(), (tf.zeros((4, 2)), tf.zeros((4, 2)))
    assert LossTrial(loss.call, rows, loss).run() is needs

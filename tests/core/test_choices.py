"""What the user declares about code that reads rows, and manually gathered rows."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import InputError
from tfgpu.core.row_mixing import choices

X = np.random.default_rng(1).normal(size=(11, 3)).astype("float32")


class Own(keras.layers.Layer):
    pass


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_true - y_pred


def test_a_mark_is_found_through_what_calls_the_function():
    marked = tfgpu.by_rows(lambda y, p: y - p)
    found = (
        marked,
        functools.partial(marked),
        functools.partial(functools.partial(marked)),
        tf.function(marked),
        type(keras.losses.MeanSquaredError()).__mro__[1](marked),
        keras.metrics.MeanMetricWrapper(marked),
        tfgpu.by_rows(OwnLoss().call),
        tfgpu.by_rows(max),
    )
    assert [choices.of(each) for each in found] == ["by_rows"] * len(found)
    assert choices.of(lambda y, p: y - p) is None and choices.of(max) is None and choices.of(OwnLoss.call) is None


def test_a_class_applies_to_subclasses_and_an_instance_to_itself():
    class Marked(Own):
        pass

    class Below(Marked):
        pass

    assert tfgpu.on_all_rows(Marked) is Marked
    one = tfgpu.by_rows(Below())
    assert [choices.of(each) for each in (Marked, Below(), one, Own(), Own)] == [
        "on_all_rows",
        "on_all_rows",
        "by_rows",
        None,
        None,
    ]
    outer = Own()
    outer.fn = one  # a part's mark is the part's
    assert choices.of(outer) is None
    assert choices.of(tfgpu.on_all_rows(OwnLoss())) == "on_all_rows" and choices.of(OwnLoss()) is None


def test_what_cannot_be_called_is_refused():
    with pytest.raises(InputError, match=r"`tfgpu.by_rows` takes a function.*'mse'"):
        tfgpu.by_rows("mse")


def test_the_way_of_a_strategy():
    assert choices.unproven() == "gather"
    for made in (tfgpu.strategy("one_device", unproven="warn"), tfgpu.strategy("mirrored", 2, unproven="warn")):
        with made.scope():
            assert choices.unproven() == "warn"
    with tfgpu.strategy("mirrored", 2).scope():
        assert choices.unproven() == "gather"
    for kind in ("one_device", "mirrored"):
        with pytest.raises(InputError, match="unproven"):
            tfgpu.strategy(kind, unproven="no")
    with pytest.raises(InputError, match="does not apply"):
        tfgpu.strategy("averaging", 2, unproven="warn")


def similar(x, all_of_them):
    """A number of the whole batch: every row with every other."""
    return tf.reduce_sum(tf.tanh(tf.matmul(x, all_of_them, transpose_b=True)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_gathered_rows_in_a_loop_have_one_devices_gradient(rows):
    strategy = tfgpu.strategy("mirrored", 2)
    with strategy.scope():
        weight = tf.Variable(np.full((3, 2), 0.5, "float32"))

    def loss_of(x):
        found = tf.matmul(x, weight)
        return similar(found, tfgpu.gather(found))

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        return tf.distribute.get_replica_context().all_reduce("SUM", [loss, tape.gradient(loss, weight)])

    data = tf.data.Dataset.from_tensor_slices(X[:rows]).batch(rows)
    (batch,) = strategy.experimental_distribute_dataset(data)
    found = [strategy.experimental_local_results(each)[0] for each in tf.function(strategy.run)(step, args=(batch,))]
    with tf.GradientTape() as tape:
        loss = loss_of(tf.constant(X[:rows]))
    whole = loss, tape.gradient(loss, weight)
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_gathering_where_replicas_cannot_meet_is_refused():
    strategy = tfgpu.strategy("mirrored", 2)
    for function in (lambda: tfgpu.gather(tf.ones(3)), lambda: tfgpu.gather(tf.ones(()))):
        with pytest.raises(InputError, match=r"tfgpu.gather"):
            strategy.run(function)

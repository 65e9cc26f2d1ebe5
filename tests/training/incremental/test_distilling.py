"""The distillation loss by hand, and distilled models in `fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.training import incremental

X = np.array([[1.0, 2.0], [0.0, -1.0]], "float32")


def linear(kernel, activation=None):
    layer = keras.layers.Dense(len(kernel[0]), activation, use_bias=False)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.set_weights([np.array(kernel, "float32")])
    return model


def softmax(logits):
    e = np.exp(logits)
    return e / e.sum(-1, keepdims=True)


TEACHER, MODEL = [[0.5, -1.0], [1.0, 0.3]], [[0.2, 0.4, 9.0], [-0.5, 1.0, -9.0]]


@pytest.mark.parametrize("activation", [None, "softmax"])
def test_the_term_by_hand(activation):
    old = softmax(X @ np.array(TEACHER) / 3.0)
    new = softmax((X @ np.array(MODEL))[:, :2] / 3.0)  # behind a softmax too: the third class cancels out
    expected = (old * np.log(old / new)).sum(-1)
    model = incremental.Distilled(linear(MODEL, activation), linear(TEACHER, activation), weight=0.5, temperature=3.0)
    assert np.allclose(model.distances(model.teacher(X), model(X)), expected, atol=2e-3 if activation else 1e-6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None)
    model.compile(keras.optimizers.SGD(0.0), loss)
    y = np.array([0, 1])
    plain = float(loss(y, model(X)))
    history = model.fit(X, y, validation_data=(X, y), verbose=0).history
    assert history["distillation"][0] == pytest.approx(expected.mean(), rel=1e-2 if activation else 1e-5)
    assert history["loss"][0] == pytest.approx(plain + 0.5 * 9 * expected.mean(), rel=1e-3 if activation else 1e-5)
    assert history["val_loss"][0] == pytest.approx(plain, rel=1e-5)


def test_the_teacher_stays_and_is_no_part_of_the_model(tmp_path):
    teacher, student = linear(TEACHER), linear(MODEL)
    model = incremental.Distilled(student, teacher)
    assert model.weights == student.weights and model.trainable_weights == student.trainable_weights
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = student.get_weights()[0]
    model.fit(X, np.array([2, 2]), verbose=0)
    assert np.array_equal(teacher.get_weights()[0], np.array(TEACHER, "float32"))
    assert not np.array_equal(student.get_weights()[0], before)
    with pytest.raises(tfgpu.InputError, match="distilled.model.save"):
        model.save(tmp_path / "model.keras")


def test_what_does_not_fit_is_refused():
    with pytest.raises(tfgpu.InputError, match="has 2 classes, its teacher 3"):
        incremental.Distilled(linear(TEACHER), linear(MODEL))
    with pytest.raises(tfgpu.InputError, match="`temperature`"):
        incremental.Distilled(linear(MODEL), linear(TEACHER), temperature=0)
    same = linear(TEACHER)
    with pytest.raises(tfgpu.InputError, match="shares weights"):
        incremental.Distilled(same, same)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        spread = linear(MODEL)
    with pytest.raises(tfgpu.InputError, match="under the model's strategy"):
        incremental.Distilled(spread, linear(TEACHER))


STEPS = np.array([[[1, 2], [0, -1], [0, 0]], [[2, 1], [0, 0], [0, 0]], [[1, 1], [3, 0], [1, -2]]], "float32")
SEEN = STEPS.any(-1)


def reading(kernel):
    """A model with an output per step; steps of zeros are padding."""
    layers = [keras.layers.Masking(0.0), keras.layers.Dense(2, use_bias=False)]
    model = keras.Sequential([keras.Input((3, 2)), *layers])
    model.set_weights([np.array(kernel, "float32")])
    return model


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_padding_does_not_count(strategy):
    """Two replicas have two rows and one, with three steps each."""
    new = np.array([[0.2, 0.4], [-0.5, 1.0]])
    old, said = softmax(STEPS @ np.array(TEACHER) / 2.0), softmax(STEPS @ new / 2.0)
    expected = (old * np.log(old / said)).sum(-1)[SEEN].mean()
    labels = np.zeros((3, 3), int)
    plain = -np.log(softmax(STEPS @ new)[..., 0])[SEEN].mean()
    with tfgpu.strategy(strategy, devices=2 if strategy == "mirrored" else None).scope():
        model = incremental.Distilled(reading(new), reading(TEACHER), weight=0.5)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(STEPS, labels, batch_size=3, verbose=0).history
    assert history["distillation"][0] == pytest.approx(expected, rel=1e-5)
    assert history["loss"][0] == pytest.approx(plain + 0.5 * 4 * expected, rel=1e-5)
    # d KL / d logits = (q - p) / T, and T^2 comes before it; of the loss itself: q - label.
    logits = (softmax(STEPS @ new) - np.eye(2)[labels]) + 0.5 * 2 * (said - old)
    gradient = np.einsum("bti,btk->ik", STEPS[:, :, :] * SEEN[..., None], logits) / SEEN.sum()
    assert np.allclose(model.get_weights()[0], new - 0.1 * gradient, atol=1e-6)


def test_a_loop_written_by_hand_gets_its_share():
    """Summed over replicas, as a hand-written loop sums gradients, the loss is that of one device."""
    batch, labels = np.concatenate([X, X[:1] * 2]), np.array([0, 1, 2])

    def made():
        model = incremental.Distilled(linear(MODEL), linear(TEACHER))
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    one = made()
    whole = float(one.compute_loss(batch, labels, one(batch)))
    with (strategy := tfgpu.strategy("mirrored", devices=2)).scope():
        model = made()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((batch, labels)).batch(3))

    @tf.function
    def losses(rows):
        return strategy.run(lambda x, y: model.compute_loss(x, y, model(x, training=True)), args=rows)

    (rows,) = data
    assert float(strategy.reduce("SUM", losses(rows), axis=None)) == pytest.approx(whole, rel=1e-5)

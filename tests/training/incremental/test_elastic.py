"""The Fisher information by hand, penalties of several tasks, and penalties on grown models."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.training import incremental
from tfgpu.training.incremental.elastic import fisher


def linear(kernel, activation=None):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(len(kernel[0]), activation, use_bias=False, name="head")
    model = keras.Sequential([keras.Input((len(kernel),)), layer])
    model.set_weights([np.array(kernel, "float32")])
    return model


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("activation", [pytest.param(None, marks=pytest.mark.slow), "softmax"])
def test_the_diagonal_of_a_softmax_regression_by_hand(activation):
    """The gradient of log p_c by the kernel is x (one_hot_c - p); F is the mean over rows of the expected square."""
    kernel = [[0.3, -0.2, 0.1], [0.5, 0.4, -0.7]]
    x = np.array([[1.0, 2.0], [-1.0, 0.5], [0.3, 0.0]], "float32")
    y = np.array([0, 2, 1])
    p = softmax(x @ np.array(kernel))
    model = linear(kernel, activation)
    exact = np.mean([np.outer(r**2, q * (1 - q)) for r, q in zip(x, p, strict=True)], 0)
    ((_, found),) = fisher(model, x, y)
    assert np.allclose(found, exact, rtol=1e-4, atol=1e-7)
    observed = np.mean([np.outer(r, np.eye(3)[c] - q) ** 2 for r, q, c in zip(x, p, y, strict=True)], 0)
    ((_, found),) = fisher(model, x, y, labels="observed")
    assert np.allclose(found, observed, rtol=1e-4, atol=1e-7)
    data = tf.data.Dataset.from_tensor_slices((x, keras.ops.one_hot(y, 3))).batch(2)
    ((_, by_data),) = fisher(model, data, labels="observed", examples=3)
    assert np.allclose(by_data, observed, rtol=1e-4, atol=1e-7)
    ((_, of_two),) = fisher(model, x, y, examples=2)
    assert np.allclose(
        of_two, np.mean([np.outer(r**2, q * (1 - q)) for r, q in zip(x[:2], p, strict=False)], 0), rtol=1e-4
    )


@pytest.mark.slow
def test_the_penalty_of_several_tasks_is_the_sum_of_theirs():
    model, x = linear([[0.0, 0.0]]), np.array([[1.0], [2.0]], "float32")
    elastic = incremental.ElasticWeights(3.0)
    anchors, found = [], []
    for kernel in ([[0.5, -0.5]], [[1.0, 0.2]], [[-0.3, 0.8]]):
        model.set_weights([np.array(kernel, "float32")])
        found.append(fisher(model, x, np.array([0, 1]))[0][1])
        anchors.append(np.array(kernel))
        elastic.add(model, x, np.array([0, 1]))
    now = np.array([[0.4, 0.1]])
    model.set_weights([now.astype("float32")])
    expected = sum(3.0 / 2 * (f * (now - a) ** 2).sum() for f, a in zip(found, anchors, strict=True))
    assert float(elastic.penalty(model)) == pytest.approx(expected, rel=1e-5)
    assert [float(loss) for loss in model.losses] == [pytest.approx(expected, rel=1e-5)]
    elastic.detach(model)
    assert model.losses == [] and float(elastic.penalty(model)) == 0


def test_the_online_form_decays():
    model, x, y = linear([[0.5, -0.5]]), np.array([[1.0]], "float32"), np.array([0])
    elastic = incremental.ElasticWeights(2.0, decay=0.5).add(model, x, y)
    first = fisher(model, x, y)[0][1]
    model.set_weights([np.array([[1.0, 0.0]], "float32")])
    second = fisher(model, x, y)[0][1]
    elastic.add(model, x, y)
    assert float(elastic.penalty(model)) == 0
    model.set_weights([np.array([[2.0, 0.0]], "float32")])
    assert float(elastic.penalty(model)) == pytest.approx(float((0.5 * first + second)[0, 0]), rel=1e-5)


def test_stays_beside_a_regularizer_and_goes_along_when_the_head_grows(tmp_path):
    inputs = keras.Input((2,))
    model = keras.Model(
        inputs, keras.layers.Dense(2, name="head", kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
    )
    x, y = np.ones((4, 2), "float32"), np.array([0, 1, 0, 1])
    elastic = incremental.ElasticWeights(4.0).add(model, x, y)
    elastic.save(tmp_path / "elastic.safetensors")
    again = incremental.ElasticWeights(4.0).load(tmp_path / "elastic.safetensors")
    assert again.tasks == 1
    grown = incremental.grow(model, 3)
    again.attach(grown)
    kernel, bias = grown.get_weights()
    l2 = 0.1 * float((kernel**2).sum())
    assert sum(float(v) for v in grown.losses) == pytest.approx(l2, rel=1e-5)
    kernel[:, 2] += 5.0  # new columns are free
    kernel[0, 0] += 1.0
    grown.set_weights([kernel, bias])
    information = fisher(model, x, y)[0][1]
    assert float(again.penalty(grown)) == pytest.approx(2.0 * information[0, 0], rel=1e-4)
    again.detach(grown)
    assert sum(float(v) for v in grown.losses) == pytest.approx(0.1 * float((kernel**2).sum()), rel=1e-5)


def test_a_model_that_has_trained_already_sees_it():
    """Keras's traced step would not include a penalty that was added later."""
    model = linear([[0.5, -0.5]])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((8, 1), "float32"), np.zeros(8, "int64")
    model.fit(x, y, verbose=0)
    elastic = incremental.ElasticWeights(20.0).add(model, x, y)
    anchor = model.get_weights()[0].astype("float64")
    model.fit(x, y, verbose=0, epochs=3)
    # By hand: the rows are equal, so their gradient is p - (1, 0), and the information is p (1 - p) at the anchor.
    information = softmax(anchor) * (1 - softmax(anchor))
    weights = anchor.copy()
    for _ in range(3):
        weights -= 0.1 * (softmax(weights) - [[1.0, 0.0]] + 20.0 * information * (weights - anchor))
    assert np.allclose(model.get_weights()[0], weights, rtol=1e-5)
    expected = 20.0 / 2 * (information * (weights - anchor) ** 2).sum()
    assert float(elastic.penalty(model)) == pytest.approx(expected, rel=1e-3)


def test_invalid_input_is_named():
    for settings in ({"strength": -1}, {"strength": 1, "decay": 2}, {"strength": 1, "labels": "exact"}):
        with pytest.raises(tfgpu.InputError):
            incremental.ElasticWeights(**settings)
    elastic = incremental.ElasticWeights(1.0).add(linear([[1.0, 2.0]]), np.ones((1, 1), "float32"), np.array([0]))
    other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, name="another")])
    with pytest.raises(tfgpu.InputError, match="names differ"):
        elastic.attach(other)
    with pytest.raises(tfgpu.InputError, match="no rows"):
        elastic.add(linear([[1.0, 2.0]]), np.ones((0, 1), "float32"), np.array([], "int64"))

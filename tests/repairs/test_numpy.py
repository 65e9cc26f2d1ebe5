"""No tensor of a batch's size goes from a GPU to the host in Keras's metrics and losses, by TensorFlow's kernels."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import repairs
from tfgpu.compat import targets
from tfgpu.repairs import probing

ROWS, TIME, CLASSES = 64, 7, 10

REQUIRED = {  # arguments that a class asks for
    "num_classes": CLASSES,
    "target_class_ids": [0, 1],
    "sensitivity": 0.5,
    "specificity": 0.5,
    "recall": 0.5,
    "precision": 0.5,
    "normalizer": [1.0] * CLASSES,
}
NOT_TRIED = {"Metric", "Loss", "MeanMetricWrapper", "Mean", "Sum", "CTC"}  # CTC's gradient is TensorFlow's own
OF_CLASSES = {"MeanIoU", "IoU"}  # take predicted classes, not scores


@pytest.fixture(autouse=True)
def repaired():
    repairs.repair_keras()


def classes(module, base):
    found = {name: each for name, each in vars(module).items() if inspect.isclass(each) and issubclass(each, base)}
    unique = {each.__name__: each for name, each in found.items() if name not in NOT_TRIED}
    return [unique[name] for name in sorted(unique)]


def made(cls):
    parameters = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in REQUIRED.items() if name in parameters and needs(parameters[name])})


def needs(parameter):
    return parameter.default is inspect.Parameter.empty


def inputs(cls, *, rows, sequences, labels):
    """The specs of labels and predictions that a metric or loss takes."""
    scores = (rows, TIME, CLASSES) if sequences else (rows, CLASSES)
    if cls.__name__ in OF_CLASSES:
        return [tf.TensorSpec([rows], labels), tf.TensorSpec([rows], tf.int64)]
    if cls.__name__ == "CategoricalGeneralizedCrossEntropy" or "Sparse" in cls.__name__ or cls.__name__ == "Circle":
        return [tf.TensorSpec(scores[:-1], labels), tf.TensorSpec(scores)]
    return [tf.TensorSpec(scores, labels), tf.TensorSpec(scores)]


def of_batch_size(tensors):
    """Those that are not a handful of numbers, such as a shape."""
    return [
        (tensor.op.type, tensor.dtype.name, tuple(tensor.shape))
        for tensor in tensors
        if None in (tensor.shape.rank, *tensor.shape) or tensor.shape.num_elements() >= ROWS
    ]


@pytest.mark.parametrize("labels", [tf.float32, tf.int32, tf.int64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("cls", classes(keras.metrics, keras.metrics.Metric), ids=lambda cls: cls.__name__)
def test_no_metric_copies_a_batch_to_the_host(cls, labels):
    sequences = [False, True] if "Accuracy" in cls.__name__ else [False]
    for rows, of_time in [(ROWS, sequence) for sequence in sequences] + [(None, sequences[-1])]:
        metric = made(cls)
        specs = inputs(cls, rows=rows, sequences=of_time, labels=labels)
        metric.update_state(*(tf.ones([2 if d is None else d for d in spec.shape], spec.dtype) for spec in specs))
        assert of_batch_size(probing.copied_to_host(metric.update_state, *specs)) == []


@pytest.mark.parametrize("labels", [tf.float32, tf.int32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("cls", classes(keras.losses, keras.losses.Loss), ids=lambda cls: cls.__name__)
def test_no_loss_copies_a_batch_to_the_host(cls, labels):
    loss = made(cls)

    def gradient(y_true, y_pred, weights):
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            value = loss(y_true, y_pred, weights)
        return value, tape.gradient(value, y_pred)

    specs = inputs(cls, rows=ROWS, sequences=False, labels=labels)
    specs.append(tf.TensorSpec([ROWS]))
    assert of_batch_size(probing.copied_to_host(gradient, *specs)) == []


def test_stock_keras_copies_all_logits_to_the_host():
    module = targets.owner("numpy")
    signs = probing.copied_to_host(module.signbit.__wrapped__, tf.TensorSpec([ROWS, CLASSES]))
    assert of_batch_size(signs) == [("BitwiseAnd", "int32", (ROWS, CLASSES))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint8", "bool"])
def test_signs_are_those_of_stock_keras(dtype):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.5, -1.5], "float32")
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, "uint32").view("float32")
    values = tf.cast(np.concatenate([special, bits]), dtype)
    signbit = targets.owner("numpy").signbit
    np.testing.assert_array_equal(signbit(values), signbit.__wrapped__(values))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64", "bool", "float32"])
@pytest.mark.parametrize("how", [{"axis": -1}, {"axis": 2, "keepdims": True}, {"axis": 1}, {}], ids=str)
def test_the_largest_is_that_of_stock_keras(dtype, how):
    argmax = targets.owner("numpy").argmax
    values = tf.cast(np.random.default_rng(0).integers(0, 4, (5, 6, 7)), dtype)
    found, expected = argmax(values, **how), argmax.__wrapped__(values, **how)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype == tf.int32


@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
@pytest.mark.parametrize("other", [3, np.int64(3), 2.5, True, np.array([[3, 4, 2**31 - 1]], "int32"), 2**40])
def test_comparisons_are_those_of_stock_keras(name, other):
    compare = getattr(targets.owner("numpy"), name)
    values = tf.constant([[3, -4, 2**31 - 1], [0, 4, -(2**31)]])
    try:
        expected = compare.__wrapped__(values, other)
    except Exception as error:
        with pytest.raises(type(error)):
            compare(values, other)
        return
    np.testing.assert_array_equal(compare(values, other), expected)


def test_a_size_is_compared_on_the_host():
    def grows(x):
        return keras.ops.greater(tf.shape(x)[0], 3)

    graph = tf.function(grows).get_concrete_function(tf.TensorSpec([None])).graph
    assert [each.inputs[0].dtype for each in graph.get_operations() if each.type == "Greater"] == [tf.int32]


def test_an_own_metric_of_keras_ops_stays_on_the_device():
    def own(y_true, y_pred):
        same = keras.ops.equal(keras.ops.argmax(y_pred, -1), keras.ops.cast(y_true, "int32"))
        return keras.ops.mean(keras.ops.cast(same, "float32"))

    assert probing.copied_to_host(own, tf.TensorSpec([ROWS], tf.int64), tf.TensorSpec([ROWS, CLASSES])) == []

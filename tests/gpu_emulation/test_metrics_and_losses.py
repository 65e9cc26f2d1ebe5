"""No tensor of a batch's size goes from a GPU to the host in Keras's metrics and losses."""

import inspect

import keras
import pytest
import tensorflow as tf
import tracer

from tfgpu import repairs
from tfgpu.compat import targets

ROWS, TIME, CLASSES = 13, 6, 10
GPU = "CPU:1"  # stands for GPU:0

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
OF_NUMBERS = {"CategoricalGeneralizedCrossEntropy", "Circle"}  # take class numbers, and are not called sparse


@pytest.fixture(autouse=True)
def repaired():
    repairs.repair_keras()


def classes(module, base):
    found = {each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, base)}
    return sorted((each for each in found if each.__name__ not in NOT_TRIED), key=lambda each: each.__name__)


def made(cls):
    required = [each.name for each in inspect.signature(cls).parameters.values() if each.default is each.empty]
    with tf.device(GPU):
        return cls(**{name: REQUIRED[name] for name in required if name in REQUIRED})


def specs_of(cls, *, rows, sequences, labels):
    """The labels and predictions that a metric or loss takes."""
    scores = (rows, TIME, CLASSES) if sequences else (rows, CLASSES)
    if cls.__name__ in OF_CLASSES:
        return [tf.TensorSpec([rows], labels), tf.TensorSpec([rows], tf.int64)]
    takes_numbers = "Sparse" in cls.__name__ or cls.__name__ in OF_NUMBERS
    return [tf.TensorSpec(scores[:-1] if takes_numbers else scores, labels), tf.TensorSpec(scores)]


def to_host(function, specs):
    """What a function of tensors on a GPU has copied to the host, but for sizes."""

    def on_gpu(*tensors):
        with tf.device(GPU):
            return function(*tensors)

    traced = tf.function(on_gpu, autograph=False).get_concrete_function(*specs)
    facts = tracer.facts_of(traced, dict.fromkeys(range(len(specs)), GPU), rows=ROWS)
    return [str(copy) for copy in facts.moved("to host", has_rows=True)]


def drawn(specs):
    shapes = [[2 if size is None else size for size in spec.shape] for spec in specs]
    return [tf.ones(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]


@pytest.mark.parametrize("labels", [tf.float32, tf.int32, tf.int64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("cls", classes(keras.metrics, keras.metrics.Metric), ids=lambda cls: cls.__name__)
def test_no_metric_copies_a_batch_to_the_host(cls, labels):
    for rows, sequences in [(ROWS, False)] + ([(ROWS, True)] if "Accuracy" in cls.__name__ else []):
        metric = made(cls)
        specs = specs_of(cls, rows=rows, sequences=sequences, labels=labels)
        with tf.device(GPU):
            metric.update_state(*drawn(specs))  # makes its variables
        assert to_host(metric.update_state, specs) == []


OPTIONS = {
    "AUC": {"multi_label": True, "num_labels": CLASSES},
    "F1Score": {"average": "micro", "threshold": 0.5},
    "OneHotMeanIoU": {"num_classes": CLASSES, "ignore_class": 1},
    "Precision": {"top_k": 2, "class_id": 1},
    "PrecisionAtRecall": {"recall": 0.5, "class_id": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_of_a_metric_copies_a_batch_to_the_host(name):
    with tf.device(GPU):
        metric = getattr(keras.metrics, name)(**OPTIONS[name])
    specs = [tf.TensorSpec([ROWS, CLASSES]), tf.TensorSpec([ROWS, CLASSES]), tf.TensorSpec([ROWS])]
    with tf.device(GPU):
        metric.update_state(*drawn(specs))
    assert to_host(metric.update_state, specs) == []


@pytest.mark.parametrize("labels", [tf.float32, tf.int32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("cls", classes(keras.losses, keras.losses.Loss), ids=lambda cls: cls.__name__)
def test_no_loss_copies_a_batch_to_the_host(cls, labels):
    loss = made(cls)

    def gradient(y_true, y_pred, weights):
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            value = loss(y_true, y_pred, weights)
        return value, tape.gradient(value, y_pred)

    specs = specs_of(cls, rows=ROWS, sequences=False, labels=labels)
    assert to_host(gradient, [*specs, tf.TensorSpec([ROWS])]) == []


def test_an_own_metric_of_keras_ops_stays_on_the_gpu():
    def own(y_true, y_pred):
        same = keras.ops.equal(keras.ops.argmax(y_pred, -1), keras.ops.cast(y_true, "int32"))
        return keras.ops.mean(keras.ops.cast(same, "float32"))

    assert to_host(own, [tf.TensorSpec([ROWS], tf.int64), tf.TensorSpec([ROWS, CLASSES])]) == []


def test_stock_keras_copies_all_logits_to_the_host():
    stock = targets.owner("numpy").signbit.__wrapped__
    assert len(to_host(stock, [tf.TensorSpec([ROWS, CLASSES])])) == 1

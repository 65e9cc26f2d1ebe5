"""Unsuitable input raises an error instead of giving meaningless numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.callbacks import Tasks
from tfgpu.errors import InputError
from tfgpu.training import incremental
from tfgpu.training.incremental.distilling import ends_in
from tfgpu.training.incremental.elastic import fisher

X = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
Y = np.array([0, 1, 1, 0, 2, 2, 1, 0, 0, 0])


def net(units=3, activation=None, name=None):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, "relu", name="body"), keras.layers.Dense(units, activation, name="head")]
    return keras.Sequential([keras.Input((4,)), *layers], name=name)


def after_dense(*layers):
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(3)(inputs)
    for layer in layers:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "layers",
    [
        [keras.ops.softmax],
        [keras.layers.Softmax()],
        [keras.layers.Activation(tf.nn.softmax)],
        [keras.layers.Dense(3, keras.ops.softmax)],
        [keras.layers.Dense(3, "softmax"), keras.layers.Dropout(0.1), keras.layers.Identity(dtype="float32")],
        [keras.layers.Softmax(), keras.layers.Activation("linear", dtype="float32")],
        [keras.Sequential([keras.Input((3,)), keras.layers.Softmax(), keras.layers.Dropout(0.1)])],
    ],
)
def test_a_softmax_is_found_whoever_computes_it(layers):
    """Mistaken for logits, probabilities would go through a second softmax."""
    model = after_dense(*layers)
    assert ends_in(model) == "softmax"
    kernel, bias = model.get_weights()[:2]
    logits = after_dense()
    logits.set_weights([kernel, bias])
    if len(model.weights) == 2:
        for (_, one), (_, other) in zip(fisher(model, X, Y), fisher(logits, X, Y), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_logits_are_logits():
    assert ends_in(after_dense()) == "linear"
    assert ends_in(after_dense(keras.layers.Softmax(), keras.layers.Dense(2))) == "linear"
    assert ends_in(after_dense(keras.layers.Activation(tf.nn.sigmoid))) == "sigmoid"


def test_one_column_has_no_softmax_and_no_accuracy():
    """The Fisher information of a softmax over one class is 0, and so would be every penalty."""
    yes_or_no = net(1, "sigmoid")
    with pytest.raises(InputError, match="also for two classes"):
        incremental.ElasticWeights(1.0).add(yes_or_no, X, Y > 0)
    with pytest.raises(InputError, match="also for two classes"):
        incremental.accuracies(yes_or_no, [(X, Y > 0)])
    with pytest.raises(InputError, match="also for two classes"):
        incremental.Distilled(net(2), net(1))
    with pytest.raises(InputError, match="ends in a sigmoid"):
        incremental.ElasticWeights(1.0).add(net(3, "sigmoid"), X, np.eye(3)[Y])
    with pytest.raises(InputError, match="ends in a sigmoid"):
        incremental.Distilled(net(3, "sigmoid"), net(3, "sigmoid"))


def test_labels_of_any_form_have_the_same_accuracy():
    model = net()
    right = float(np.mean(model(X).numpy().argmax(-1) == Y))
    assert 0 < right < 1 and right != 0.5
    for labels in (Y, Y.tolist(), Y[:, None], np.eye(3)[Y], np.eye(7)[Y]):
        assert incremental.accuracies(model, [(X, labels)]) == [pytest.approx(right)]
    with pytest.raises(InputError, match="Task 1 has no rows"):
        incremental.accuracies(model, [(X, Y), (X[:0], Y[:0])])
    with pytest.raises(InputError, match=r"labels \(4,\) for outputs \(10, 3\)"):
        incremental.accuracies(model, [(X, Y[:4])])
    two = keras.Model(model.inputs, [model.outputs[0], model.outputs[0] * 2])
    with pytest.raises(InputError, match="must have one output. Received: 2"):
        incremental.accuracies(two, [(X, Y)])


def test_the_data_of_a_fisher_information():
    model, elastic = net(), incremental.ElasticWeights(1.0, labels="observed")
    weighted = tf.data.Dataset.from_tensor_slices((X, Y, np.ones(10))).batch(5)
    for data, message in (
        ((X, Y - 1), "from 0 to 2.* Received: -1 to 1"),
        ((X, Y + 7), "Received: 7 to 9"),
        ((X, Y[:4]), "same length"),
        ((X,), "Labels are missing"),
        ((weighted,), "without weights"),
    ):
        with pytest.raises(InputError, match=message):
            elastic.add(model, *data)
    for examples in (0, -3, 2.5, True):
        with pytest.raises(InputError, match="whole number of at least 1"):
            elastic.add(model, X, Y, examples=examples)
    two = keras.Model(model.inputs, [model.outputs[0], model.outputs[0] * 2])
    with pytest.raises(InputError, match=r"one row of classes.*\(1, 3\), \(1, 3\)"):
        elastic.add(two, X, Y)
    assert elastic.tasks == 0 and not model.losses


@pytest.mark.slow
def test_a_distilled_model_stands_for_what_it_trains():
    old = net(name="old")
    grown = incremental.grow(old, 4)
    model = incremental.Distilled(grown, old)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss)
    grown.compile(keras.optimizers.SGD(0.0), loss)
    elastic, other = incremental.ElasticWeights(10.0).add(model, X, Y), incremental.ElasticWeights(10.0)
    assert sorted(elastic.state()["weights"]) == ["body/0", "body/1", "head/0", "head/1"]
    other.add(grown, X, Y)
    for name, (precision, *_) in other.state()["weights"].items():
        np.testing.assert_array_equal(precision, elastic.state()["weights"][name][0])
    model.fit(X, Y, verbose=0)
    assert float(elastic.penalty(grown)) > 0
    held = grown.evaluate(X, Y, verbose=0)
    elastic.detach(model)  # `grown` has traced its step with the penalty, and nobody tells it
    assert grown.evaluate(X, Y, verbose=0) < held - 1e-6
    assert grown.evaluate(X, Y, verbose=0) == pytest.approx(float(loss(Y, grown(X))), abs=1e-6)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (({"b": X}, Y), "one structure.*'b'.*after.*'a'"),
        (({"a": X}, Y, Y), "one structure"),
        (({"a": X}, Y[:6]), "same length"),
        (({"a": X[:, :3]}, Y), r"one shape. Received: \[\(3,\), \(\)\] after \[\(4,\)"),
        (({"a": 1.0}, 2), "same length"),
    ],
)
def test_a_stream_keeps_its_structure(second, message):
    with pytest.raises(InputError, match=message):
        list(incremental.windows([({"a": X}, Y), second], rows=20))


def test_other_odd_arguments():
    model = net()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(InputError, match="initial_epoch"):
        incremental.fit_stream(model, [(X, Y)], window=4, global_batch=2, initial_epoch=1)
    with pytest.raises(InputError, match="dataset of batches. Received: tuple"):
        incremental.Replay(4).add(X, Y).mix((X, Y))
    for then in ("fast", -1.0, float("nan"), True):
        with pytest.raises(InputError, match="`then` must be"):
            incremental.rewarm(model, 3, then)
    with pytest.raises(InputError, match="must be a built Keras model"):
        incremental.discriminative("adam", keras.Sequential([keras.layers.Dense(2, name="a")]), {"a": 0.1})
    with pytest.raises(InputError, match="must be a Keras model"):
        incremental.freeze("model", "a")


class ByClass(keras.metrics.Metric):
    """A metric with one number per class, like F1Score: the number of its labels."""

    def __init__(self):
        super().__init__(name="by_class")
        self.count = self.add_weight(shape=(3,), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.reduce_sum(tf.one_hot(tf.reshape(tf.cast(y_true, tf.int32), [-1]), 3), 0))

    def result(self):
        return keras.ops.convert_to_tensor(self.count)


def test_a_metric_with_a_number_for_each_class(tmp_path):
    model = net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=[ByClass()])
    tasks = Tasks(tmp_path)
    logs = incremental.fit_stream(model, [(X, Y)], window=5, global_batch=5, tasks=tasks, verbose=0)
    assert [one["by_class"] for one in logs] == [[2.0, 2.0, 1.0], [3.0, 1.0, 1.0]]
    again = Tasks(tmp_path)
    model = net()
    model.compile("sgd", loss, metrics=[ByClass()])
    assert again.begin(model) == 2 and again.logs == logs
    for bad in ({"a": "much"}, [1.0], {"a": {"b": 1}}):
        with pytest.raises(InputError, match="must map names to numbers"):
            again.end(model, bad)
    assert again.done == 2


def test_what_is_no_model_file_is_not_taken_up(tmp_path):
    model = net()
    model.compile("sgd", "mse")
    path = tmp_path / "model.keras"
    model.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged or not a .keras file"):
        incremental.warm_start(path, optimizer="keep")
    for source in (None, model):
        with pytest.raises(InputError, match="must be an existing .keras file"):
            incremental.warm_start(source, optimizer="keep")


@pytest.mark.slow
def test_a_metric_that_was_told_the_classes_counts_the_new_ones():
    """MeanIoU ignores classes beyond its number: it would be 1.0 here, although the last class is always wrong."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    heads = [keras.layers.Dense(3, name="head")(inputs), keras.layers.Dense(2, name="other")(inputs)]
    model = keras.Model(inputs, heads)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [[keras.metrics.MeanIoU(3, sparse_y_pred=False)], [keras.metrics.MeanIoU(2, sparse_y_pred=False)]]
    model.compile(keras.optimizers.SGD(0.0), [loss, loss], metrics=metrics)
    model.fit(X, [Y, Y % 2], verbose=0)
    grown = incremental.grow(model, 4, head="head")
    labels = np.where(np.arange(10) < 5, 3, grown.predict(X, verbose=0)[0].argmax(-1))
    guesses = grown.predict(X, verbose=0)[0].argmax(-1)
    right = [np.sum((guesses == c) & (labels == c)) for c in range(4)]
    either = [np.sum((guesses == c) | (labels == c)) for c in range(4)]
    by_hand = [a / b for a, b in zip(right, either, strict=True) if b]
    logs = grown.evaluate(X, [labels, Y % 2], verbose=0, return_dict=True)
    assert logs["head_mean_io_u"] == pytest.approx(np.mean(by_hand), abs=1e-5) and np.mean(by_hand) < 0.99


def test_a_head_that_feeds_other_layers_is_not_grown():
    """The other layer would get new rows, and its output would change."""
    inputs = keras.Input((4,))
    first = keras.layers.Dense(3, name="head")(inputs)
    model = keras.Model(inputs, [first, keras.layers.Dense(2, name="after")(first)])
    with pytest.raises(InputError, match="after/kernel depends on the head's output"):
        incremental.grow(model, 5, head="head")

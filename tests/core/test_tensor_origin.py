"""Which tensors depend on a step's data, and which only on weights or constants."""

import pytest
import tensorflow as tf

from tfgpu.core.randomness.tensor_origin import origin_of


@pytest.fixture(scope="module")
def weights():
    return tf.Variable(tf.ones([4, 2]))


def ask(make):
    """The answer for the tensor that `make(batch)` builds from an iterator's batch and from an argument."""
    found = []

    @tf.function
    def from_iterator(iterator):
        found.append(origin_of(make(iterator.get_next())))

    @tf.function
    def from_argument(batch):
        found.append(origin_of(make(batch)))

    from_iterator(iter(tf.data.Dataset.from_tensors(tf.ones([4, 2]))))
    from_argument(tf.ones([4, 2]))
    assert found[0] == found[1]
    return found[0]


def test_the_batch_and_what_is_made_of_it(weights):
    assert ask(lambda x: x) == "data"
    assert ask(lambda x: tf.nn.relu(weights @ tf.transpose(x))) == "data"


def test_what_is_as_long_as_the_batch():
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(batch):
        found.append(origin_of(tf.ones(tf.shape(batch))))

    step(tf.ones([4, 2]))
    assert found == ["data"]


def test_weights_and_constants(weights):
    assert ask(lambda x: weights.read_value()) == "weights"
    assert ask(lambda x: tf.reshape(tf.transpose(weights) * 2.0, [1, 4, 2])) == "weights"
    assert ask(lambda x: tf.constant([1.0, 2.0])) == "constants"


def test_captured_values_count_inside_branches(weights):
    found = []

    @tf.function
    def step(x):
        def branch():
            found.append((origin_of(x + 1.0), origin_of(weights + 1.0)))
            return x

        return tf.cond(tf.reduce_sum(x) > 0, branch, lambda: x)

    step(tf.ones([4, 2]))
    assert found == [("data", "weights")]


def test_eager_tensors_have_no_known_origin(weights):
    assert origin_of(weights.read_value()) == "data"

"""What the indices of a lookup depend on, read from the graph."""

import pytest
import tensorflow as tf

from tfgpu.core.sparse import index_origin, lookups
from tfgpu.core.sparse.index_origin import Origin

ALIKE, UNIQUE, ROWS, UNKNOWN = Origin


@pytest.fixture(scope="module")
def table():
    return tf.Variable(tf.ones([5, 2]))


@tf.function
def nested(x):
    return tf.range(5), tf.cast(x[:, 0], tf.int32), tf.range(tf.shape(x)[1])


CASES = {
    "constant": (lambda x, table: tf.range(5), ALIKE),
    "captured": (lambda x, table: tf.identity(EAGER), ALIKE),
    "of weights": (lambda x, table: tf.argsort(table[:, 0]), ALIKE),
    "rows": (lambda x, table: tf.cast(x[:, 0], tf.int32), ROWS),
    "rows of a list": (lambda x, table: tf.TensorArray(tf.float32, 2).unstack(x).stack(), ROWS),
    "as many as rows": (lambda x, table: tf.range(tf.shape(x)[0]), ROWS),
    "shaped like rows": (lambda x, table: tf.broadcast_to(tf.range(3)[None], tf.shape(x)), ROWS),
    "length": (lambda x, table: tf.range(tf.shape(x)[1]), ALIKE),
    "length, from the end": (lambda x, table: tf.range(tf.shape(x)[-1]), ALIKE),
    "length, unpacked": (lambda x, table: tf.range(tf.unstack(tf.shape(x))[1]), ALIKE),
    "length of a lookup": (
        lambda x, table: tf.range(tf.shape(tf.gather(table, tf.cast(x, tf.int32)) * 2.0)[1]),
        ALIKE,
    ),
    "rows on the second axis": (lambda x, table: tf.range(tf.shape(tf.transpose(x))[1]), UNKNOWN),
    "rows under a new axis": (lambda x, table: tf.range(tf.shape(x[None])[1]), UNKNOWN),
    "unique": (lambda x, table: tf.unique(tf.cast(x[:, 0], tf.int32))[0], UNIQUE),
    "unique, not negative": (lambda x, table: positive(tf.unique(tf.cast(x[:, 0], tf.int32))[0]), UNIQUE),
    "places of unique": (lambda x, table: tf.unique(tf.cast(x[:, 0], tf.int32))[1], ROWS),
    "unique constants": (lambda x, table: tf.unique(tf.constant([1, 1, 2]))[0], ALIKE),
    "random": (lambda x, table: tf.random.uniform([5], maxval=5, dtype=tf.int32), ROWS),
    "function of constants": (lambda x, table: nested(x)[0], ALIKE),
    "function of rows": (lambda x, table: nested(x)[1], ROWS),
    "function of the length": (lambda x, table: nested(x)[2], ALIKE),
    "branches on constants": (
        lambda x, table: tf.cond(table[0, 0] > 0, lambda: tf.range(5), lambda: tf.range(5)),
        ALIKE,
    ),
    "branches on rows": (lambda x, table: tf.cond(x[0, 0] > 0, lambda: tf.range(5), lambda: tf.range(5)), UNKNOWN),
}
EAGER = tf.constant([1, 2])


def positive(indices):
    return tf.where(indices < 0, indices + 5, indices)


@pytest.mark.parametrize("name", CASES)
def test_what_indices_depend_on(name, table):
    make, expected = CASES[name]
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def of_argument(x):
        found.append(index_origin.origin_of(make(x, table)))

    @tf.function
    def of_iterator(iterator):
        found.append(index_origin.origin_of(make(iterator.get_next(), table)))

    of_argument.get_concrete_function()
    of_iterator.get_concrete_function(iter(tf.data.Dataset.from_tensors(tf.ones([4, 3])).map(unsized)))
    assert found == [expected] * 2


def unsized(x):
    return tf.ensure_shape(tf.py_function(lambda: x, [], tf.float32), [None, None])


def test_what_is_marked_is_not_looked_into():
    @tf.function(input_signature=[tf.TensorSpec([4])])
    def ask(x):
        total, offset = x + 1.0, tf.constant(2)
        index_origin.mark(total, alike=True)
        index_origin.mark({"offset": offset}, alike=False)
        return index_origin.origin_of(total * 2.0) is ALIKE, index_origin.origin_of(tf.range(5) + offset) is ROWS

    assert all(ask(tf.ones([4])))


def test_eager_indices_are_not_known():
    assert index_origin.origin_of(tf.range(5)) is UNKNOWN


def test_the_lookups_of_one_table(table):
    """In the order in which the tape concatenates them, through a function's gradient too."""

    @tf.function
    def inner(x):
        return tf.gather(table, tf.range(5)) + tf.reduce_sum(tf.gather(table, tf.cast(x[:4, 0], tf.int32)))

    @tf.function(input_signature=[tf.TensorSpec([4, 3])])
    def ask(x):
        for call in (inner, inner.python_function):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(call(x)) + tf.reduce_sum(tf.gather(table, tf.constant([1])))
            found = lookups.lookups_of(tape.gradient(loss, table).indices, None)
            assert sorted((each.origin.name, each.count) for each in found) == [("ALIKE", 1), ("ALIKE", 5), ("ROWS", 4)]
            assert all(each.is_certain for each in found)
        return 1

    assert ask(tf.ones([4, 3])) == 1


@pytest.mark.parametrize(
    ("make", "repeated"),
    [
        (lambda: tf.range(4), False),
        (lambda: tf.zeros([4, 1], tf.int32), True),
        (lambda: positive(tf.broadcast_to(tf.range(5)[None], [4, 5])), True),
        (lambda: tf.range(5)[None], False),
        (lambda: tf.tile(WEIGHTS.read_value()[None], [4, 1]), True),
        (lambda: WEIGHTS.read_value(), False),
    ],
    ids=["positions", "zeros", "broadcast", "one", "tiled weights", "weights"],
)
def test_whether_constants_are_repeated_for_each_row(make, repeated):
    @tf.function
    def ask():
        assert lookups.is_repeated(make(), 4) is repeated

    ask.get_concrete_function()


WEIGHTS = tf.Variable([3, 3, 3, 3])

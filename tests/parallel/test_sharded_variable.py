"""Sharded variables: they act as one variable, also in an optimizer's norms."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core.state import sharded_variable
from tfgpu.parallel import shard_patches

ROWS = np.arange(10, dtype="float32").reshape(5, 2)


def cut(*ends, axis=0):
    return [keras.Variable(piece, name=f"kernel_{at}") for at, piece in enumerate(np.split(ROWS, ends, axis))]


@pytest.mark.parametrize(("pieces", "axis"), [(cut(2), 0), (cut(1, 2), 0), (cut(1, axis=1), 1)])
def test_a_whole_is_read_and_written_as_one_variable(pieces, axis):
    whole = shard_patches.mark_shards(pieces, sharded_variable.AxisSharding(axis), "table")
    assert (tuple(whole.shape), whole.dtype, whole.path) == ((5, 2), "float32", "table")
    np.testing.assert_array_equal(np.asarray(whole), ROWS)
    np.testing.assert_array_equal(tf.convert_to_tensor(whole), ROWS)
    whole.assign(-ROWS)
    np.testing.assert_array_equal(np.concatenate([piece.numpy() for piece in pieces], axis), -ROWS)
    with pytest.raises(tfgpu.InputError, match=r"table has shape \(5, 2\). Received: \(4, 2\)"):
        whole.assign(ROWS[:4])


def test_parts_and_their_slots_are_joined_in_the_order_of_the_uncut():
    pieces, bias = cut(2), keras.Variable([1.0])
    shard_patches.mark_shards(pieces, sharded_variable.AxisSharding(0), "table")
    optimizer = keras.optimizers.Adam()
    optimizer.build([*pieces, bias])
    found = sharded_variable.merged([*pieces, bias, *optimizer.variables[2:]])
    slots = [f"table/{name}" for name in ("momentum", "velocity")]
    assert [v.path for v in found[:4]] == ["table", bias.path, *slots]
    assert [tuple(v.shape) for v in found] == [(5, 2), (1,), (5, 2), (5, 2), (1,), (1,)]


def test_parts_of_parts_make_one_variable():
    inner = [keras.Variable(piece) for piece in np.split(ROWS, 5)]
    left = shard_patches.mark_shards(
        inner[:2],
        sharded_variable.AxisSharding(0),
        "table/0",
        outer=(of := sharded_variable.ShardInfo((1,), sharded_variable.AxisSharding(0), "table")),
    )
    right = shard_patches.mark_shards(inner[2:], sharded_variable.AxisSharding(0), "table/1", outer=of)
    assert (left.path, right.path) == ("table/0", "table/1")
    (whole,) = sharded_variable.merged(inner)
    assert whole.path == "table"
    np.testing.assert_array_equal(whole.numpy(), ROWS)
    whole.assign(2 * ROWS)
    np.testing.assert_array_equal(inner[4].numpy(), 2 * ROWS[4:])


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("sparse", [False, True])
def test_clipnorm_takes_the_norm_of_all_parts(steps, sparse):
    def trained(variables, gradients):
        optimizer = keras.optimizers.SGD(1.0, clipnorm=1.0, gradient_accumulation_steps=steps)
        for _ in range(steps or 1):
            optimizer.apply(gradients, variables)

    gradient = np.full((5, 2), 3.0, "float32")
    one, pieces = keras.Variable(ROWS), cut(2)
    shard_patches.mark_shards(pieces, sharded_variable.AxisSharding(0), "table")
    trained([one], [tf.constant(gradient)])
    given = [tf.constant(gradient[:2]), tf.constant(gradient[2:])]
    if sparse and not steps:
        given = [tf.IndexedSlices(g, tf.range(g.shape[0]), g.shape) for g in given]
    trained(pieces, given)
    # 10 numbers of 3: the norm is 3 * sqrt(10), so each step is -1 / sqrt(10).
    np.testing.assert_allclose(one.numpy(), ROWS - 1 / np.sqrt(10), rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([piece.numpy() for piece in pieces]), one.numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["Adafactor", "Lamb", "Muon"])
def test_an_optimizer_that_looks_at_whole_variables_is_refused(kind):
    pieces = cut(2)
    shard_patches.mark_shards(pieces, sharded_variable.AxisSharding(0), "table")
    with pytest.raises(tfgpu.InputError, match=f"{kind} looks at each variable as a whole"):
        getattr(keras.optimizers, kind)().build(pieces)

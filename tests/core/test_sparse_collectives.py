"""Exchanging sparse gradients: how many collectives, and their results."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
import tracer
from replica_steps import NCCL_TAKES, run_on_replicas

import tfgpu
from tfgpu.core import collectives, replication
from tfgpu.core.sparse import exchange


def number() -> tf.Tensor:
    return replication.replica_context().replica_id_in_sync_group


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_the_slices_of_all_tables_are_gathered_at_once(dtype):
    def step():
        at, big = tf.cast(number(), tf.int64), 2**40
        tables = [
            tf.IndexedSlices(tf.cast(tf.fill([2 + at, 3], at + 1), dtype), big + at + tf.range(2 + at), None),
            tf.IndexedSlices(tf.cast([5 - 2 * at], dtype), tf.stack([at]), None),
            tf.IndexedSlices(tf.cast(tf.fill([at, 4], 7), dtype), tf.cast(tf.range(at), tf.int32), None),
        ]
        sums = collectives.all_reduce(tables)
        assert [each.indices.dtype.name for each in sums] == ["int64", "int64", "int32"]
        return [(tf.cast(each.values, "float32"), each.indices) for each in sums]

    def flat_step():
        return [part for pair in step() for part in pair]

    found, sent = run_on_replicas(flat_step)
    values, indices, few, places, sometimes, first = (each[-1] for each in found)
    assert values.tolist() == [[1] * 3] * 2 + [[2] * 3] * 3
    assert indices.tolist() == [2**40, 2**40 + 1, 2**40 + 1, 2**40 + 2, 2**40 + 3]
    assert (few.tolist(), places.tolist()) == ([5, 3], [0, 1])
    assert (sometimes.tolist(), first.tolist()) == ([[7] * 4], [0])
    assert len(sent) == 2  # the counts, and all slices
    assert {each.dtype for each in sent} <= NCCL_TAKES


def wide_model(strategy, rows=12):
    """A model of three tables that are too large for the dense pack."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        tokens = keras.Input((6,), dtype="int32")
        tables = [keras.layers.Embedding(50, 4, name=f"table{at}")(tokens) for at in range(3)]
        hidden = keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Concatenate()(tables)))
        model = keras.Model(tokens, hidden)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 50, (rows, 6)).astype("int32"), rng.normal(size=(rows, 3)).astype("float32")
    return model, tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [12, 11])
def test_a_step_gathers_all_tables_at_once(rows, monkeypatch):
    monkeypatch.setattr(exchange, "_PACKED_BYTES", 0)
    alone, data = wide_model(tfgpu.strategy("one_device", "CPU:0"), rows)
    alone.fit(data.batch(4), verbose=0)
    with gpu_way.gpu_way():
        model, data = wide_model(tfgpu.strategy("mirrored", ["CPU:1", "CPU:2"]), rows)
        with tracer.recording() as calls:
            model.fit(data.batch(4), verbose=0)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
    facts = calls.step()
    assert facts.has_one_order
    gathers = [each for each in facts.collectives["GPU:0"] if each.kind == "all-gather"]
    assert 1 <= len(gathers) <= 2

"""How blocks of steps are made where replicas meet in collectives."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
import traced_models
import tracer

import tfgpu


@pytest.mark.slow
def test_a_block_knows_how_many_collectives_its_steps_have():
    """By them it grows until TensorFlow's records of a call are small."""
    keras.utils.clear_session()
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"])
        with strategy.scope():
            model, compiling, data = traced_models.cnn()
            model.compile("sgd", jit_compile=False, **compiling)
        source = tf.data.Dataset.from_tensor_slices(data(52)).batch(26, drop_remainder=True)
        with tracer.recording() as calls:
            model.fit(source, verbose=0)
    assert model.train_function.loops.collectives == len(calls.step(rows=13).collectives["GPU:0"]) == 5


def _arrays(x, y):
    return {"x": x, "y": y, "batch_size": 26, "shuffle": False}


def _dataset(x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(26).cache().prefetch(2)
    return {"x": data.with_options(tf.data.Options())}


def _mapped(x, y):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(26).map(lambda x, y: (x, y))}


def _fitted(strategy, as_data, epochs=4):
    """A model after epochs of seven batches of embeddings, the last one of 5 rows, and its calls of a loop."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, compiling, data = traced_models.embeddings()
        model.compile(keras.optimizers.Adam(0.01), jit_compile=False, **compiling)
    with tracer.recording() as calls:
        logs = model.fit(**as_data(*data(6 * 26 + 5)), epochs=epochs, verbose=0).history["loss"]
    return model, logs, sum(call.times for call in calls.all if len(call.function.graph.get_operations()) > 20)


@pytest.mark.slow
@pytest.mark.parametrize("as_data", [_arrays, _dataset])
def test_full_batches_run_many_in_a_call_and_the_uneven_one_by_itself(as_data):
    expected, losses, _ = _fitted(tfgpu.strategy("one_device", devices="CPU:0"), as_data)
    with gpu_way.gpu_way():
        model, logs, times = _fitted(tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"]), as_data)
    kinds = {kind.rows: varies for kind, varies in model.train_function.loops.varying.items()}
    assert kinds == {None: True, 26: False}
    assert times <= 21, "28 steps, of which 24 are full"
    np.testing.assert_allclose(logs, losses, rtol=1e-5)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_data_that_does_not_tell_its_rows_runs_one_step_in_a_call():
    with gpu_way.gpu_way():
        model, _, _ = _fitted(tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"]), _mapped, epochs=1)
    assert list(model.train_function.loops.varying.values()) == [True]

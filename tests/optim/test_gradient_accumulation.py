"""Gradient accumulation: each replica adds up its own gradients, and they are reduced once per update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

pytestmark = pytest.mark.sample("4 replicas")

X = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]], "float32")
Y = np.zeros((5, 1), "float32")


def line(strategy, **options):
    """y = w x with w = 1: the gradient of a batch is 2 mean(x^2) w."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2, **options), "mse")
    return model


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n} replicas")
def strategy(request):
    tfgpu.repair_keras()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


def accumulator(model):
    return next(v for v in model.optimizer.variables if "accumulator" in v.path)


@pytest.mark.slow
def test_two_batches_make_one_update_and_the_third_waits(strategy):
    model = line(strategy)
    model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    # batches (1, 2) and (3, 4): gradients 5 and 25, their mean 15; (5) waits with 2 * 25 * w.
    weight = 1 - 0.01 * 15
    assert model.get_weights()[0].item() == pytest.approx(weight, abs=1e-6)
    assert accumulator(model).numpy().item() == pytest.approx(50 * weight, abs=1e-4)
    assert int(model.optimizer.iterations) == 1  # Keras counts updates


@pytest.mark.slow
def test_pending_gradients_are_saved_and_loaded_on_another_number_of_replicas(strategy, tmp_path):
    model = line(strategy)
    model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert accumulator(loaded).numpy().item() == pytest.approx(42.5, abs=1e-4)
    for each in (model, loaded):
        each.fit(X[:2], Y[:2], batch_size=2, shuffle=False, verbose=0)
        # the waiting 42.5 and the new 5 w = 4.25 make one update
        assert each.get_weights()[0].item() == pytest.approx(0.85 - 0.01 * (42.5 + 4.25) / 2, abs=1e-5)


def test_gradients_are_reduced_only_at_the_update(strategy):
    model = line(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        model.optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    graph = tf.function(lambda x: strategy.run(step, args=(x,))).get_concrete_function(tf.ones((1, 1))).graph
    assert _collectives(graph.as_graph_def().node) == 0
    # TensorFlow puts what a condition without a device returns on the first GPU: gradients would go there and back.
    assert all(each.device for each in graph.get_operations() if each.type == "If" and each.outputs)
    branches = [_collectives(f.node_def) for f in graph.as_graph_def().library.function]
    # The branch that updates, of each replica's condition; the other one adds up locally.
    assert sum(count > 0 for count in branches) == strategy.num_replicas_in_sync


def _collectives(nodes):
    return sum("CollectiveReduce" in node.op or "CollectiveGather" in node.op for node in nodes)


@pytest.mark.slow
def test_an_overflow_on_one_replica_skips_the_batch_on_all(strategy):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
            )
            inner = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
            model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    x = np.array([[1.0], [2.0], [6e4], [1.0], [3.0], [4.0]], "float32")  # (6e4)^2 is no float16
    model.fit(x, np.zeros((6, 1), "float32"), batch_size=2, shuffle=False, verbose=0)
    assert model.optimizer.dynamic_scale.numpy() == 4.0
    assert int(inner.iterations) == 1  # the second batch was skipped; the first and third made one update
    assert model.get_weights()[0].item() == pytest.approx(1 - 0.01 * (5 + 25) / 2, abs=1e-3)
    assert accumulator(model).numpy().item() == 0


WORKERS = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
strategy = tfgpu.strategy("multi_worker")
with strategy.scope():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=sys.argv[1])
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2), "mse")
x = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
model.fit(x, 0 * x, 4, shuffle=False, verbose=0)
waiting = next(v for v in model.optimizer.variables if "accumulator" in v.path)
print(json.dumps({"waiting": float(waiting.numpy().astype("float32")[0, 0]), "dtype": waiting.dtype}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pending_gradients_are_read_on_all_workers(together, dtype):
    for answer in together(WORKERS, {"worker": 2}, dtype).values():
        assert answer == {"waiting": 15.0, "dtype": dtype}

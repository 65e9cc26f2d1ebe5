"""Sparse gradients with error feedback: against hand-computed numbers, and equal on all replicas to the bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import strategies
from tfgpu.asynchronous import averaging
from tfgpu.errors import InputError


def trained(rows, steps, top_k, **options):
    """The weights of a model `w x` trained on the same rows, one a replica, for some steps; and the model."""
    rows = np.array(rows, "float32")
    with strategies.mirrored(len(rows), top_k=top_k).scope():
        model = keras.Sequential([keras.Input((rows.shape[1],)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(1.0, **options), loss=lambda y, predicted: predicted)
    model.set_weights([np.zeros((rows.shape[1], 1), "float32")])
    model.fit(tf.data.Dataset.from_tensors((rows, rows[:, :1])).repeat(steps), verbose=0)
    return model.get_weights()[0][:, 0].tolist(), model


# The replicas' parts of the mean gradient are half of the rows: (4, 1, 0, 0) and (0, 1, 3, 0).
ROWS = [[8, 2, 0, 0], [0, 2, 6, 0]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("steps", "weights"),
    [
        (1, [-4, 0, -3, 0]),  # each sends its largest; 1 and 1 wait
        (2, [-8, 0, -6, 0]),  # 2 and 2 wait
        (3, [-12, 0, -9, 0]),  # 3 and 3 wait: a tie at the second replica goes to the first place
    ],
)
def test_each_replica_sends_its_largest_and_keeps_the_rest(steps, weights):
    found, _ = trained([[8, 2, 0, 0], [0, 1, 6, 0]], steps, 0.25)
    assert found == weights


@pytest.mark.slow
def test_a_residual_is_sent_when_it_is_the_largest():
    # The second number grows by 1 a step while 1.5 is sent: after 1.5 | 2 (sends the second: 2) ...
    found, _ = trained([[3, 2, 0, 0], [3, 2, 0, 0]], 4, 0.25)
    # Parts 1.5 and 1 a step: sends 1.5 first; then 2 of the second; then 3 of the first; then 2 of the second.
    assert found == [-(1.5 + 3.0) * 2, -(2.0 + 2.0) * 2, 0, 0]


def test_all_of_it_is_synchronous_training():
    found, model = trained(ROWS, 3, 1)
    assert found == [-12, -6, -9, 0]
    assert averaging.traffic(model).is_whole


def test_two_numbers_of_four():
    assert trained(ROWS, 1, 0.3)[0] == [-4, -2, -3, 0]


def test_an_overflow_leaves_the_residual_as_it_was():
    rows = np.array([[8, 2], [0, 0]], "float32")
    bad = np.array([[np.inf, 0], [0, 0]], "float32")
    with strategies.mirrored(2, top_k=0.5).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
        model.compile(scaled, loss=lambda y, predicted: predicted)
    model.set_weights([np.zeros((2, 1), "float32")])
    for x in (rows, bad, rows * 0):
        model.train_on_batch(x, x[:, :1])
    # 4 is sent, 1 waits; the second batch is skipped on both; in the third what waited is sent, at half the scale.
    assert model.get_weights()[0][:, 0].tolist() == [-4, -1]
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.slow
def test_replicas_stay_equal_to_the_bit():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 6)).astype("float32"), rng.integers(0, 3, 50)
    with strategies.mirrored(4, top_k=0.1).scope():
        layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = model.fit(x, y, batch_size=12, epochs=4, verbose=0).history["loss"]
    for variable in model.variables:
        for copy in variable.value.values[1:]:
            np.testing.assert_array_equal(copy.numpy(), variable.value.values[0].numpy())
    assert losses[-1] < losses[0]


def test_with_accumulation_it_is_refused():
    with pytest.raises(InputError, match="gradient_accumulation_steps=2"):
        trained(ROWS, 1, 0.5, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "above 0 and up to 1"),
        ({"top_k": 1.5}, "above 0 and up to 1"),
        ({"top_k": True}, "above 0 and up to 1"),
        ({"top_k": 0.1, "reduce_dtype": "float16"}, "cannot be combined"),
        ({"kind": "one_device", "top_k": 0.1}, "`top_k` does not apply to `one_device`"),
    ],
)
def test_a_wrong_part_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        tfgpu.strategy(**{"kind": "mirrored", **options})


def test_without_the_repairs_it_is_refused(monkeypatch):
    monkeypatch.setenv("TFGPU_REPAIR", "0")
    with pytest.raises(InputError, match="`top_k` needs the Keras repairs, which TFGPU_REPAIR=0 switches off"):
        strategies.mirrored(2, top_k=0.1)


SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.asynchronous import averaging
from tfgpu.core.sparse import exchange
exchange._PACKED_BYTES = int(sys.argv[2])
strategy = tfgpu.strategy("multi_worker", top_k=float(sys.argv[1]))
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, predicted: predicted)
model.set_weights([np.zeros((4, 1), "float32")])
x = np.array([[3, 2, 0, 0], [3, 2, 0, 0]], "float32")
model.fit(tf.data.Dataset.from_tensors((x, x[:, :1])).repeat(4), verbose=0)
print(json.dumps({"weights": model.get_weights()[0][:, 0].tolist(), "bytes": averaging.traffic(model).bytes}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("pack_bytes", [0, 1 << 20])
def test_workers_send_their_largest(together, pack_bytes):
    for answer in together(SCRIPT, {"worker": 2}, 0.25, pack_bytes).values():
        assert answer["weights"] == [-9, -8, 0, 0]

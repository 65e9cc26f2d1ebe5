"""How replicas exchange gradients: in a narrower dtype, in several packs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.peers import collectives
from tfgpu import strategies
from tfgpu.errors import InputError

# The gradient of a mean prediction is the mean of x. Half of 1 + 2**-12 is 0.5 in float16: the next is 0.5 + 2**-11.
X = np.array([[1 + 2.0**-12], [3.0]], "float32")


def trained(strategy, make_optimizer, steps=1):
    """The weight's change after some steps on two rows, and the optimizer."""
    with strategy.scope():
        optimizer = make_optimizer()
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer, loss=lambda y, predicted: predicted)
    before = model.get_weights()[0]
    data = tf.data.Dataset.from_tensors((X, X)).repeat(steps)
    model.fit(data, verbose=0)
    return float((before.astype("float64") - model.get_weights()[0])[0, 0]), optimizer


def sgd(**options):
    return lambda: keras.optimizers.SGD(1.0, **options)


@pytest.mark.parametrize(("dtype", "change"), [("float16", 2.0), ("bfloat16", 2.0), (None, 2 + 2.0**-13)])
def test_each_replicas_part_is_rounded_before_the_sum(dtype, change):
    strategy = strategies.mirrored(2, reduce_dtype=dtype)
    assert trained(strategy, sgd())[0] == pytest.approx(change, abs=3e-6)


def test_accumulated_gradients_are_summed_in_full_and_rounded_once():
    # A replica sums 0.25 + 2**-14 twice in float32 and sends 0.5 + 2**-13, rounded to 0.5.
    strategy = strategies.mirrored(2, reduce_dtype="float16")
    change, _ = trained(strategy, sgd(gradient_accumulation_steps=2), steps=2)
    assert change == pytest.approx(2.0, abs=3e-6)
    strategy = strategies.mirrored(2)
    change, _ = trained(strategy, sgd(gradient_accumulation_steps=2), steps=2)
    assert change == pytest.approx(2 + 2.0**-13, abs=3e-6)


def test_a_sparse_gradient_is_rounded_too():
    strategy = strategies.mirrored(2, reduce_dtype="float16")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(4, 1)])
        model.compile(keras.optimizers.SGD(1.0), loss=lambda y, predicted: y * predicted)
    before = model.get_weights()[0]
    model.fit(tf.data.Dataset.from_tensors((np.array([[1], [2]], "int32"), X)), verbose=0)
    np.testing.assert_allclose((before - model.get_weights()[0])[:, 0], [0, 0.5, 1.5, 0], atol=3e-7)


def test_an_overflow_in_float16_skips_the_step_under_loss_scaling():
    strategy = strategies.mirrored(2, reduce_dtype="float16")
    change, optimizer = trained(
        strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**16)
    )
    assert change == 0.0
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**15
    assert int(optimizer.iterations.numpy()) == 0


def test_without_the_repairs_it_is_refused(monkeypatch):
    monkeypatch.setenv("TFGPU_REPAIR", "0")
    with pytest.raises(InputError, match="TFGPU_REPAIR=0"):
        strategies.mirrored(2, reduce_dtype="float16")


def embedded(strategy):
    """The weights after two epochs on tokens that come several times in a batch, and collectives in a step."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(5000, 4)(tokens))
        model = keras.Model(tokens, keras.layers.Dense(3)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1, global_clipnorm=0.5), loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x, y = rng.choice([0, 1, 4095, 4096, 4999], (22, 6)).astype("int32"), rng.integers(0, 3, 22)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)  # the last one is smaller
    counted = collectives.count(lambda: model.fit(data, epochs=2, verbose=0))
    return np.concatenate([w.ravel() for w in model.get_weights()]), counted["a_step"]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_that_share_a_memory_sum_without_collectives(replicas):
    alone, _ = embedded(strategies.one_device("CPU:0"))
    plain, rounds = embedded(strategies.mirrored(replicas))
    assert rounds == 0
    np.testing.assert_allclose(plain, alone, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hierarchical_copy", "reduction_to_one_device"])
def test_a_chosen_all_reduce_is_the_one_in_use(way, monkeypatch):
    kind = {"hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce}.get(way, tf.distribute.ReductionToOneDevice)
    calls, stock = [], kind.batch_reduce_implementation
    monkeypatch.setattr(kind, "batch_reduce_implementation", lambda self, *a: calls.append(way) or stock(self, *a))
    alone, _ = embedded(strategies.one_device("CPU:0"))
    chosen, _ = embedded(strategies.mirrored(2, all_reduce=way))
    assert calls
    np.testing.assert_allclose(chosen, alone, rtol=0, atol=2e-6)


SCRIPT = """
import json
import sys
import tensorflow as tf
from tfgpu import strategies
from tfgpu.core import collectives
strategy = strategies.multi_worker(bytes_per_pack=int(sys.argv[1]), reduce_dtype=sys.argv[2] or None)
@tf.function
def summed():
    def each():
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        parts = [tf.fill([100], 1 + rank + 2.0 ** -12), tf.fill([50], 10 + rank)]
        return [part[0] for part in collectives.sum_gradients(parts)]
    return strategy.run(each)
nodes = [n for f in summed.get_concrete_function().graph.as_graph_def().library.function for n in f.node_def]
nodes += list(summed.get_concrete_function().graph.as_graph_def().node)
found = [n for n in nodes if n.op.startswith("CollectiveReduce")]
print(json.dumps({
    "sums": [float(value) for value in summed()],
    "rounds": len(found),
    "dtypes": sorted({tf.as_dtype(n.attr["T"].type).name for n in found}),
}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("pack", "dtype", "expected"),
    [
        (0, "", {"sums": [3 + 2.0**-11, 21.0], "rounds": 1, "dtypes": ["float32"]}),
        (50, "bfloat16", {"sums": [3.0, 21.0], "rounds": 2, "dtypes": ["bfloat16"]}),
    ],
)
def test_workers_sum_in_packs(together, pack, dtype, expected):
    for answer in together(SCRIPT, {"worker": 2}, pack, dtype).values():
        assert answer == expected


EMBEDDING = """
import json, sys
import keras, numpy as np, tensorflow as tf
from benchmarks.peers import collectives
import tfgpu
from tfgpu.core.sparse import exchange
if sys.argv[1] == "gathered":
    exchange._PACKED_BYTES = 0
strategy = tfgpu.strategy("auto")
keras.utils.set_random_seed(1)
with strategy.scope():
    tokens = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(5000, 4)(tokens)
    model = keras.Model(tokens, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1, global_clipnorm=0.5), loss, metrics=["accuracy"])
rng = np.random.default_rng(0)
x, y = rng.choice([0, 1, 4095, 4096, 4999], (24, 6)).astype("int32"), rng.integers(0, 3, 24)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
model.fit(data, epochs=2, verbose=0)
weights = np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
with strategy.scope():
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
counted = collectives.count(lambda: model.fit(data, verbose=0))
print(json.dumps({"weights": weights, "a_step": counted["a_step"]}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("way", "rounds"), [("packed", 1), pytest.param("gathered", 2, marks=pytest.mark.slow)])
def test_a_small_embeddings_rows_travel_with_the_dense_gradients(together, way, rounds):
    (alone,) = together(EMBEDDING, {"worker": 1}, way).values()
    for answer in together(EMBEDDING, {"worker": 2}, way).values():
        np.testing.assert_allclose(answer["weights"], alone["weights"], rtol=0, atol=2e-6)
        assert answer["a_step"] == rounds


TWO_LEVELS = """
import json, sys
import keras, numpy as np, tensorflow as tf
from tfgpu import environment, strategies
environment.set_logical_devices(2)
strategy = strategies.strategy(devices=2, all_reduce=sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.integers(0, 9, (22, 5)), rng.normal(size=(22, 1)).astype("float32")
with strategy.scope():
    model = keras.Sequential([
        keras.Input((5,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(6, use_bias=False),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=int(sys.argv[2]) or None)
    model.compile(optimizer, "mse", metrics=["mae"])
logs = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0).history
def replica():
    context = tf.distribute.get_replica_context()
    number = tf.cast(context.replica_id_in_sync_group, tf.float32)
    place = tf.reshape(tf.cast(context.replica_id_in_sync_group, tf.int32), [1])
    slices = tf.IndexedSlices(tf.reshape(number, [1, 1]), place, tf.constant([4, 1]))
    mean, total = context.all_reduce("mean", number), context.all_reduce("sum", number)
    return mean, total, tf.convert_to_tensor(context.all_reduce("sum", slices))
def found(run):
    return [np.asarray(part).ravel().tolist() for value in run(replica) for part in
            strategy.experimental_local_results(value)]
groups = strategy.extended._cross_device_ops
if sys.argv[1] == "hierarchical":  # the first device has one order for the collectives of both groups
    assert groups._between._launchers[0]._get_ordering_token() is groups._launchers[0]._get_ordering_token()
print(json.dumps({"weights": [w.tolist() for w in model.get_weights()], "logs": logs,
                  "graph": found(tf.function(lambda step: strategy.run(step))), "eager": found(strategy.run)}))
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [0, 2])
def test_a_sum_in_two_levels_is_the_sum_in_one(together, accumulate):
    flat = together(TWO_LEVELS, {"worker": 2}, "ring", accumulate)
    levels = together(TWO_LEVELS, {"worker": 2}, "hierarchical", accumulate)
    mean, total, rows = [1.5], [6.0], [0.0, 1.0, 2.0, 3.0]
    for name, answer in levels.items():
        assert answer["graph"] == answer["eager"] == [mean, mean, total, total, rows, rows]
        for a, b in zip(flat[name]["weights"], answer["weights"], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        for key, values in answer["logs"].items():
            np.testing.assert_allclose(values, flat[name]["logs"][key], atol=1e-6)
    assert levels["worker0"] == levels["worker1"]

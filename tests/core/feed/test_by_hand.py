"""`strategy.experimental_distribute_dataset` on two workers, by hand and in `fit`: the rows are one device's."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.distribute import input_ops

from tfgpu.core import worker_rows
from tfgpu.core.feed import by_hand
from tfgpu.data import load

POLICIES = tf.data.experimental.AutoShardPolicy


def stock(data, workers, devices, worker):
    """A worker's pieces, as `DistributedDataset` of TensorFlow makes them."""
    rows = distribute.compute_batch_size(data)
    if int(rows) == -1:
        data = distribute._LegacyRebatchDataset(data, workers * devices)
    else:
        data = data.rebatch(distribute.batch_sizes_for_worker(rows, workers, devices, worker))
    return input_ops.auto_shard_dataset(data.prefetch(devices), workers, worker, workers * devices)


def twins(x):
    return {"x": tf.fill([2], x), "y": -x}


def doubled(batch):
    return {**batch, "y": batch["y"] * 2}


def elements(count):
    return tf.data.Dataset.range(count).shuffle(count, seed=3).map(twins)


DATA = {
    "even": lambda: elements(24).batch(8),
    "short last batch": lambda: elements(21).batch(8),
    "fewer rows than replicas": lambda: elements(9).batch(8),
    "static": lambda: elements(20).batch(8, drop_remainder=True),
    "static, uneven": lambda: elements(11).batch(5, drop_remainder=True),
    "padded": lambda: elements(11).padded_batch(6, {"x": [3], "y": []}),
    "map after batch": lambda: elements(21).batch(6).map(doubled).prefetch(2),
    "no map before batch": lambda: tf.data.Dataset.range(21).batch(6).map(tf.negative),
    "repeated": lambda: elements(11).batch(6).repeat(3),
    "by place": lambda: load((np.ones([21, 3]), np.arange(21) % 3), global_batch=6, seed=2).train,
}


def under(data, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def values(data):
    return [[(part.shape, part.numpy().tolist()) for part in tf.nest.flatten(piece)] for piece in data]


@pytest.mark.sample("short last batch", "static")
@pytest.mark.parametrize("name", DATA)
def test_pieces_are_those_of_tensorflow(name):
    for workers, devices in ((2, 2), (3, 1)) if name == "short last batch" else ((2, 2),):
        for worker in range(workers):
            shards = tuple(device * workers + worker for device in range(devices))
            ranges = worker_rows.Ranges(shards, workers * devices)
            expected, data = stock(DATA[name](), workers, devices, worker), DATA[name]()
            found = by_hand.own_pieces(data, ranges, expected.element_spec)
            assert found.element_spec == expected.element_spec
            assert values(found) == values(expected)
            assert found.options().experimental_distribute == data.options().experimental_distribute


def test_what_cannot_be_cut_alike_is_left_to_tensorflow():
    ranges, spec = worker_rows.Ranges((0,), 2), tf.TensorSpec([None], tf.int64)

    def draw(x):
        return x + tf.random.uniform([], 0, 9, tf.int64)

    def pair(x):
        return x, 1

    random = tf.data.Dataset.range(8).map(draw).batch(4)
    assert by_hand.own_pieces(random, ranges, spec) is None
    ragged = tf.data.Dataset.range(8).map(tf.range).ragged_batch(4)
    assert by_hand.own_pieces(ragged, ranges, ragged.element_spec) is None
    scalar = tf.data.Dataset.range(8).map(tf.negative).batch(4).map(pair)
    assert by_hand.own_pieces(scalar, ranges, scalar.element_spec) is None


@pytest.mark.parametrize("reader", ["TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset"])
def test_files_that_tensorflow_deals_out_stay_its_own(reader):
    arguments = (1,) if reader.startswith("Fixed") else ()

    def read(file):
        return getattr(tf.data, reader)(file, *arguments)

    lines = tf.data.Dataset.from_tensor_slices(["a", "b"]).interleave(read).batch(4)
    assert not by_hand._is_cut_by_rows(lines)
    assert by_hand._is_cut_by_rows(under(lines, POLICIES.DATA))
    numbers = tf.data.Dataset.range(4).batch(2)
    assert by_hand._is_cut_by_rows(numbers)
    assert not by_hand._is_cut_by_rows(under(numbers, POLICIES.OFF))


LOOP = """
import collections, json, os
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.core.feed import by_hand
from tfgpu.data import load

tfgpu.environment.set_logical_devices(2)
strategy = tfgpu.strategy("multi_worker", devices=["CPU:0", "CPU:1"])
x = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
y = np.arange(22)
calls = collections.Counter()


def decode(x, y):
    def count(value):
        calls["decoded"] += 1
        return value

    return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32, stateful=False), [4]) + 1, y


def cut_early():
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(22, seed=3)
    return data.map(decode, num_parallel_calls=2).batch(8).prefetch(1)


def by_place():
    return load((x.reshape(22, 2, 2, 1), y % 3), global_batch=8, seed=2, validation=0, test=0).train


said = {}
for name, make in {"cut early": cut_early, "by place": by_place}.items():
    tf.random.set_seed(1)
    whole = [[part.numpy().tolist() for part in batch] for batch in make()]
    calls.clear()
    rows = []
    for batch in strategy.experimental_distribute_dataset(make()):
        rows.append([[p.numpy().tolist() for p in strategy.experimental_local_results(part)] for part in batch])
    said[name] = {"whole": whole, "rows": rows, "decoded": calls["decoded"]}
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
weights = model.get_weights()
for way in ("fit", "distributed", "stock"):
    model.set_weights(weights)
    calls.clear()
    if way == "stock":
        by_hand._is_cut_by_rows = lambda dataset: False
    data = cut_early() if way == "fit" else strategy.experimental_distribute_dataset(cut_early())
    model.fit(data, epochs=2, verbose=0)
    said[way] = [[w.tolist() for w in model.get_weights()], calls["decoded"]]
print(json.dumps(said), flush=True)
os._exit(0)  # TensorFlow reads ahead of a loop by hand, and calls Python while it ends
"""


@pytest.mark.slow
@pytest.mark.processes
def test_rows_are_one_devices(together):
    answers = together(LOOP, {"worker": 2}, timeout=880)
    one, other = answers["worker0"], answers["worker1"]
    for name in ("cut early", "by place"):
        assert one[name]["whole"] == other[name]["whole"]
        assert len(one[name]["whole"]) == len(one[name]["rows"]) == len(other[name]["rows"]) == 3
        for at, whole in enumerate(one[name]["whole"]):
            for part, every in enumerate(whole):
                first, second = one[name]["rows"][at][part], other[name]["rows"][at][part]
                # Shard d * W + w of the batch is that of device d of worker w.
                assert [*first[0], *second[0], *first[1], *second[1]] == every
    # Each worker makes its rows, and one that stands in for none; `fit` the whole first batch besides, to compare it.
    assert (one["cut early"]["decoded"], other["cut early"]["decoded"]) == (4 + 4 + 4, 4 + 4 + 3)
    assert (one["distributed"][1], other["distributed"][1]) == (2 * 12, 2 * 11)
    assert one["fit"][1] == 2 * 11 + 8
    assert one["stock"][1] == other["stock"][1] == 2 * 22
    for way in ("fit", "distributed", "stock"):
        assert one[way][0] == other[way][0]
    assert one["distributed"][0] == one["stock"][0]  # to the bit
    for ours, theirs in zip(one["fit"][0], one["distributed"][0], strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)

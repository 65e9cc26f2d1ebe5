"""`strategy.experimental_distribute_dataset` on two workers, by hand and in `fit`: the rows are one device's."""

import pytest

LOOP = """
import collections, json, os
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.data import load

tfgpu.environment.set_logical_devices(2)
strategy = tfgpu.strategy("multi_worker", devices=["CPU:0", "CPU:1"])
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
y = np.arange(24)
calls = collections.Counter()


def decode(x, y):
    def count(value):
        calls["decoded"] += 1
        return value

    return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32, stateful=False), [4]) + 1, y


def cut_early():
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24, seed=3)
    return data.map(decode, num_parallel_calls=2).batch(8).prefetch(1)


def by_place():
    return load((x.reshape(24, 2, 2, 1), y % 3), global_batch=8, seed=2, validation=0, test=0).train


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
for way in ("fit", "distributed"):
    model.set_weights(weights)
    calls.clear()
    data = cut_early() if way == "fit" else strategy.experimental_distribute_dataset(cut_early())
    model.fit(data, epochs=2, verbose=0)
    said[way] = [[w.tolist() for w in model.get_weights()], calls["decoded"]]
print(json.dumps(said), flush=True)
os._exit(0)  # TensorFlow reads ahead of a loop by hand, and calls Python while it ends
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
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
    # TensorFlow makes whole batches on every worker; `fit` a worker's rows, and the first batch whole.
    assert one["cut early"]["decoded"] == other["cut early"]["decoded"] == 24
    assert one["distributed"][1] == 2 * 24 and one["fit"][1] == 2 * 12 + 8
    assert one["fit"][0] == other["fit"][0]
    assert one["distributed"][0] == other["distributed"][0]
    for ours, theirs in zip(one["fit"][0], one["distributed"][0], strict=True):
        assert ours == pytest.approx(theirs) if isinstance(ours[0], float) else True

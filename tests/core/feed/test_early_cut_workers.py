"""Two workers train on a user's own data as they do when each makes whole batches, and each makes its share."""

import pytest

SAME = """
import collections, json, logging, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
tfgpu.environment.set_logical_devices(2)
from tfgpu.core.feed import early_cut

strategy = tfgpu.strategy("multi_worker", devices=["CPU:0", "CPU:1"], check_replicas=4)
x = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
y = np.arange(22) % 3
calls, logged, cut = collections.Counter(), [], early_cut.rows_of
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("tfgpu").addHandler(handler)
logging.getLogger("tfgpu").setLevel(logging.INFO)


def decode(x, y):
    def count(value):
        calls["decoded"] += 1
        return value

    return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32, stateful=False), [4]) + 1, y


def by_rows(x, y):
    return x / 3, tf.one_hot(y, 3)


def pipeline(batch=4, drop=False):
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(22, seed=3)
    return data.map(decode, num_parallel_calls=2).batch(batch, drop).map(by_rows).prefetch(1)


def late():
    data = tf.data.Dataset.from_tensor_slices((x, y)).map(decode).shuffle(22, seed=3)
    return data.batch(8).map(by_rows)


def fresh():
    keras.utils.set_random_seed(0)
    with strategy.scope():
        given = keras.Input((4,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3, "tanh")(given))
        model = keras.Model(given, keras.layers.Dropout(0.2)(keras.layers.Dense(3)(hidden)))
        model.compile("adam", "mse", metrics=["mae"])
    return model


def bits(values):
    return "".join(np.asarray(value).tobytes().hex() for value in values)


soft = np.eye(3, dtype="float32")[y]
said = {}
for name, make in {
    "pipeline": pipeline,
    "static": lambda: pipeline(8, True),
    "late": late,
    "arrays": lambda: None,
    "even arrays": lambda: None,
}.items():
    for way in ("whole", "cut"):
        early_cut.rows_of = cut if way == "cut" else lambda *given: None
        model, data = fresh(), make()
        if data is None:
            given = {"x": x, "y": soft, "batch_size": 11 if name == "arrays" else 4, "shuffle": True}
            given = given if name == "arrays" else given | {"x": x[:20], "y": soft[:20]}
            other = {"x": x, "y": soft, "batch_size": 8}
        else:
            given, other = {"x": data}, {"x": data}
        logged.clear()
        calls.clear()
        history = model.fit(**given, epochs=2, verbose=0)
        work = calls["decoded"]
        found = model.evaluate(**other, verbose=0, return_dict=True)
        predicted = model.predict(data if data is not None else x, verbose=0, batch_size=None if data else 4)
        said[f"{name} {way}"] = bits([*model.get_weights(), *history.history.values(), *found.values(), predicted])
        said[f"{name} {way} work"] = work
        said[f"{name} {way} log"] = [text for text in logged if "Every worker runs" in text]
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_training_is_the_same_to_the_bit_and_work_is_shared(together):
    answers = together(SAME, {"worker": 2}, timeout=580)
    for said in answers.values():
        for name in ("pipeline", "static", "late", "arrays", "even arrays"):
            assert said[f"{name} cut"] == said[f"{name} whole"], name
        assert said["pipeline whole work"] == said["late whole work"] == said["late cut work"] == 44
        # 5 batches of 4 rows and one of 2, by 4 replicas; shards without rows take one that stands in, and the first
        # batch comes whole besides.
        assert said["pipeline cut work"] == 2 * (5 * 2 + 2) + 4
        assert said["static cut work"] == 2 * (2 * 4) + 8
        assert not said["pipeline cut log"]
    (line,) = answers["worker0"]["late cut log"]
    assert "from_tensor_slices, map (decode), shuffle" in line and "`shuffle`" in line and "`map`" in line
    assert not answers["worker1"]["late cut log"]  # only the chief logs

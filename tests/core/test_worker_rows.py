"""Workers that make only their rows of each batch train as workers that make whole batches."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core import batch_sharding, worker_rows
from tfgpu.core.worker_rows import Ranges


@pytest.mark.parametrize(("workers", "devices"), [(2, 1), (2, 2), (3, 2), (4, 1)])
def test_a_worker_makes_the_shards_of_its_replicas(workers, devices):
    count = workers * devices
    for total, worker in itertools.product(range(14), range(workers)):
        ranges = Ranges(tuple(device * workers + worker for device in range(devices)), count)
        shards = [batch_sharding.replica_batch(tf.range(total), at, count).data.numpy() for at in ranges.shards]
        rows = np.concatenate(shards).tolist()
        assert ranges.indices(total).numpy().tolist() == ranges.indices(tf.constant(total)).numpy().tolist() == rows
        assert ranges.rows(total) == int(ranges.rows(tf.constant(total, tf.int64))) == len(rows)


def test_rows_of_any_structure_are_taken():
    batch = {
        "dense": tf.reshape(tf.range(10), [5, 2]),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5]]),
        "sparse": tf.sparse.from_dense([[0, 1], [2, 0], [0, 3], [4, 0], [0, 5]]),
        "scalar": tf.constant(7),
        "none": None,
    }
    rows, total = Ranges((1, 3), 4).take(batch)
    assert int(total) == 5 and rows["none"] is None and int(rows["scalar"]) == 7
    assert rows["dense"].numpy().tolist() == [[4, 5], [8, 9]]
    assert rows["ragged"].to_list() == [[], [5]]
    assert tf.sparse.to_dense(rows["sparse"]).numpy().tolist() == [[0, 3], [0, 5]]


def test_rows_of_equal_shards_have_a_static_shape():
    batches = tf.data.Dataset.range(16).batch(8, drop_remainder=True)
    worker_rows.register(batches, worker_rows.WorkerRows(lambda ranges: batches.map(ranges.take)))
    rows, total = worker_rows.of(batches).make(Ranges((0, 2), 4)).element_spec
    assert rows.shape == [4] and total.shape == [] and total.dtype == tf.int32


SAME = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
tfgpu.environment.set_logical_devices(len(json.loads(sys.argv[1])))
from tfgpu.core import worker_rows
from tfgpu.core.feed import sharded_dataset

strategy = tfgpu.strategy("multi_worker", devices=json.loads(sys.argv[1]), check_replicas=4)
x = np.random.default_rng(0).normal(size=(21, 4)).astype("float32")


class Paired(keras.Model):  # its loss looks at all rows
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = tf.reduce_mean(tf.square(out - y)) + tf.reduce_mean(tf.matmul(out, out, transpose_b=True) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def fresh(kind):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        given = keras.Input((4,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3, "tanh")(given))
        model = kind(given, keras.layers.Dense(1)(hidden))
        model.compile("adam", "mse", metrics=["mae"])
    return model


def data_of(way, batch=4):
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(21, seed=3).batch(batch, batch == 8)
    made = []

    def make(ranges):
        made.append(ranges)
        return batches.map(lambda *batch: ranges.take(batch))

    def first():
        made.append("first")
        return x[:4], x[:4, :1]

    if way != "whole":
        worker_rows.register(batches, worker_rows.WorkerRows(make, first if way == "first" else None))
    return batches, made


def bits(values):
    return "".join(np.asarray(value).tobytes().hex() for value in values)


class Stop(keras.callbacks.Callback):
    every_batch = True

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == 8:
            raise KeyboardInterrupt


said = {}
for name, kind, batch in (("by rows", keras.Model, 4), ("even", keras.Model, 8), ("mixed", Paired, 4)):
    for way in ("whole", "rows", "first")[: 2 + (batch == 4 and kind is keras.Model)]:
        model = fresh(kind)  # sets the seed, of which the order is made too
        data, made = data_of(way, batch)
        history = model.fit(data, epochs=2, verbose=0, validation_data=data)
        found = model.evaluate(data, verbose=0, return_dict=True)
        said[f"{name} {way}"] = bits([*model.get_weights(), *history.history.values(), *found.values()])
        said[f"{name} {way} made"] = [str(each) for each in made]
ordered = tf.data.Dataset.from_tensor_slices(x).batch(4)
predicted = [model.predict(ordered, verbose=0)]
worker_rows.register(ordered, worker_rows.WorkerRows(lambda ranges: ordered.map(ranges.take)))
predicted.append(model.predict(ordered.with_options(tf.data.Options()), verbose=0))
predicted.append(model.predict(worker_rows.register(ordered.skip(0), worker_rows.of(ordered)), verbose=0))
said["predicted"] = [bits([each]) for each in predicted]
for way in ("whole", "rows"):
    for resumed in (False, True):
        model = fresh(keras.Model)
        callbacks = [tfgpu.callbacks.Checkpoint(f"{sys.argv[2]}/{way}", every_steps=4)]
        data, made = data_of(way)
        try:
            model.fit(data, epochs=3, verbose=0, callbacks=callbacks + [Stop()] * (not resumed))
        except KeyboardInterrupt:
            pass
    said[f"resumed {way}"] = bits(model.get_weights())
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_training_is_the_same_to_the_bit(together, tmp_path):
    answers = together(SAME, {"worker": 2}, '["CPU:0", "CPU:1"]', tmp_path, timeout=580)
    for rank in range(2):
        said, mine = answers[f"worker{rank}"], str(Ranges((rank, 2 + rank), 4))
        for name in ("by rows", "even", "mixed"):
            assert said[f"{name} whole"] == said[f"{name} rows"], name
        assert said["by rows whole"] == said["by rows first"]
        assert said["by rows whole made"] == [] and said["by rows rows made"] == [mine]
        assert said["by rows first made"] == [mine, "first"]
        assert len(set(said["predicted"])) == 1
        assert said["resumed whole"] == said["resumed rows"]
    assert answers["worker0"]["mixed rows"] == answers["worker1"]["mixed rows"]

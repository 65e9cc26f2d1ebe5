"""Parameter servers with real processes: exact counts, one device's result, deaths of workers and servers, limits."""

import json

import pytest

from tfgpu import strategies
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.parameter_server import worker_data

PS = dict(workers=("localhost:1", "localhost:2"), parameter_servers=("localhost:3",), has_chief=True)
CHIEF = Cluster(**PS, rank=0, task_type="chief")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partitioner": "rows"}, "one of tf.distribute.experimental.partitioners. Received: 'rows'"),
        ({"cluster": Cluster()}, "Found: one process and no cluster; missing: chief, worker, ps"),
        ({"cluster": Cluster(**PS, rank=-1, task_type="evaluator")}, "evaluate_checkpoints"),
    ],
)
def test_invalid_settings_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        strategies.parameter_server(**{"cluster": CHIEF, **options})


def test_the_options_belong_to_parameter_servers():
    for options in ({"max_staleness": 1}, {"partitioner": None}, {"watch": "run"}):
        with pytest.raises(InputError, match=f"`{next(iter(options))}` does not apply to `one_device`"):
            strategies.strategy("one_device", **options)


def test_an_evaluator_gets_the_strategy_of_its_own_devices():
    found = strategies.strategy("parameter_server", cluster=Cluster(**PS, rank=-1, task_type="evaluator"))
    assert strategies.describe(found)["kind"] in ("one_device", "mirrored")


def test_data_for_workers_is_checked():
    with pytest.raises(InputError, match="`batches` must be a whole number of at least 1. Received: 0"):
        worker_data.on_workers(lambda index, count: None, batches=0)
    with pytest.raises(InputError, match="`make` must return a tf.data.Dataset. Received: NoneType"):
        worker_data.on_workers(lambda index, count: None, batches=1)


# Every task runs this; only the chief comes past `strategy`.
HEAD = """
import json, os, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.core.state import sharded_variable
from tfgpu.parameter_server import embeddings

def say(**facts):
    print(json.dumps(facts, default=lambda v: np.asarray(v).tolist()), flush=True)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
W = RNG.uniform(0.5, 2, 50).astype("float32")
T = RNG.integers(0, 11, (50, 3)).astype("int32")

def build(optimizer, table=0, norm=False, dropout=0.0, **compiled):
    keras.utils.set_random_seed(1)
    if table:
        inputs = keras.Input((3,), dtype="int32")
        layer = keras.layers.Embedding(table, 4, embeddings_regularizer=keras.regularizers.L2(0.01))
        hidden = keras.layers.Flatten()(layer(inputs))
    else:
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh")(inputs)
    if norm:
        hidden = keras.layers.BatchNormalization()(hidden)
    if dropout:
        hidden = keras.layers.Dropout(dropout, seed=3)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseTopKCategoricalAccuracy(k=1, name="top")
    model.compile(optimizer, loss, metrics=["accuracy", accuracy], weighted_metrics=["accuracy"], **compiled)
    return model
"""

EXACT = (
    HEAD
    + """
strategy = tfgpu.strategy("parameter_server", max_staleness=0, partitioner=None)

def compare(make, x=X, weights=None, **options):
    def train(model):
        given = dict(batch_size=8, epochs=2, verbose=0, validation_data=(x, Y), sample_weight=weights)
        return model.fit(x, Y, **given).history
    one = build(make(), **options)
    alone = train(one)
    with strategy.scope():
        many = build(make(), **options)
    spread = train(many)
    pairs = zip(sharded_variable.merged(one.weights), sharded_variable.merged(many.weights), strict=True)
    return {
        "weights": max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs),
        "logs": max(abs(a - b) for name in alone for a, b in zip(alone[name], spread[name], strict=True)),
        "names": sorted(alone) == sorted(spread),
        "predict": float(np.abs(one.predict(x, verbose=0) - many.predict(x, verbose=0)).max()),
        "iterations": [int(one.optimizer.iterations), int(many.optimizer.iterations)],
    }

def decaying():
    rate = keras.optimizers.schedules.CosineDecay(0.1, 20)
    return keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.1, weight_decay=0.01)

sgd = lambda: keras.optimizers.SGD(0.1)
found = {
    "sgd": compare(sgd),
    "weighted": compare(decaying, weights=W),
    "adam": compare(lambda: keras.optimizers.Adam(0.01, use_ema=True), norm=True, dropout=0.3),
    "three steps a call": compare(sgd, steps_per_execution=3),
    "whole table": compare(lambda: keras.optimizers.Adam(0.05), x=T, table=11),
}
embeddings.set_partitioner(strategy, tf.distribute.experimental.partitioners.FixedShardsPartitioner(2))
found["cut table"] = compare(lambda: keras.optimizers.Adam(0.05, global_clipnorm=1.0), x=T, table=11)
with strategy.scope():
    model = build(sgd(), table=11)
shards = [v for v in model.trainable_variables if "embeddings" in v.path]
say(found=found, shards=[(v.shape, v.value.device.split("/")[3]) for v in shards])
"""
)


@pytest.mark.processes
@pytest.mark.slow
def test_with_no_staleness_two_workers_give_what_one_device_gives(group):
    processes = group(EXACT, chief=1, worker=2, ps=2)
    processes.start_all()
    answer = processes.answer()
    for name, found in answer["found"].items():
        assert found["weights"] < 1e-6 and found["logs"] < 1e-6 and found["predict"] < 1e-6, (name, found)
        assert found["names"] and found["iterations"] == [14, 14], (name, found)
    assert [shape for shape, _ in answer["shards"]] == [[5, 4], [6, 4]]
    assert sorted(where for _, where in answer["shards"]) == ["task:0", "task:1"]
    # The workers and servers leave by themselves once the chief is gone.
    assert [processes.wait(name, timeout=550) for name in ("worker0", "worker1", "ps0", "ps1")] == [0] * 4


DETERMINISTIC = (
    HEAD
    + """
tfgpu.environment.set_seed(1, deterministic=True)
strategy = tfgpu.strategy("parameter_server", max_staleness=0)
with strategy.scope():
    model = build(keras.optimizers.SGD(0.1), dropout=0.3)
history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
alone = build(keras.optimizers.SGD(0.1), dropout=0.3)
expected = alone.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
say(loss=history["loss"], expected=expected["loss"])
"""
)


@pytest.mark.processes
@pytest.mark.slow
def test_deterministic_operations_train_without_a_clock(group):
    # TensorFlow refuses `tf.timestamp`, by which closures of steps are timed.
    processes = group(DETERMINISTIC, chief=1, worker=1, ps=1)
    processes.start_all()
    answer = processes.answer()
    assert answer["loss"] == pytest.approx(answer["expected"], abs=1e-6)


FREE = (
    HEAD
    + """
strategy = tfgpu.strategy("parameter_server")
sgd = lambda **options: keras.optimizers.SGD(0.01, **options)

with strategy.scope():
    model = build(sgd())

class Count(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="count")
        self.rows = self.add_variable((), "zeros", name="rows")
    def update_state(self, y, y_pred, sample_weight=None):
        self.rows.assign(self.rows + tf.cast(tf.shape(y)[0], "float32"))
    def result(self):
        return self.rows

with strategy.scope():
    model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[Count()])
history = model.fit(X, Y, batch_size=1, epochs=4, verbose=0, validation_data=(X, Y)).history
counts = dict(iterations=int(model.optimizer.iterations), rows=history["count"], tested=history["val_count"])

# A table whose row i is touched by example i alone: exactly one update of 1 - 0.5 * 2 * (1 - 0) = 0 an epoch.
with strategy.scope():
    inputs = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(60, 1, embeddings_initializer="ones")
    rows = keras.Model(inputs, table(inputs))
    rows.compile(keras.optimizers.SGD(0.25), lambda y, p: tf.reduce_sum((p - y) ** 2))
seen = []
for epoch in range(2):
    rows.fit(np.arange(60, dtype="int32"), np.zeros((60, 1)), batch_size=1, verbose=0)
    seen.append(sorted(set(table.get_weights()[0][:, 0].tolist())))

def refused(make, *arguments, **options):
    try:
        make(*arguments, **options)
    except tfgpu.InputError as error:
        return str(error)
    return "accepted"

class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass

class Hears(Looks):
    every_batch = False
    last = -1
    def on_train_batch_end(self, batch, logs=None):
        self.last = batch

with strategy.scope():
    words = {
        "eager": refused(build, sgd(), run_eagerly=True),
        "jit": refused(build, sgd(), jit_compile=True),
        "accumulation": refused(build, sgd(gradient_accumulation_steps=2)),
        "average": refused(build, sgd(use_ema=True, ema_overwrite_frequency=2)),
        "callback": refused(model.fit, X, Y, callbacks=[Looks()], verbose=0),
        "backup": refused(model.fit, X, Y, callbacks=[keras.callbacks.BackupAndRestore("b", save_freq=2)], verbose=0),
    }
    keras.config.set_dtype_policy("mixed_float16")
    words["float16"] = refused(build, sgd())
    keras.config.set_dtype_policy("mixed_bfloat16")
    half = build(sgd())
    keras.config.set_dtype_policy("float32")
hears = Hears()
half = half.fit(X, Y, batch_size=8, verbose=0, callbacks=[hears], steps_per_epoch=5).history["loss"]

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.mean = keras.layers.Dense(1), keras.metrics.Mean(name="mean")
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x)[:, 0] - tf.cast(y, "float32")) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(tf.ones_like(y))
        return {"mean": self.mean.result(), "last": loss}
    @property
    def metrics(self):
        return [self.mean]

with strategy.scope():
    own = Own()
    own.compile(sgd())
own_logs = own.fit(X, Y, batch_size=8, verbose=0).history

with strategy.scope():
    ragged = keras.Sequential([keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1)[:, None]), keras.layers.Dense(1)])
    ragged.compile("sgd", "mse", metrics=[Count()])
lengths = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1.0], [1.0, 2.0], [3.0]] * 6), np.ones((18, 1))))
ragged_rows = ragged.fit(lengths.batch(4), verbose=0).history["count"]

def fails(y, p):
    with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_sum(p * p), -1.0, "the loss has failed")]):
        return tf.reduce_mean(p)

with strategy.scope():
    wrong = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    wrong.compile("sgd", fails)
try:
    wrong.fit(X, Y, verbose=0)
    error = ""
except tf.errors.InvalidArgumentError as caught:
    error = "the loss has failed" in str(caught)
after = model.fit(X, Y, batch_size=8, verbose=0).history["count"]
blocks = tfgpu.Trainer(model, steps_per_call=3).fit(X, Y, batch_size=8, verbose=0).history["count"]
single = model.train_on_batch(X, Y, return_dict=True)["count"]
def numbers(index, count):
    here = tf.data.Dataset.range(50).shard(count, index)
    return here.map(lambda n: (tf.fill([6], tf.cast(n, "float32")), tf.cast(n % 2, "int32"))).batch(5)

theirs = tfgpu.asynchronous.on_workers(numbers, batches=20)
before = int(model.optimizer.iterations)
far = model.fit(theirs, epochs=2, verbose=0, validation_data=(X, Y)).history
far = dict(rows=far["count"], tested=far["val_count"], steps=int(model.optimizer.iterations) - before)
words["evaluated there"] = refused(model.evaluate, theirs, verbose=0)
words["predicted there"] = refused(model.predict, theirs, verbose=0)
words["weights there"] = refused(model.fit, theirs, class_weight={0: 1.0, 1: 2.0}, verbose=0)
folder = sys.argv[1] + ".d/"
by_epoch = [
    keras.callbacks.ModelCheckpoint(folder + "best.keras", monitor="val_loss", save_best_only=True),
    keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("val_loss"),
    keras.callbacks.CSVLogger(folder + "log.csv"),
    keras.callbacks.TensorBoard(folder + "logs"),
    keras.callbacks.BackupAndRestore(folder + "backup"),
    tfgpu.callbacks.Checkpoint(folder + "run"),
    tfgpu.callbacks.MetricsFile(folder + "metrics.csv"),
]
with strategy.scope():
    clipped = build(sgd(clipnorm=0.1, loss_scale_factor=8.0))
ran = clipped.fit(
    X, Y, batch_size=8, epochs=2, validation_split=0.2, class_weight={0: 1.0, 1: 2.0}, callbacks=by_epoch, verbose=0
).history
words["callbacks"] = " ".join(sorted(os.listdir(folder))) + f" {len(ran['val_loss'])} epochs"
model.save(sys.argv[1])
loaded = keras.models.load_model(sys.argv[1], custom_objects={"Count": Count}, compile=False)
same = bool(np.allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6))
say(counts=counts, seen=seen, words=words, half=half, heard=hears.last, own=own_logs, ragged=ragged_rows, error=error,
    after=after, blocks=blocks, far=far, single=single, same=same)
"""
)

REFUSALS = {
    "eager": "compiled steps only",
    "jit": "XLA cannot reach variables on a parameter server",
    "accumulation": "`gradient_accumulation_steps=2`",
    "average": "`ema_overwrite_frequency=2`",
    "callback": "Looks needs every batch",
    "backup": "BackupAndRestore needs every batch",
    "float16": "Use the policy 'mixed_bfloat16'",
    "callbacks": "best.keras log.csv logs metrics.csv run 2 epochs",
    "evaluated there": "Data that workers read cannot be evaluated",
    "predicted there": "Only `fit` can use data that workers read",
    "weights there": "`class_weight` cannot be applied to data that workers read",
}


@pytest.mark.processes
@pytest.mark.slow
def test_counts_are_exact_and_each_example_is_seen_once_an_epoch(group, tmp_path):
    processes = group(FREE, chief=1, worker=2, ps=1)
    processes.start_all(tmp_path / "model.keras")
    answer = processes.answer()
    assert answer["counts"] == {"iterations": 200, "rows": [50] * 4, "tested": [50] * 4}
    assert answer["seen"] == [[0.5], [0.25]]
    for name, words in REFUSALS.items():
        assert words in answer["words"][name], (name, answer["words"][name])
    assert 0 < answer["half"][0] < 5 and answer["heard"] == 4
    assert answer["own"]["mean"] == [1.0] and answer["own"]["last"][0] > 0
    assert answer["ragged"] == [18]
    assert answer["error"] is True
    assert (answer["after"], answer["blocks"], answer["single"]) == ([50], [50], 50)
    assert answer["far"] == {"rows": [100, 100], "tested": [50, 50], "steps": 40}
    assert answer["same"]


DEATHS = (
    HEAD
    + """
servers = len(tfgpu.Cluster.from_environment().parameter_servers)
partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=16, max_shards=servers)
strategy = tfgpu.strategy("parameter_server", partitioner=partitioner)
with strategy.scope():
    model = build(keras.optimizers.Adam(0.01), table=11, steps_per_execution=2)

class Says(keras.callbacks.Callback):
    every_batch = False
    def on_epoch_begin(self, epoch, logs=None):
        print("begins epoch", epoch, flush=True)
    def on_train_batch_end(self, batch, logs=None):
        print("batch", batch, flush=True)

def slow(x, y):
    tf.py_function(lambda: __import__("time").sleep(0.01), [], [])
    return x, y

data = tf.data.Dataset.from_tensor_slices((T, Y)).repeat(40).batch(4).map(slow)
checkpoint = tfgpu.callbacks.Checkpoint(sys.argv[1])
position = checkpoint.restore(model)
first = position.epoch if position else 0
print("begins with", first, flush=True)
steps = int(data.cardinality())
history = model.fit(data, initial_epoch=first, epochs=2, verbose=0, callbacks=[Says(), checkpoint])
shards = sum("embeddings" in v.path for v in model.trainable_variables)
say(first=first, iterations=int(model.optimizer.iterations), steps=steps, shards=shards, loss=history.history["loss"])
"""
)


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_worker_s_steps_are_run_again_and_it_may_come_back(group, tmp_path):
    processes = group(DEATHS, chief=1, worker=2, ps=1)
    processes.start_all(tmp_path / "run")
    processes.wait_for("chief0", r"batch \d{3}")
    processes.end("worker1")
    processes.start("worker1", tmp_path / "run", TFGPU_REJOIN="1")  # as `tfgpu launch` does
    answer = processes.answer()
    assert answer["steps"] == 500
    # What the dead worker applied in the closure that it left, two steps, is applied once more by another.
    assert 1000 <= answer["iterations"] <= 1002
    assert len(answer["loss"]) == 2 and all(0 < loss < 1 for loss in answer["loss"])


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_server_ends_the_chief_and_the_checkpoint_resumes(group, tmp_path):
    processes = group(DEATHS, chief=1, worker=2, ps=2)
    processes.start_all(tmp_path / "run")
    processes.wait_for("chief0", "begins epoch 1")
    while not (tmp_path / "run" / "epoch-0001" / "facts.json").is_file():
        assert processes.running["chief0"].poll() is None, processes.said("chief0")[-3000:]
    processes.end("ps1")
    assert processes.wait("chief0", timeout=550) == 1
    last = processes.said("chief0").strip().splitlines()[-1]
    assert last.startswith("tfgpu.errors.MachineError: Parameter server 1 (127.0.0.1:"), last
    processes.kill()

    again = group(DEATHS, chief=1, worker=2, ps=1)  # on other ports, with another number of servers
    again.start_all(tmp_path / "run")
    answer = again.answer()
    assert answer["first"] == 1 and answer["iterations"] == 1000 and answer["shards"] == 1


def test_the_scripts_are_python():
    for script in (EXACT, FREE, DEATHS):
        compile(script, "script", "exec")
        assert json.dumps(script)

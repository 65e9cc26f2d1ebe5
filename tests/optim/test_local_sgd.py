"""Replicas that train independently: against hand-computed numbers, one device, and reported traffic."""

import logging
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import strategies
from tfgpu.asynchronous import averaging
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.optim import local_sgd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 6)).astype("float32")
Y = RNG.integers(0, 3, 50)


def line(strategy, optimizer, weight=1.0):
    """A model `w x` with loss `w x`, so that a replica's gradient is the mean of its rows."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer(), loss=lambda y, predicted: predicted)
    model.set_weights([np.full((1, 1), weight, "float32")])
    return model


def copies(variable) -> list[float]:
    """A variable's value on each replica."""
    return [float(np.ravel(v.numpy())[0]) for v in variable.value.values]


def batches(*rows):
    """A dataset whose batches are these lists of numbers."""

    def make():
        for numbers in rows:
            x = np.array(numbers, "float32")[:, None]
            yield x, x

    spec = tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(make, output_signature=(spec, spec))


def test_the_weights_are_averaged_by_rows():
    # The weight goes down by the replica's own mean: by 1 and 4 in the first batch (rows 1 | 4), then by 2 and 6
    # (rows 1 3 | 6: the first replica has the longer piece). 3 rows against 2 since the last averaging.
    strategy = tfgpu.strategy("averaging", 2, every=2)
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)
    model.fit(batches([1, 4], [1, 3, 6]), verbose=0)
    assert copies(model.variables[0]) == pytest.approx([20 - (3 * 3 + 2 * 10) / 5] * 2, abs=1e-5)


def test_between_two_averagings_replicas_have_their_own_weights():
    strategy, seen = tfgpu.strategy("averaging", 2, every=3), []
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(copies(model.variables[0])))
    model.fit(batches([1, 4], [2, 3], [0, 1], [5, 7]), verbose=0, callbacks=[look])
    assert seen == [[19, 16], [17, 13], [14.5, 14.5], [9.5, 7.5]]
    assert copies(model.variables[0]) == [8.5, 8.5]  # an epoch's end averages
    assert averaging.traffic(model).rounds == 2


def test_the_outer_optimizer_gets_the_change_of_the_average():
    # The average goes from 20 to 16 (by 1 + 3 and 4 + 0, both 4); the outer step is 2 times that, then momentum 0.5.
    outer = keras.optimizers.SGD(2.0, momentum=0.5)
    strategy = tfgpu.strategy("averaging", 2, every=2, outer=outer)
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)
    model.fit(batches([1, 4], [3, 0]), verbose=0)
    assert copies(model.variables[0]) == pytest.approx([12, 12], abs=1e-5)
    model.fit(batches([1, 4], [3, 0]), verbose=0)  # velocity 0.5 * -8 - 2 * 4 = -12
    assert copies(model.variables[0]) == pytest.approx([0, 0], abs=1e-5)
    assert int(outer.iterations.numpy()) == 0  # each model has its own


def test_an_outer_step_begins_at_the_weights_that_were_set():
    strategy = tfgpu.strategy("averaging", 2, every=2, outer=keras.optimizers.SGD(1.0))
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)
    model.fit(batches([1, 4], [3, 0]), verbose=0)
    model.set_weights([np.full((1, 1), 100.0, "float32")])
    model.fit(batches([1, 4], [3, 0]), verbose=0)
    assert copies(model.variables[0]) == pytest.approx([96, 96], abs=1e-4)


@pytest.mark.slow
def test_synchronous_updates_come_first():
    strategy, seen = tfgpu.strategy("averaging", 2, every=2, after=2), []
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(copies(model.variables[0])))
    model.fit(batches([1, 4], [2, 3], [0, 1], [5, 7]), verbose=0, callbacks=[look])
    assert seen == [[17.5, 17.5], [15, 15], [15, 14], [8.5, 8.5]]
    assert averaging.traffic(model).rounds == 1


@pytest.mark.slow
def test_blocks_end_where_synchronous_training_ends():
    strategy = tfgpu.strategy("averaging", 2, every=2, after=2)
    model = line(strategy, lambda: keras.optimizers.Adam(1.0), weight=20.0)
    data = tf.data.Dataset.from_tensors(np.array([[1], [4]], "float32")).map(lambda x: (x, x)).repeat(6)
    tfgpu.Trainer(model, steps_per_call=6).fit(data, verbose=0)
    assert averaging.traffic(model).rounds == 2


@pytest.mark.slow
def test_an_update_is_several_batches_with_accumulation():
    strategy = tfgpu.strategy("averaging", 2, every=2, after=1)
    model = line(strategy, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), weight=20.0)
    model.fit(batches([1, 4], [1, 4], [1, 3], [1, 3], [1, 3], [1, 3]), verbose=0)
    # One synchronous update by 2.5, then two apart by 1 and 3.
    assert copies(model.variables[0]) == pytest.approx([20 - 2.5 - 4] * 2, abs=1e-5)
    assert averaging.traffic(model).rounds == 1


def test_adam_states_are_each_replica_s_own_until_the_epoch_s_end():
    strategy, seen = tfgpu.strategy("averaging", 2, every=2), []
    model = line(strategy, keras.optimizers.Adam, weight=20.0)
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(momentum()))

    def momentum():
        return copies(next(v for v in model.optimizer.variables if "momentum" in v.path))

    model.fit(batches([1, 4], [1, 4], [0, 2]), verbose=0, callbacks=[look])
    assert seen[1] == pytest.approx([0.19, 0.76]) and seen[2] == pytest.approx([0.171, 0.884])
    assert momentum() == pytest.approx([0.5275] * 2)


def test_an_overflow_is_skipped_where_it_is_seen():
    strategy = tfgpu.strategy("averaging", 2, every=1)
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**10)  # noqa: E731
    model = line(strategy, scaled, weight=20.0)
    model.fit(batches([1, 3e38]), verbose=0)
    assert copies(model.variables[0]) == pytest.approx([19.5] * 2)
    assert copies(model.optimizer.dynamic_scale) == [2.0**9] * 2
    assert copies(model.optimizer.inner_optimizer._iterations) == [1] * 2


def deep(strategy, optimizer, **compiled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        hidden = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization()])
        model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dropout(0.2), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **compiled)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("outer", [None, keras.optimizers.SGD(1.0)], ids=["plain", "outer"])
def test_every_update_with_sgd_is_one_device_s_training(outer):
    """Batches of 12 and one of 2 for four replicas, dropout and BatchNormalization."""
    found = []
    for strategy in (tfgpu.strategy("one_device"), tfgpu.strategy("averaging", 4, every=1, outer=outer)):
        model = deep(strategy, lambda: keras.optimizers.SGD(0.1))
        history = model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
        found.append((model.get_weights(), history["loss"] + history["accuracy"]))
    for weight, other in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=3e-6)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-6)


@pytest.mark.slow
def test_rounds_and_bytes():
    strategy = tfgpu.strategy("averaging", 4, every=2)
    model = deep(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    found = averaging.traffic(model)
    # 5 steps an epoch: 2 averagings and one at the end. 99 trainable numbers, 16 moving moments, the rows: float32.
    assert (found.steps, found.rounds, found.is_whole) == (10, 6, True)
    calls = (found.bytes - found.rounds * 4 * (99 + 16 + 1)) / 16  # loss, its count, accuracy, its count
    assert calls == int(calls) and 2 <= calls <= 10


def test_synchronous_training_counts_its_bytes_too():
    model = line(strategies.mirrored(2), lambda: keras.optimizers.SGD(1.0))
    with pytest.raises(InputError, match="not been trained"):
        averaging.traffic(model)
    data = tf.data.Dataset.from_tensors((X[:, :1], X[:, :1])).repeat(4)
    tfgpu.Trainer(model, steps_per_call=2).fit(data, verbose=0)
    # The first step is a call of its own, as it shows the logs' layout: 3 calls with the loss's sum and count.
    found = averaging.traffic(model)
    assert (found.steps, found.rounds) == (4, 0) and found.bytes in (4 * 4 + 2 * 8, 4 * 4 + 3 * 8)


def test_every_read_returns_the_average(tmp_path, caplog):
    strategy = tfgpu.strategy("averaging", 2, every=100)
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)
    x = np.array([[1], [4]], "float32")
    readers = {
        "get_weights": lambda: float(model.get_weights()[0][0, 0]),
        "predict": lambda: float(model.predict(x, verbose=0)[0, 0]),
        "evaluate": lambda: model.evaluate(x, x, verbose=0) / 2.5,
        "save": lambda: float(saved(model, tmp_path / "m.keras").get_weights()[0][0, 0]),
        "weights": lambda: float(loaded(model, tmp_path / "m.weights.h5")),
    }
    for at, (name, read) in enumerate(readers.items(), start=1):
        model.train_on_batch(x, x)
        with caplog.at_level(logging.INFO, logger="tfgpu"):
            assert read() == pytest.approx(20 - 2.5 * at), name
    assert "Averaged 5 times so far" in caplog.text


def saved(model, path):
    model.save(path)
    return keras.models.load_model(path, compile=False)


def loaded(model, path):
    model.save_weights(path)
    other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    other.load_weights(path)
    return other.get_weights()[0][0, 0]


def test_an_interrupted_run_can_be_read():
    strategy = tfgpu.strategy("averaging", 2, every=100)
    model = line(strategy, lambda: keras.optimizers.SGD(1.0), weight=20.0)

    def stop(batch, logs):
        raise KeyboardInterrupt

    stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches([1, 4], [1, 4]), verbose=0, callbacks=[stopping])
    assert copies(model.variables[0]) == [19, 16]
    assert model.get_weights()[0][0, 0] == 17.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "compiled"),
    [
        (lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=4), {}),
        (lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1), {"steps_per_execution": 3}),
        (lambda: keras.optimizers.Adam(0.01), {"run_eagerly": True}),
        (lambda: keras.optimizers.Adam(0.01), {"jit_compile": True}),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), {}),
    ],
    ids=["ema", "clip", "eager", "jit", "loss scale"],
)
def test_after_an_epoch_all_replicas_are_one_model(optimizer, compiled):
    model = deep(tfgpu.strategy("averaging", 4, every=3), optimizer, **compiled)
    losses = model.fit(X, Y, batch_size=12, epochs=4, verbose=0, validation_data=(X, Y)).history["loss"]
    for variable in [*model.variables, *model.optimizer.variables]:
        for copy in getattr(variable.value, "values", [])[1:]:
            np.testing.assert_array_equal(copy.numpy(), variable.value.values[0].numpy())
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_masks_and_own_statistics_wait_for_the_averaging():
    class Mean(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.mean.assign(keras.ops.mean(x))
            return x

    with tfgpu.strategy("averaging", 2, every=2).scope():
        model = keras.Sequential([keras.Input((1,)), Mean(), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", loss=lambda y, predicted: predicted)
    seen = []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(copies(model.layers[0].mean)))
    model.fit(batches([1, 4], [1, 3, 8]), verbose=0, callbacks=[look])
    # Last: 2 on three rows in all (1 | 1 3), 8 on two.
    assert seen == [[1, 4], pytest.approx([(3 * 2 + 2 * 8) / 5] * 2)]


def test_a_custom_loop_is_refused():
    strategy = tfgpu.strategy("averaging", 2)
    model = line(strategy, lambda: keras.optimizers.SGD(1.0))
    model.optimizer.build(model.trainable_variables)

    def step():
        model.optimizer.apply([tf.ones((1, 1))], model.trainable_variables)

    with pytest.raises(InputError, match="needs `model.fit`"):
        strategy.run(step)


WORKER = Cluster(workers=("127.0.0.1:1", "127.0.0.1:2"), rank=1, task_index=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "`every` must be a whole number of at least 1. Received: 0"),
        ({"every": 2.5}, "`every` must be a whole number of at least 1. Received: 2.5"),
        ({"after": -1}, "`after` must be a whole number of at least 0. Received: -1"),
        ({"outer": "sgd"}, "`outer` must be a Keras optimizer or a function"),
        ({"outer": keras.optimizers.SGD(0.7), "cluster": WORKER}, r"outer=lambda: keras.optimizers.SGD\(...\)"),
        ({"reduce_dtype": "float16"}, "`reduce_dtype` does not apply to `averaging`"),
        ({"top_k": 0.1}, "`top_k` does not apply to `averaging`"),
        ({"bytes_per_pack": -5}, "`bytes_per_pack` must be a whole number of at least 0"),
        ({"kind": "mirrored", "every": 2}, "`every` does not apply to `mirrored`"),
        ({"kind": "one_device", "outer": keras.optimizers.SGD()}, "`outer` does not apply to `one_device`"),
    ],
)
def test_what_does_not_apply_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        tfgpu.strategy(**{"kind": "averaging", **options})


def test_without_the_repairs_it_is_refused(monkeypatch):
    monkeypatch.setenv("TFGPU_REPAIR", "0")
    with pytest.raises(InputError, match="TFGPU_REPAIR=0"):
        tfgpu.strategy("averaging", 2)


def test_a_model_that_is_not_built_is_refused_with_an_outer_optimizer():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {}

    with tfgpu.strategy("averaging", 2, outer=keras.optimizers.SGD(0.7)).scope():
        model = Own([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.built = False
    with warnings.catch_warnings(), pytest.raises(InputError, match="Give it a keras.Input"):
        warnings.simplefilter("ignore")
        local_sgd.Averager(model, local_sgd.LocalSGD(2, outer=lambda: keras.optimizers.SGD(0.7)))


def test_it_is_described_by_its_name():
    assert strategies.describe(tfgpu.strategy("averaging", 2)) == {
        "kind": "averaging",
        "replicas": 2,
        "workers": 1,
        "devices": ["CPU:0", "CPU:1"],
    }


SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.asynchronous import averaging
every, devices = int(sys.argv[1]), int(sys.argv[2])
tfgpu.environment.set_logical_devices(devices)
outer = (lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)) if sys.argv[3] == "diloco" else None
alone = sys.argv[3] == "alone"
options = {"kind": "one_device"} if alone else dict(kind="averaging", devices=devices, every=every, outer=outer)
strategy = tfgpu.strategy(**options)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 6)).astype("float32"), rng.integers(0, 3, 50)
keras.utils.set_random_seed(3)
with strategy.scope():
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, validation_data=(x, y), verbose=0).history
model.train_on_batch(x[:12], y[:12])
weights = np.concatenate([w.ravel() for w in model.get_weights()]).tolist()
rounds = 0 if alone else averaging.traffic(model).rounds
print(json.dumps({"weights": weights, "loss": history["loss"] + history["val_loss"], "rounds": rounds}))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("every", "devices", "way"), [(1, 2, "plain"), (3, 1, "diloco")])
def test_workers_average(together, every, devices, way):
    first, second = together(SCRIPT, {"worker": 2}, every, devices, way).values()
    assert first == second
    assert first["rounds"] == (11 if every == 1 else 5)
    if every == 1:
        (alone,) = together(SCRIPT, {"worker": 1}, 1, 1, "alone").values()
        np.testing.assert_allclose(first["weights"], alone["weights"], rtol=0, atol=1e-6)
        assert first["loss"] == pytest.approx(alone["loss"], abs=1e-6)

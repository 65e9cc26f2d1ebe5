"""Workers that differ are found, and named, on all of them."""

import pytest

DRIFT = """
import json, logging, pathlib, sys, time
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.compat.variables import held
from tfgpu.consistency import settings

strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"], check_replicas=2)
rank, folder = strategy.extended._id_in_cluster, pathlib.Path(sys.argv[1])
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


def fresh():
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


class Rate(keras.callbacks.Callback):
    every_batch = True
    step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if rank == 1 and self.step == 3:
            held(self.model.optimizer.learning_rate).values[0].assign(0.5)


def fit(model, *callbacks):
    try:
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[Rate(), *callbacks])
    except tfgpu.errors.ReplicasDiffer as error:
        return str(error), error.variable, error.step


said = {}
said["stop"] = fit(fresh(), tfgpu.callbacks.Checkpoint(folder / "run", every_steps=2))
until = time.monotonic() + 100
while any(path.name.startswith(".") for path in (folder / "run").iterdir()) and time.monotonic() < until:
    time.sleep(0.1)  # the other worker still writes
said["saved"] = sorted(path.name for path in (folder / "run").iterdir())
settings.choose(strategy, settings.Checks(2, goes_on=True))
model = fresh()
said["mended"] = fit(model)
settings.choose(strategy, settings.Checks(1000))
for name, every in {"epoch": "epoch", "steps": 2}.items():
    path = str(folder / (name + "-{epoch}.weights.h5"))
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=every)
    said[name] = fit(fresh(), *([] if rank else [save]))  # on the chief alone
said["files"] = sorted(path.name for path in folder.glob("*.h5"))
said["rate"] = float(model.optimizer.learning_rate.numpy())
said["weights"] = np.concatenate([w.ravel() for w in model.get_weights()]).tobytes().hex()
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_drifts_is_named_on_all_and_nothing_is_saved_after(together, tmp_path):
    answers = together(DRIFT, {"worker": 2}, tmp_path, timeout=550)
    for answer in answers.values():
        message, variable, step = answer["stop"]
        assert "After step 4 of this `fit`, worker 0 and worker 1 differ from each other, first in" in message
        assert variable.endswith("learning_rate") and step == 4
        assert answer["saved"] == ["epoch-0000-step-0000002"]
        assert [answer[name][2] for name in ("epoch", "steps")] == [6, 4]
        assert answer["files"] == ["steps-1.weights.h5"]
        assert answer["mended"] is None and answer["rate"] == pytest.approx(1e-3)
    assert answers["worker0"]["weights"] == answers["worker1"]["weights"]


BEGIN = """
import json, logging, sys
import keras, numpy as np, tensorflow as tf
import tfgpu
from tfgpu.compat.variables import held
from tfgpu.consistency import settings

strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"])
rank = strategy.extended._id_in_cluster
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
y = np.arange(24) % 3
logged = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("tfgpu").addHandler(handler)
logging.getLogger("tfgpu").setLevel(logging.INFO)
callbacks = keras.callbacks


def fresh(trained=True, beta=0.9):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, trainable=trained)])
        model.compile(keras.optimizers.Adam(0.01, beta), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Picture(callbacks.Callback):
    every_batch = False


def fit(model, x=x, y=y, called=(), **options):
    options = {"epochs": 2, "verbose": rank, **options}
    data = {"x": x, "y": y, "batch_size": 8} if isinstance(x, np.ndarray) else {"x": x}
    return model.fit(**data, callbacks=[*called], **options)


def moved():
    model = fresh()
    copy = held(model.weights[0]).values[0]
    copy.assign(copy + rank)
    return model


drawn = [0]


def generator():
    for at in range(3):
        drawn[0] += 1
        yield x[8 * at : 8 * at + 8], y[8 * at : 8 * at + 8]


signature = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))
stream = tf.data.Dataset.from_generator(generator, output_signature=signature)
stopping = callbacks.EarlyStopping("loss", patience=3 + rank)
rates = callbacks.LearningRateScheduler([lambda epoch: 0.1, lambda epoch: 0.2][rank])
numbers = np.random.default_rng(rank).permutation(3)
said = {}
for name, act in {
    "epochs": lambda: fit(fresh(), epochs=2 + rank),
    "validation": lambda: fit(fresh(), validation_data=None if rank else (x, y)),
    "optimizer": lambda: fit(fresh(beta=0.9 - 0.1 * rank)),
    "patience": lambda: fit(fresh(), called=[stopping]),
    "schedule": lambda: fit(fresh(), called=[rates]),
    "on one": lambda: fit(fresh(), called=[callbacks.ReduceLROnPlateau("loss")] * rank),
    "model": lambda: fit(fresh(trained=not rank)),
    "weights": lambda: fit(moved()),
    "slices": lambda: fit(fresh(), x[rank::2], (y + 1)[rank::2] % 3),
    "labels": lambda: fit(fresh(), x, (y + rank) % 3),
    "pictures": lambda: fit(fresh(), called=[Picture()] * rank),
    "augmented": lambda: fit(fresh(), x + 0.1 * rank),
    "generator": lambda: fit(fresh(), stream, epochs=1),
}.items():
    logged.clear()
    try:
        act()
        said[name] = "; ".join(logged)
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
said["drawn"] = drawn[0]
model = fresh()
fit(model)
loops = model.train_function.loops
kinds = [kind for kind in loops.varying]
said["traces"] = [loops.loop(kind).experimental_get_tracing_count() for kind in kinds]
settings.choose(strategy, settings.Checks(0))
other = fresh()
fit(other)
said["same"] = all(np.array_equal(*pair) for pair in zip(model.get_weights(), other.get_weights()))
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_workers_that_begin_differently_are_told_so_on_all(together):
    answers = together(BEGIN, {"worker": 2}, timeout=550)
    expected = {
        "epochs": "The workers called `fit`, but with different arguments: epochs=2 on worker 0 (",
        "validation": "The workers called `fit`, but with different arguments: validation_data=given on worker 0 (",
        "optimizer": "arguments of `compile`: `optimizer.config.beta_1` is 0.9 on worker 0, 0.8 on worker 1.",
        "patience": "callbacks: `EarlyStopping.patience` is 3 on worker 0, 4 on worker 1.",
        "schedule": "callbacks: `LearningRateScheduler.schedule` is ",
        "on one": "callbacks: worker 0 does not have ReduceLROnPlateau, worker 1 has ReduceLROnPlateau.",
        "model": "model: `variable 0000` is (4, 3) float32 on worker 0, (4, 3) float32, not trained on worker 1.",
        "weights": "After step 0 of this `fit`, worker 0 and worker 1 differ from each other, first in 'sequential",
        "slices": "The workers differ in their first batch: the inputs are float32 (8, 4) ",
        "labels": "The workers differ in their first batch: the labels are int64 (8,) ",
    }
    for answer in answers.values():
        for name, words in expected.items():
            assert words in answer[name], answer[name]
            assert answer[name].startswith("ReplicasDiffer: " if name == "weights" else "InputError: ")
        assert "worker 0 has none; worker 1 has Picture" in answer["pictures"]
        assert "have the same labels but different inputs" in answer["augmented"]
        assert "differ" not in answer["generator"] and answer["drawn"] == 3
        assert answer["traces"] == [1] and answer["same"]

"""One of two workers does what the other does not: both do the same, or both get one error that names it."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BEGIN = """
import json, os, sys, threading
os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TF_CPP_MIN_LOG_LEVEL"] = "", "2"
import keras, numpy as np, tensorflow as tf, tfgpu
from tfgpu.errors import InputError, MachineError

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = tfgpu.strategy("multi_worker")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

def made():
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model

def data(rows=64, off=False):
    found = tf.data.Dataset.from_tensor_slices((x[:rows], x[:rows, :1])).batch(8)
    if off:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        found = found.with_options(options)
    return found

class Rows(keras.utils.PyDataset):
    def __init__(self, count, **how):
        super().__init__(**how)
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, at):
        return x[8 * at : 8 * at + 8], x[8 * at : 8 * at + 8, :1]

class Epoch(keras.callbacks.Callback):
    def __init__(self, act):
        super().__init__()
        self.act = act
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.act(self.model)

class Batch(Epoch):
    def on_epoch_end(self, epoch, logs=None):
        pass
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.act(self.model)

def stop(model):
    model.stop_training = True

def fail(model):
    raise ValueError("of my own")

def fitted(source=None, callbacks=(), **how):
    model = made()
    rows = model.fit(data() if source is None else source, callbacks=list(callbacks), verbose=0, **{"epochs": 3, **how})
    return {name: values for name, values in rows.history.items()}, int(model.optimizer.iterations)

def error_of(act):
    try:
        return str(act())
    except (InputError, MachineError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

found = {}
"""
TOGETHER = """
only = lambda kind, act, rank=1: [kind(act)] if ME == rank else []
def lengths(history):
    return len(history["loss"])
history, found["stops after an epoch"] = fitted(callbacks=only(Epoch, stop))
found["epochs"] = lengths(history)
found["stops after a step"] = fitted(callbacks=only(Batch, stop))[1]
found["all stop after a step"] = fitted(callbacks=[Batch(stop)])[1]
# `x` has 8 batches; without sharding a worker gives 4 rows to each, so one of 24 rows has 6 and one of 64 has 16.
found["own data"] = fitted(data(64 if ME else 24, off=True))
found["processes"] = fitted(Rows(8, workers=2, use_multiprocessing=True))
found["no processes"] = fitted(Rows(8))
found["arguments"] = error_of(lambda: fitted(epochs=3 + ME))
found["validates"] = error_of(lambda: fitted(**({} if ME else {"validation_data": data(16)})))
test = lambda model: model.evaluate(data(16), verbose=0)
found["evaluates"] = error_of(lambda: fitted(callbacks=only(Epoch, test, 0)))
found["predicts"] = error_of(lambda: made().predict(x, verbose=0) if ME else fitted())
found["lengths"] = error_of(lambda: fitted(Rows(5 + ME)))
found["raises"] = error_of(lambda: fitted(callbacks=only(Epoch, fail)))
found["first raises"] = error_of(lambda: fitted(callbacks=only(Epoch, fail, 0)))
found["again"] = fitted()[1]
print(json.dumps(found))
"""


def test_they_stop_together_or_are_told_why_not(together):
    one, other = together(BEGIN + TOGETHER, {"worker": 2}, timeout=550).values()
    assert one.pop("raises").startswith("MachineError: worker 1 (")
    assert other.pop("raises") == "ValueError: of my own" == one.pop("first raises")
    assert other.pop("first raises").startswith("MachineError: worker 0 (")
    assert one == other  # the same weights, logs and errors
    assert (one["stops after an epoch"], one["epochs"]) == (16, 2)
    assert (one["stops after a step"], one["all stop after a step"], one["again"]) == (5, 4, 24)
    assert one["own data"][1] == 3 * 16
    assert one["processes"] == one["no processes"] and one["processes"][1] == 24
    expected = {
        "arguments": "epochs=3 on worker 0",
        "validates": "validation_data=given on worker 0",
        "evaluates": "called `evaluate` (<string>:",
        "predicts": "worker 1 (",
        "lengths": "batches=5 on worker 0",
    }
    for name, text in expected.items():
        assert one[name].startswith("InputError: ") and text in one[name] and "(<string>:" in one[name], one[name]


APART = {
    # The data of worker 1 ends, which is known only when it does.
    "data": """
source = data(64 - 32 * ME).filter(lambda x, y: True)
found["error"] = error_of(lambda: fitted(source))
""",
    # Worker 1 fails between two steps, while worker 0 waits for it in the next.
    "raises": """
found["error"] = error_of(lambda: fitted(callbacks=[Batch(fail)] if ME else []))
""",
    "loads": """
def act(model):
    if ME:
        with strategy.scope():
            keras.layers.Dense(3).build((None, 4))
found["error"] = error_of(lambda: fitted(callbacks=[Epoch(act)]))
""",
}
SAID = {
    "data": ("InputError: The data of worker 1 (", ") has ended, while worker 0 ("),
    "raises": ("MachineError: worker 1 (", "left `fit` by ValueError: of my own (<string>:"),
    "loads": ("InputError: The workers do different things: worker 0 (", "worker 1 ("),
}
WAIT = "\nprint(json.dumps(found), flush=True)\n"


@pytest.mark.parametrize("kind", APART)
def test_a_worker_that_waits_in_vain_hears_of_it(kind, together):
    answers = together(BEGIN + APART[kind] + WAIT, {"worker": 2}, timeout=550)
    one, other = (answers[name]["error"] for name in ("worker0", "worker1"))
    begin, within = SAID[kind]
    assert one.startswith(begin) and within in one
    assert other == ("ValueError: of my own" if kind == "raises" else one)


LOOP = """
model, source = made(), iter(strategy.experimental_distribute_dataset(data().repeat()))

@tf.function
def step(source):
    def one(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows[0]) - rows[1]) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    strategy.run(one, (next(source),))

first = int(sys.argv[1])
try:
    for at in range(10**6):
        step(source)
        if at == 20 and ME == first:
            break
except tf.errors.OpError as error:
    from tfgpu.core.workers import watch
    watch.note_error(error)
    found["notes"] = error.__notes__
print(json.dumps(found), flush=True)
"""


@pytest.mark.parametrize("first", [0, 1])
def test_a_loop_of_ones_own_ends_when_another_script_has_ended(first, together):
    answers = together(BEGIN + LOOP, {"worker": 2}, first, timeout=550)
    (note,) = answers[f"worker{1 - first}"]["notes"]
    assert answers[f"worker{first}"] == {}
    assert f"worker {first} (" in note and "ended its script" in note and "(<string>:" in note

"""`max_staleness`: how many updates come between the weights that a step reads and its own update, one by one."""

import numpy as np
import pytest

from tfgpu import strategies
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError

COUNT, SLOW, WAIT_S, LIMIT_S = 24, 9, 2.0, 400.0
SCRIPT = (
    f"""
import json, sys
import keras, numpy as np, tensorflow as tf
import tfgpu

COUNT, SLOW, WAIT_S, LIMIT_S = {COUNT}, {SLOW}, {WAIT_S}, {LIMIT_S}
bound = json.loads(sys.argv[1])
enough = 5 if bound is None else bound
strategy = tfgpu.strategy("parameter_server", max_staleness=bound)
"""
    + """
class Counts(keras.Model):
    # Its one weight grows by 1 with each update, so that it says how many there were. Between reading it and the
    # update, the slow batch waits for `enough` updates of others, however long they take, and some seconds for more.
    def __init__(self):
        super().__init__()
        self.updates = self.add_weight(shape=(), initializer="zeros", name="updates")
        frozen = dict(shape=(COUNT,), initializer="zeros", trainable=False)
        self.before, self.after = self.add_weight(name="before", **frozen), self.add_weight(name="after", **frozen)

    def train_step(self, data):
        number = tf.cast(data[0], "int32")
        is_slow = tf.reduce_all(number == SLOW)
        with tf.GradientTape() as tape:
            read = tf.convert_to_tensor(self.updates)
            loss = -read
        gradient = tape.gradient(loss, self.updates.value)
        with tf.control_dependencies([read]):
            begun = tf.timestamp()

            def waits(now):
                lacks = tf.convert_to_tensor(self.updates) < read + enough
                return is_slow & ((now < begun + WAIT_S) | (lacks & (now < begun + LIMIT_S)))

            waited = tf.while_loop(waits, lambda _: [tf.timestamp()], [begun])
        with tf.control_dependencies(waited):
            gradient = tf.identity(gradient)
        self.optimizer.apply([gradient], [self.updates])
        place = tf.one_hot(number, COUNT)
        self.before.assign_add(place * read)
        self.after.assign_add(place * tf.convert_to_tensor(self.updates))
        return {"loss": loss}

def counted(steps):
    with strategy.scope():
        model = Counts()
        model.compile(keras.optimizers.SGD(1.0))
    tfgpu.Trainer(model, steps_per_call=steps).fit(tf.data.Dataset.range(COUNT).batch(1), verbose=0)
    return {v.path.split("/")[-1]: v.numpy().tolist() for v in model.weights}

# A gradient that does not depend on the weights: whatever the order, they end where one device ends.
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 5)).astype("float32")
y = (x.sum(1) > 0).astype("int32")

def linear():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.mean(p * [1.0, 2.0, -1.0], -1))
    return model

def learns():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model

def trained(make, **options):
    model = make()
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **options).history
    return model, history

alone, _ = trained(linear, epochs=3)
with strategy.scope():
    spread, _ = trained(linear, epochs=3)
    learned, history = trained(learns, epochs=8)
apart = max(float(np.abs(a - b).max()) for a, b in zip(alone.get_weights(), spread.get_weights(), strict=True))
moved = max(float(np.abs(a - b).max()) for a, b in zip(linear().get_weights(), spread.get_weights(), strict=True))
print(json.dumps({
    "one": counted(1), "two": counted(2), "apart": apart, "moved": moved, "loss": history["loss"],
    "iterations": [int(spread.optimizer.iterations), int(learned.optimizer.iterations)],
}), flush=True)
"""
)


@pytest.fixture
def trained(group):
    """What the chief of so many workers says under a bound."""

    def run(bound, workers):
        processes = group(SCRIPT, chief=1, worker=workers, ps=1)
        processes.start_all("null" if bound is None else bound)
        return processes.answer()

    return run


def ages(found):
    """How many updates of others came between a batch's reading and its own update."""
    assert found["updates"] == COUNT
    return np.array(found["after"]) - np.array(found["before"]) - 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("bound", "workers"), [(0, 2), (1, 2), (2, 3)])
def test_no_gradient_is_older_than_the_bound(bound, workers, trained):
    answer = trained(bound, workers)
    found = answer["one"]
    old = ages(found)
    assert old.min() >= 0 and old.max() <= 2 * bound, old
    # While the slow batch waits, the `bound` batches behind it are done, and the next one does not start.
    assert bound <= old[SLOW] <= 2 * bound, old
    behind = np.array(found["after"])[SLOW + 1 : SLOW + 1 + bound]
    assert (behind < found["after"][SLOW]).all(), found
    assert min(found["before"][SLOW + 1 + bound :]) >= found["after"][SLOW], found
    # With closures of two steps the bound is in closures.
    assert ages(answer["two"]).max() <= 2 * 2 * bound, answer["two"]
    assert answer["apart"] < 1e-5 < 1e-2 < answer["moved"], answer
    assert answer["iterations"] == [3 * 24, 8 * 24]
    assert answer["loss"][-1] < 0.5 * answer["loss"][0]


@pytest.mark.processes
@pytest.mark.slow
def test_without_a_bound_the_others_continue(trained):
    old = ages(trained(None, 2)["one"])
    assert old[SLOW] > 4, old  # more than a bound of 2 lets through


PS = dict(workers=("localhost:1", "localhost:2"), parameter_servers=("localhost:3",), has_chief=True)


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_non_integers_are_refused(value):
    words = rf"`max_staleness` must be a whole number of at least 0. Received: {value!r}"
    with pytest.raises(InputError) as caught:
        strategies.parameter_server(max_staleness=value, cluster=Cluster(**PS, rank=0, task_type="chief"))
    assert words in str(caught.value)

"""What each worker runs in `test_workers.py`: trainings on what Python makes, whole on each worker and dealt."""

import collections
import json
import logging
import sys

import keras
import numpy as np

import tfgpu
from tfgpu.core.dealing import sharing

logged, calls = [], collections.Counter()
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("tfgpu").addHandler(handler)
logging.getLogger("tfgpu").setLevel(logging.INFO)
strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"], check_replicas=4)
X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = (np.arange(22) % 3).astype("int32")


class Batches(keras.utils.PyDataset):
    """22 rows in batches of 4, the last one of 2, in a new order after each epoch."""

    def __init__(self, rows=22, **options):
        super().__init__(**options)
        self.order = np.arange(rows)

    def __len__(self):
        return -(-len(self.order) // 4)

    def part(self, index, start, stop):
        at = self.order[4 * index : 4 * index + 4][start:stop]
        return {"a": X[at], "b": X[at, :2] * 2}, Y[at], np.float32(1 + at % 2)

    def __getitem__(self, index):
        calls["whole"] += 1
        return self.part(index, 0, 4)

    def on_epoch_end(self):
        calls["ends"] += 1
        np.random.shuffle(self.order)


class Own(Batches):
    def rows(self, index, start, stop):
        calls["rows"] += min(stop, 4) - start
        return self.part(index, start, stop)


class Augmented(Batches):
    def __getitem__(self, index):
        x, y, weight = super().__getitem__(index)
        return {name: each + np.random.normal(size=each.shape) for name, each in x.items()}, y, weight


class Fixed(Batches):
    """In one order: what is read ahead at the end of an epoch of some steps depends on how far it was read."""

    def on_epoch_end(self):
        calls["ends"] += 1


class Endless(Fixed):
    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        calls["whole"] += 1
        return self.part(index % 5, 0, 4)


class NoWeights(Batches):
    def __getitem__(self, index):
        return super().__getitem__(index)[:2]


def generated():
    at = 0
    while True:
        calls["generated"] += 1
        yield tuple(Batches().part(at % 5, 0, 4))
        at += 1


def made():
    with strategy.scope():
        given = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), name="b")}
        hidden = keras.layers.Dense(3, "tanh")(keras.layers.Concatenate()(list(given.values())))
        model = keras.Model(given, keras.layers.Dense(3)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"], jit_compile=False)
    return model


def bits(values):
    return "".join(np.asarray(value).tobytes().hex() for value in values)


def train(way, make, **options):
    sharing.choose(strategy, way)
    logged.clear()
    keras.utils.set_random_seed(0)
    model.set_weights(weights)
    data = make()
    validation = options.pop("validation", None)
    calls.clear()
    history = model.fit(
        data, verbose=0, validation_data=None if validation is None else validation(), **{"epochs": 2, **options}
    )
    made = dict(calls)
    found = [] if validation is None else model.evaluate(validation(), verbose=0)
    predicted = [] if validation is None else model.predict(validation(), verbose=0)
    losses = bits([*model.get_weights(), *history.history.values(), found, predicted])
    return {"bits": losses, "made": made, "log": [text for text in logged if "worker" in text]}


CASES = {
    "turns": (Batches, {"validation": Batches}),
    "in order": (Batches, {"shuffle": False}),
    "threads": (lambda: Batches(workers=2, max_queue_size=3), {}),
    "processes": (lambda: Batches(workers=2, use_multiprocessing=True), {}),
    "class weights": (NoWeights, {"class_weight": {0: 1.0, 1: 2.0, 2: 3.0}}),
    "own rows": (Own, {"validation": Own}),
    "own rows by threads": (lambda: Own(workers=2), {}),
    "endless": (Endless, {"steps_per_epoch": 4, "epochs": 3}),
    "endless by threads": (lambda: Endless(workers=2), {"steps_per_epoch": 4, "epochs": 3}),
    "part of an epoch": (Fixed, {"steps_per_epoch": 4, "epochs": 3}),
    "generator": (generated, {"steps_per_epoch": 4, "epochs": 3}),
    "augmented": (Augmented, {}),
}


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    said, model = {}, made()
    weights = model.get_weights()
    for name in sys.argv[1].split(","):
        make, options = CASES[name]
        for way in ("everywhere", "deal"):
            said[f"{name} {way}"] = train(way, make, **options)
            print(name, way, said[f"{name} {way}"]["made"], file=sys.stderr)
    print(json.dumps(said))

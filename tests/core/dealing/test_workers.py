"""Workers train on what Python makes as they do when each makes whole batches, and each makes its share."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1500)]
TRAININGS = (Path(__file__).parent / "trainings.py").read_text()


def trained(together, names, workers):
    answers = together(TRAININGS, {"worker": workers}, names, timeout=1400)
    return [answers[f"worker{rank}"] for rank in range(workers)]


def made(said, name, what="whole"):
    """How often it was made in whole batches on each worker, and dealt; without the two that Keras looks at."""
    return [[each[f"{name} {way}"]["made"].get(what, 0) for each in said] for way in ("everywhere", "deal")]


@pytest.mark.parametrize("workers", [2, 3])
def test_training_is_the_same_to_the_bit_and_each_worker_makes_its_share(together, workers):
    names = ["turns", "in order", "threads", "class weights", "own rows", "endless", "part of an epoch", "generator"]
    names.append("augmented")
    names += ["processes", "own rows by threads", "endless by threads"] if workers == 2 else []
    said = trained(together, ",".join(names), workers)
    for name in names:
        for each in said:
            assert each[f"{name} deal"]["bits"] == said[0][f"{name} deal"]["bits"], name
            # What draws at random gives something else each time, but the same to all workers.
            assert name == "augmented" or each[f"{name} deal"]["bits"] == each[f"{name} everywhere"]["bits"], name
    whole, dealt = made(said, "in order")  # two epochs of 6 batches
    assert whole == [2 + 12] * workers and dealt == [2 + 12 // workers] * workers
    whole, dealt = made(said, "turns")  # as many of validation
    assert whole == [4 + 24] * workers and dealt == [4 + 24 // workers] * workers
    whole, dealt = made(said, "own rows", "rows")
    assert whole == [0] * workers and sum(dealt) <= 4 * 22 * 1.6 + 3 * 3 * 4  # stand-in rows, and the comparison's
    whole, dealt = made(said, "generator", "generated")
    assert all(count >= 12 for count in [*whole, dealt[0]]) and dealt[1:] == [2] * (workers - 1)
    turns = f"The {workers} workers take turns making the batches of `Batches`, and each sends the others their rows."
    assert turns in said[0]["in order deal"]["log"] and not said[1]["in order deal"]["log"]
    assert any("with the method `rows`" in text for text in said[0]["own rows deal"]["log"])
    assert any("Only this worker reads the generator" in text for text in said[0]["generator deal"]["log"])
    assert any('python_data="everywhere"' in text for text in said[0]["in order everywhere"]["log"])


ENDS = """
import json, logging, os, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfgpu

strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"])
rank = strategy.cluster_resolver.task_id


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 7 and rank == 1 and sys.argv[1] == "raises":
            raise ValueError("a bad picture")
        if index == 7 and rank == 1 and sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "differ":
            return np.full((6, 2), rank, "float32"), np.ones(6)
        return np.full((6, 2), index, "float32"), np.random.normal(size=6)


class Wrong(Batches):
    def rows(self, index, start, stop):
        x, y = self[index]
        return x[start:stop], (y + (sys.argv[1] == "wrong"))[start:stop]


class Fixed(Wrong):
    def __getitem__(self, index):
        return np.full((6, 2), index, "float32"), np.arange(6.0)


with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
error = None
try:
    model.fit(Fixed() if sys.argv[1] == "wrong" else Batches(), epochs=2, shuffle=False, verbose=0)
except Exception as found:
    error = found
print(json.dumps([type(error).__name__, str(error)]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("case", "workers", "words"),
    [
        ("raises", 3, r"Batch 7 of `Batches` cannot be made on worker 1 \(.*\): ValueError: a bad picture"),
        ("differ", 2, r"`x` of batch 0 of `Batches` is not the same on worker 1 .* as on worker 0"),
        ("wrong", 2, r"`Fixed.rows` and `__getitem__` return different rows of batch 0: the first array .* is `y`"),
    ],
)
def test_all_end_with_one_error(together, case, workers, words):
    answers = together(ENDS, {"worker": workers}, case)
    assert len({tuple(each) for each in answers.values()}) == 1, answers
    kind, text = answers["worker0"]

    assert kind == "InputError" and re.search(words, text), answers


def test_random_batches_are_no_error(together):
    answers = together(ENDS, {"worker": 2}, "nothing")
    assert set(map(tuple, answers.values())) == {("NoneType", "None")}


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_is_killed_ends_the_others(together, workers):
    answers = together(ENDS, {"worker": workers}, "killed", wait_for="worker0")
    kind, text = answers["worker0"]
    assert kind == "MachineError" and "worker 1" in text and "no longer answers" in text

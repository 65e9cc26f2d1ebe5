"""Destroying iterators: a thread waits for each, none is forgotten, and the weights do not change.

Data that reaches out of itself ends where it does in stock Keras.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import iterator_end
from tfgpu.core.feed import reach


def build(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def data():
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(24, seed=1).batch(4).prefetch(2)


def own(strategy, source):
    """Data that the user has distributed: TensorFlow's own iterator, one of several devices each."""
    return strategy.experimental_distribute_dataset(source)


class Ends:
    """The iterators that are made meanwhile, and what each thread that waited for one of them had before and after.

    Threads of others' iterators, which the garbage collection of this moment may end, count for nothing.
    """

    def __init__(self, monkeypatch):
        self.iterators, self._held, self._seen, self._depth = [], [], [], 0
        resources, let_go = iterator_end.resources, iterator_end._release

        def listed(iterator):
            self._depth += 1
            found = resources(iterator)  # asks the same of the iterators that this one is made of
            self._depth -= 1
            if not self._depth:
                self.iterators.append(weakref.ref(iterator))
                self._held.append(found)
            return found

        def watched(held):
            before = len(held)
            let_go(held)
            self._seen.append((held, before, len(held), threading.current_thread() is threading.main_thread()))

        monkeypatch.setattr(iterator_end, "resources", listed)
        monkeypatch.setattr(iterator_end, "_release", watched)

    def all(self):
        """Of each iterator what its threads had before and after, and whether one was the main thread."""
        _wait()
        return [[facts for held, *facts in self._seen if held is mine] for mine in self._held]


@pytest.fixture
def ends(monkeypatch):
    yield Ends(monkeypatch)
    _wait()


def _wait():
    gc.collect()
    assert iterator_end.wait()


@pytest.mark.sample("left-fit-mirrored", "whole-fit-one_device")
@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("is_left", [True, False], ids=["left", "whole"])
def test_a_thread_waits_for_each_iterator(kind, method, is_left, ends):
    strategy = tfgpu.strategy(kind, devices=2 if kind == "mirrored" else None)
    model = build(strategy)
    source = data().map(lambda x, y: x) if method == "predict" else data()
    how = {"steps_per_epoch" if method == "fit" else "steps": 3} if is_left else {}
    getattr(model, method)(source.repeat() if is_left else source, verbose=0, **how)
    assert ends.iterators and ends.all() == [[[1, 0, False]]] * len(ends.iterators)
    assert not [each for each in ends.iterators if each() is not None]


@pytest.mark.slow
def test_data_that_the_user_has_distributed(ends):
    strategy = tfgpu.strategy("mirrored", devices=2)
    model = build(strategy)
    model.fit(own(strategy, data()), epochs=2, verbose=0)
    # Of each iterator: one a device, and what deals to them.
    assert ends.iterators and ends.all() == [[[3, 0, False]]] * len(ends.iterators)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
def test_the_weights_are_those_without_it(kind, monkeypatch):
    found = []
    for _ in range(2):
        strategy = tfgpu.strategy(kind, devices=2 if kind == "mirrored" else None)
        model = build(strategy)
        history = model.fit(data(), validation_data=data(), epochs=3, verbose=0).history
        found.append([*model.get_weights(), np.array([*history.values()])])
        monkeypatch.setattr(iterator_end, "resources", lambda iterator: [])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_no_iterator_of_tf_data():
    assert iterator_end.resources(iter([1])) == [] and list(iterator_end.Data([1, 2])) == [1, 2]


def features():
    return np.random.default_rng(0).normal(size=(4, 4)).astype("float32")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_generator_of_python_does_not_run_once_a_method_has_returned(kind, method):
    model, running, made = build(tfgpu.strategy(kind, devices=2 if kind == "mirrored" else None)), [0], []

    def batches():
        while True:
            assert running[0] == 0
            running[0] += 1
            time.sleep(0.02)
            made.append(features())
            running[0] -= 1
            yield made[-1], made[-1][:, :1]

    generator = batches()  # of which two iterators at a time raise "generator already executing"
    for _ in range(4):
        getattr(model, method)(generator, **{"steps_per_epoch" if method == "fit" else "steps": 2}, verbose=0)
        count = len(made)
        time.sleep(0.1)
        assert running == [0] and len(made) == count


@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
def test_a_cache_file_can_be_rewritten_at_once(kind, tmp_path):
    model = build(tfgpu.strategy(kind, devices=2 if kind == "mirrored" else None))
    x = features()
    source = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).cache(str(tmp_path / "cache")).batch(1)
    found = [model.evaluate(source, steps=3, verbose=0) for _ in range(3)]  # no one reads all of it: none is kept
    assert len(set(found)) == 1
    model.evaluate(source, verbose=0)


def _generated():
    return tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int64))


def _counted():
    counter = tf.Variable(0, dtype=tf.int64)
    return tf.data.Dataset.range(3).map(lambda n: n + counter.assign_add(1))


def _identity(n):
    return n


REACHING = {
    "generator": _generated,
    "generator within": lambda: tf.data.Dataset.range(3).interleave(lambda n: _generated()),
    "generator beside": lambda: tf.data.Dataset.zip(tf.data.Dataset.range(3), _generated()).batch(2).prefetch(2),
    "Python": lambda: tf.data.Dataset.range(3).map(lambda n: tf.py_function(_identity, [n], tf.int64)),
    "Python in a branch": lambda: tf.data.Dataset.range(3).map(
        lambda n: tf.cond(n > 1, lambda: n, lambda: tf.numpy_function(_identity, [n], tf.int64))
    ),
    "variable": _counted,
    "print": lambda: tf.data.Dataset.range(3).map(lambda n: (tf.print(n), n)[1]),
    "file": lambda: tf.data.Dataset.range(3).cache("never-written").batch(2),
    "snapshot": lambda: tf.data.Dataset.range(3).snapshot("never-written"),
    "no dataset": lambda: [1, 2],
}
CONTAINED = {
    "arrays": data,
    "memory": lambda: tf.data.Dataset.range(3).cache().repeat(2),
    "random": lambda: tf.data.Dataset.range(3).map(lambda n: tf.random.uniform([]), num_parallel_calls=2),
    "files": lambda: tf.data.Dataset.list_files(__file__).interleave(tf.data.TextLineDataset),
    "pure Python": lambda: tf.data.Dataset.range(3).map(
        lambda n: tf.numpy_function(_identity, [n], tf.int64, stateful=False)
    ),
    "digits": lambda: tfgpu.data.load("digits", global_batch=64, augment="auto").train,
}


@pytest.mark.parametrize("what", REACHING)
def test_data_with_side_effects(what):
    assert reach.reaches_out(REACHING[what]())


@pytest.mark.parametrize("what", CONTAINED)
def test_data_without_side_effects(what):
    assert not reach.reaches_out(CONTAINED[what]())


@pytest.mark.sample(1)
@pytest.mark.parametrize("distribute", ["dataset", "function"])
@pytest.mark.parametrize("reaches", [False, True], ids=["contained", "reaching"])
def test_distributed_data_is_judged_by_its_datasets(distribute, reaches, ends):
    strategy = tfgpu.strategy("mirrored", devices=2)
    source = (_generated() if reaches else tf.data.Dataset.range(3)).batch(2)
    if distribute == "dataset":
        found = own(strategy, source)
    else:
        found = strategy.distribute_datasets_from_function(lambda worker: source)
    list(found)  # as a loop of the user's own reads it
    assert bool(ends.all()) is not reaches


def test_the_iterators_of_several_devices_end_at_once_and_their_source_last():
    together, ended = threading.Barrier(3, timeout=60), []

    class Held:
        """Ends only while the others of its kind end."""

        def __init__(self, *, is_source=False):
            self.is_source = is_source

        def __del__(self):
            if not self.is_source:
                together.wait()
            ended.append(self.is_source)

    iterator_end._release([Held(), Held(), Held(), Held(is_source=True)])
    assert ended == [False, False, False, True]


def test_no_python_runs_when_an_iterator_is_destroyed():
    """What an interrupt raised there would be lost: Ctrl-C would do nothing."""
    iterator = iter(iterator_end.Data(data()))
    next(iterator)
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del iterator
    finally:
        sys.setprofile(None)
    assert not called
    _wait()


def test_data_ends_even_if_no_thread_can_start(ends, monkeypatch):
    iterator_end._waiting()
    start = threading.Thread.start

    def refuse(self):
        if self.name == iterator_end.NAME:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    list(iterator_end.Data(data()))
    assert ends.all() == [[[1, 0, False]]]


def _ended(script):
    """What a process printed that ended well."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_process_ends_whose_iterator_is_left_to_the_last():
    script = (
        "import keras, numpy as np, tensorflow as tf, tfgpu\n"
        "from tfgpu.core import iterator_end\n"
        "data = iterator_end.Data(tf.data.Dataset.range(10**6).map(lambda x: x, num_parallel_calls=-1).prefetch(2))\n"
        "left = iter(data)\n"
        "[next(left) for _ in range(1000)]\n"
        "print('done', flush=True)\n"
    )
    assert _ended(script) == "done\n"


@pytest.mark.slow
def test_the_interpreter_waits_for_an_iterator_that_is_being_destroyed():
    """A thread that comes back from C++ when the interpreter has ended calls std::terminate: the exit code is 134."""
    script = (
        "import time, tensorflow as tf\n"
        "from tfgpu.core import iterator_end\n"
        "release = iterator_end._release\n"
        "iterator_end._release = lambda held: (time.sleep(3), release(held), print('destroyed', flush=True))\n"
        "list(iterator_end.Data(tf.data.Dataset.range(10)))\n"
    )
    assert _ended(script) == "destroyed\n"

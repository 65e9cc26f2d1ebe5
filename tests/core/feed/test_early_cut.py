"""A user's dataset, cut for a worker: its rows are those of the whole batches, to the bit, its work is its share."""

import collections
import contextlib
import dataclasses
import re
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core import worker_rows
from tfgpu.core.feed import early_cut, notes
from tfgpu.core.worker_rows import Ranges

ROWS = 23
RANGES = {
    "2x1": [Ranges((0,), 2), Ranges((1,), 2)],
    "2x2": [Ranges((0, 2), 4), Ranges((1, 3), 4)],
    "3x1": [Ranges((0,), 3), Ranges((1,), 3), Ranges((2,), 3)],
}
calls = collections.Counter()


def counted(name):
    """A function of an element, or of a batch, that counts the rows that it gets. TensorFlow takes it for stateless."""

    def count(value):
        calls[name] += 1 if value.ndim == 1 else len(value)
        return value

    def function(x, *rest):
        made = tf.numpy_function(count, [x], x.dtype, stateful=False)
        return tf.ensure_shape(made, x.shape), *rest

    return function


def source(rows=ROWS):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, np.arange(rows) % 5))


def decoded(dataset, **how):
    return dataset.map(counted("decode"), **how).map(lambda x, y: (tf.exp(x), y))


def shuffled(dataset=None):
    return (source() if dataset is None else dataset).shuffle(9, seed=4)


def by_rows(x, y):
    return tf.cast(x, tf.float64) * 2 + tf.constant([1.0, 2.0, 3.0], tf.float64), tf.one_hot(y, 5)


def by_element(x, y):
    return tf.exp(x), y


def serialized():
    """Examples of TFRecord files, with lists of several lengths."""

    def one(at):
        feature = {
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[at / 7, at])),
            "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=range(at % 4))),
            "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n" * at])),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

    return tf.data.Dataset.from_tensor_slices([one(at) for at in range(ROWS)])


def parsed(ids=None):
    """A function of serialized examples, with a feature of another kind if it is given."""
    fixed = {"x": tf.io.FixedLenFeature([2], "float32"), "name": tf.io.FixedLenFeature([], "string")}
    fixed["absent"] = tf.io.FixedLenFeature([3], "int64", [1, 2, 3])
    return lambda examples: tf.io.parse_example(examples, fixed if ids is None else fixed | {"ids": ids})


def as_dict(x, y):
    return {"pictures": x, "more": (x[:2], y)}, y


def arrays(rows=ROWS, batch=5):
    """As Keras makes batches of arrays."""
    x, y = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32"), np.arange(rows)
    places = tf.data.Dataset.range(1).map(lambda _: tf.random.shuffle(tf.range(rows), seed=3))
    batches = places.flat_map(lambda at: tf.data.Dataset.from_tensor_slices(at).batch(batch, rows % batch == 0))
    zipped = tf.data.Dataset.zip((batches, tf.data.Dataset.from_tensors((x, y)).repeat()))
    return zipped.map(lambda at, data: tuple(tf.gather(each, at) for each in data), num_parallel_calls=2).prefetch(2)


CUT = {
    "map": lambda: decoded(shuffled()).batch(5),
    "parallel map": lambda: decoded(shuffled(), num_parallel_calls=4).batch(5).prefetch(2),
    "overtaking map": lambda: decoded(shuffled(), num_parallel_calls=4, deterministic=False).batch(5),
    "prefetch between": lambda: decoded(shuffled()).prefetch(3).batch(5),
    "drop_remainder": lambda: decoded(shuffled()).batch(5, drop_remainder=True),
    "parallel batch": lambda: decoded(shuffled()).batch(6, num_parallel_calls=2),
    "static and even": lambda: decoded(shuffled()).batch(12, drop_remainder=True),
    "one row in a batch": lambda: decoded(shuffled()).batch(11),
    "batches of one": lambda: decoded(shuffled()).batch(1).take(4),
    "repeat": lambda: decoded(shuffled()).repeat(2).batch(5),
    "endless": lambda: decoded(shuffled()).repeat().batch(5).take(12),
    "repeated batches": lambda: decoded(shuffled()).batch(5).repeat(2),
    "take and skip": lambda: decoded(shuffled()).skip(2).take(17).batch(5),
    "batches taken": lambda: decoded(shuffled()).batch(5).skip(1).take(2),
    "options": lambda: decoded(shuffled()).batch(5).with_options(tf.data.Options()),
    "cache before": lambda: decoded(source().cache().shuffle(9, seed=4)).batch(5),
    "a length that is said": lambda: (
        decoded(shuffled()).batch(5).apply(tf.data.experimental.assert_cardinality(5)).prefetch(1)
    ),
    "filter before": lambda: decoded(source().filter(lambda x, y: y != 2)).batch(5),
    "dicts": lambda: decoded(shuffled()).map(as_dict).batch(5),
    "lengths": lambda: decoded(shuffled()).map(lambda x, y: (x[:y], y)).padded_batch(5, ([6], [])),
    "padding": lambda: decoded(shuffled()).padded_batch(5, ([6], []), (tf.constant(7.0), tf.constant(1, tf.int64))),
    "rows after": lambda: decoded(shuffled()).batch(5).map(by_rows, num_parallel_calls=2),
    "static rows after": lambda: decoded(shuffled()).batch(12, drop_remainder=True).map(by_rows),
    "enumerate": lambda: (
        decoded(shuffled(), num_parallel_calls=2)
        .enumerate()
        .map(lambda at, xy: (xy[0] + tf.cast(at, tf.float32), xy[1]))
        .batch(5)
    ),
    "zip": lambda: tf.data.Dataset.zip((decoded(source()).skip(1), source().repeat(2).map(by_element))).batch(5),
    "zip of dicts": lambda: tf.data.Dataset.zip(
        {"one": decoded(source()).map(as_dict), "two": tf.data.Dataset.range(20)}
    ).batch(4),
    "ragged": lambda: decoded(shuffled()).map(lambda x, y: (tf.RaggedTensor.from_tensor(x[None])[0], y)).batch(5),
}
ROWS_ONLY = {
    "rows alone": lambda: shuffled().batch(5).map(by_rows),
    "examples parsed": lambda: serialized().batch(5).map(parsed(), num_parallel_calls=2),
    "batches shuffled": lambda: source().batch(5).shuffle(4, seed=1).map(by_rows).prefetch(1),
    "arrays": arrays,
    "static arrays": lambda: arrays(rows=24, batch=6),
}


def leaves(element):
    return [np.asarray(v.to_tensor() if isinstance(v, tf.RaggedTensor) else v) for v in tf.nest.flatten(element)]


def same(found, expected):
    tf.nest.assert_same_structure(found, expected)
    for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.tolist() == theirs.tolist() if ours.dtype == object else ours.tobytes() == theirs.tobytes()


@pytest.mark.sample("map", "arrays")
@pytest.mark.parametrize("name", [*CUT, *ROWS_ONLY])
def test_a_worker_makes_its_rows_and_no_others(name):
    make = (CUT | ROWS_ONLY)[name]
    calls.clear()
    expected = list(CUT["parallel map"]() if name == "overtaking map" else make())  # one order for all workers
    work = calls["decode"]
    sizes = [len(leaves(batch)[0]) for batch in expected]
    for workers in RANGES.values():
        for ranges in workers:
            calls.clear()
            found = list(early_cut.rows_of(make(), ranges).make(ranges))
            assert [int(total) for _, total in found] == sizes
            for (rows, _), batch in zip(found, expected, strict=True):
                same(rows, ranges.take(batch)[0])
            if work:
                assert calls["decode"] == sum(map(ranges.rows, sizes)), (work, ranges)


@pytest.mark.sample("0-map")
@pytest.mark.parametrize(
    "name", ["map", "static and even", "dicts", "repeated batches", "rows after", "arrays", "static arrays"]
)
@pytest.mark.parametrize("number", [0, 3])
def test_one_batch_is_shown_whole_besides(name, number):
    make = (CUT | ROWS_ONLY)[name]
    expected = list(make())
    shown = len(leaves(expected[min(number, len(expected) - 1)])[0])
    for ranges in (*RANGES["2x1"], RANGES["2x2"][1]):
        found = iter(early_cut.rows_of(make(), ranges).make_showing(ranges, number))
        for at, batch in enumerate(expected):
            if at == number:
                parts = [next(found)[0]]
                rows = len(leaves(parts[0])[0])
                parts += [next(found)[0] for _ in range(1, -(-shown // rows))]
                whole = [np.concatenate(each)[:shown] for each in zip(*map(leaves, parts), strict=True)]
                assert [each.tobytes() for each in whole] == [each.tobytes() for each in leaves(batch)]
            same(next(found)[0], ranges.take(batch)[0])
        assert next(found, None) is None


def mixed(x, y):
    return x - tf.reduce_mean(x, 0), y


def test_rows_of_a_registered_dataset_are_taken_further():
    made, base = [], source().batch(5)

    def make(ranges):
        made.append(ranges)
        return base.map(lambda *batch: ranges.take(batch))

    worker_rows.register(base, worker_rows.WorkerRows(make, lambda: "first"))
    whole = base.map(by_rows).skip(1).prefetch(1)
    expected, rows = list(whole), early_cut.rows_of(whole, Ranges((1,), 2))
    found = list(rows.make(Ranges((1,), 2)))
    for (ours, total), batch in zip(found, expected, strict=True):
        same(ours, Ranges((1,), 2).take(batch)[0])
        assert int(total) == len(batch[0])
    assert made == [Ranges((1,), 2)] and rows.first() == "first"
    assert early_cut.rows_of(base.map(mixed), Ranges((1,), 2)) is None


WHOLE = {
    "nothing to do": lambda: shuffled().batch(5),
    "map before the shuffle": lambda: shuffled(decoded(source())).batch(5),
    "random": lambda: source().map(lambda x, y: (x + tf.random.uniform([3]), y)).batch(5),
    "seeded": lambda: source().map(lambda x, y: (x + tf.random.uniform([3], seed=1), y)).batch(5),
    "Python": lambda: source().map(lambda x, y: (tf.py_function(lambda x: x, [x], tf.float32), y)).batch(5),
    "filter after": lambda: decoded(source()).filter(lambda x, y: y != 2).batch(5),
    "unbatch after": lambda: source().batch(5).map(by_rows).unbatch().batch(5),
    "cache after": lambda: decoded(shuffled()).cache().batch(5),
    "cached batches": lambda: decoded(shuffled()).batch(5).cache(),
    "mixes rows": lambda: decoded(shuffled()).batch(5).map(mixed),
    "rounds by place": lambda: shuffled().batch(5).map(lambda x, y: (tf.exp(x), y)),
    "pads to the longest": lambda: decoded(shuffled()).map(lambda x, y: (x[:y], y)).padded_batch(5),
    "a number for the batch": lambda: shuffled().batch(5).map(lambda x, y: (x, tf.shape(x)[0])),
    "reversed": lambda: shuffled().batch(5).map(lambda x, y: (x[::-1], y)),
    "flat": lambda: shuffled().batch(5).map(lambda x, y: (tf.reshape(x, [-1]), y)),
    "sparse examples": lambda: serialized().batch(5).map(parsed(tf.io.VarLenFeature("int64"))),
    "ragged examples": lambda: serialized().batch(5).map(parsed(tf.io.RaggedFeature("int64"))),
    "examples padded to the longest": lambda: (
        serialized().batch(5).map(parsed(tf.io.FixedLenSequenceFeature([], "int64", allow_missing=True)))
    ),
    "a table of the batch's size": lambda: (
        shuffled().batch(5, drop_remainder=True).map(lambda x, y: (x + tf.ones([5, 3]), y))
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_known_to_be_by_rows_stays_whole(name):
    assert early_cut.rows_of(WHOLE[name](), Ranges((0,), 2)) is None


def test_the_order_of_the_epochs_is_that_of_the_dataset():
    """A shuffle counts iterations; those of the worker's rows are iterations of the dataset."""
    tf.random.set_seed(7)
    whole = tf.data.Dataset.range(12).shuffle(12, seed=3).map(lambda x: x + 1).batch(4)
    expected = [np.concatenate(list(whole.as_numpy_iterator())).tolist() for _ in range(4)]
    cut = tf.data.Dataset.range(12).shuffle(12, seed=3).map(lambda x: x + 1).batch(4)
    rows = early_cut.rows_of(cut, Ranges((0,), 1)).make(Ranges((0,), 1))
    found = []
    for epoch in range(4):
        found.append(
            np.concatenate([r.numpy() for r, _ in rows] if epoch % 2 else list(cut.as_numpy_iterator())).tolist()
        )
    assert found == expected and expected[0] != expected[1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            WHOLE["map before the shuffle"],
            "map (function), map (<lambda>), shuffle, batch. The last one that workers cannot",
        ),
        (
            WHOLE["seeded"],
            "from_tensor_slices, map (<lambda>), batch. The last one that workers cannot share is `map (<lambda>)`",
        ),
        (WHOLE["mixes rows"], "is `map (mixed)`. Its function is not known to give each row"),
        (
            lambda: tf.data.Dataset.from_generator(lambda: iter([[1]]), tf.int32).prefetch(1),
            "is `from_generator`. Python",
        ),
        (WHOLE["pads to the longest"], "is `padded_batch`. It pads each batch to its longest element"),
        (WHOLE["nothing to do"], ""),
        (CUT["map"], ""),
    ],
)
def test_the_log_names_what_every_worker_runs(make, words, caplog):
    with caplog.at_level("INFO", logger="tfgpu"):
        for rank in (1, 0):
            early_cut.rows_of(make(), Ranges((rank,), 2))
    assert words in caplog.text and caplog.text.count("Every worker runs") == bool(words)


def test_what_every_worker_runs_is_said_with_its_cost(caplog):
    """The costs are those of the iterator that the training reads: nothing is read besides."""
    dataset = decoded(source(400)).shuffle(9, seed=4).map(by_element).batch(5).prefetch(1)
    cut, obstacle = early_cut.find(dataset)
    note, ranges = early_cut.Note(dataset, cut, obstacle), Ranges((0,), 2)
    iterator = iter(early_cut.rows_of(dataset, ranges).make(ranges))
    for _ in range(2):
        next(iterator)
    found = notes.measure(iterator, 2, cut, note.stages)
    assert 0 < found.share <= 1 and found.batch_ms > 0 and "map (function)" in dict(found.largest), found
    whole = iter(dataset)
    next(whole)
    assert notes.measure(whole, 1, None, note.stages).share == 1
    with caplog.at_level("INFO", logger="tfgpu"):
        note.tell(found)
    assert f" They take {found}. The last one that workers cannot share is `shuffle`. It decides which" in caplog.text
    options = tf.data.Options()
    options.autotune.enabled = False
    silent = iter(dataset.with_options(options))
    next(silent)
    assert notes.measure(silent, 1, None, note.stages) is None


@dataclasses.dataclass
class Run:
    """What `Note.tell_with_cost` sees of a `fit`."""

    after_block: list = dataclasses.field(default_factory=list)
    exits: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    block: object = None


def test_a_shuffle_of_all_has_forgotten_what_it_cost_to_read_but_a_thread_has_looked(caplog, monkeypatch):
    looked, measure = threading.Event(), notes.measure

    def measured(*given):
        found = measure(*given)
        if found is not None:
            looked.set()
        return found

    def wait(x):
        assert looked.wait(300)
        return x

    def late(x):
        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), [3])

    def waits(x, y):
        return tf.cond(x[0] == last, lambda: late(x), lambda: x), y

    monkeypatch.setattr(notes, "measure", measured)
    last = next(iter(source().skip(ROWS - 1)))[0][0]
    dataset = decoded(source()).map(waits).shuffle(60, seed=4).batch(5).map(by_rows)
    cut, obstacle = early_cut.find(dataset)
    note, run = early_cut.Note(dataset, cut, obstacle), Run()
    unread = iter(dataset)
    note.tell_with_cost(run)
    data = types.SimpleNamespace(dataset=dataset)
    run.block = types.SimpleNamespace(iterator=types.SimpleNamespace(data=data, unread=unread, has_rows=False))
    next(unread)
    assert measure(unread, 1, None, note.stages) is None
    with caplog.at_level("INFO", logger="tfgpu"):
        run.after_block[0](10, 1.0)
        run.exits.close()
    told = caplog.text.split("They take ")[1]
    assert re.search(r"\bmap [0-9.e-]+ ms", told) and "is `shuffle`" in told
    assert not [each for each in threading.enumerate() if each.name == "tfgpu-costs"]

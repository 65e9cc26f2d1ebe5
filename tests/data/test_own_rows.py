"""Each worker reads, decodes and augments its own rows, and they are the rows of the whole batches, to the bit."""

import collections
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.core import batch_sharding, worker_rows
from tfgpu.data import bucket, load, mixture, pack, tokenized, write_shards
from tfgpu.data.augmentation import augment
from tfgpu.data.augmentation.stages import STAGES, parse_stages
from tfgpu.data.decoding import Reading
from tfgpu.data.examples import Examples
from tfgpu.data.position import Numbers
from tfgpu.data.sources import open_source

TOPOLOGIES = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)]  # workers, devices of each
ALL = ["flip", "rotate", "contrast", "mixup", "noise", "saturation", "cutmix", "hue"]


def ranges_of(worker, workers, devices):
    return worker_rows.Ranges(tuple(d * workers + worker for d in range(devices)), workers * devices)


def cut(batch, ranges):
    """The worker's rows of a whole batch, as the step cuts them today."""
    shards = [batch_sharding.replica_batch(batch, at, ranges.count).data for at in ranges.shards]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *shards)


def check(dataset, topologies=TOPOLOGIES, *, seek=lambda: None):
    """Reads an epoch on one device, and on every worker its rows of it."""
    seek()
    first = worker_rows.of(dataset).first()
    whole = list(dataset)  # looking at the first batch was no iteration
    tf.nest.map_structure(np.testing.assert_array_equal, first, whole[0])
    for workers, devices in topologies:
        for worker in range(workers):
            ranges = ranges_of(worker, workers, devices)
            seek()
            made = worker_rows.of(dataset).make(ranges)
            assert made.cardinality() == dataset.cardinality() == len(whole)
            assert made.options() == dataset.options()
            found = list(made)
            assert len(found) == len(whole)
            for (rows, total), batch in zip(found, whole, strict=True):
                expected = cut(batch, ranges)
                assert total.dtype == tf.int32 and int(total) == len(tf.nest.flatten(batch)[0])
                tf.nest.assert_same_structure(rows, expected)
                tf.nest.map_structure(np.testing.assert_array_equal, rows, expected)
    return whole


def images(count, side=9, channels=3):
    random = np.random.default_rng(0)
    return random.integers(0, 256, [count, side, side - 1, channels], dtype=np.uint8), np.arange(count) % 3


@pytest.fixture
def photos(tmp_path):
    for i, (x, y) in enumerate(zip(*images(29), strict=True)):
        path = tmp_path / "photos" / "abc"[y] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(x).numpy())
    return tmp_path / "photos"


@pytest.mark.sample("3-mixup")
@pytest.mark.parametrize("stage", sorted(STAGES))
@pytest.mark.parametrize("channels", [3, 9])
def test_each_stage_changes_some_rows_as_it_changes_the_whole_batch(stage, channels):
    """TensorFlow rounds the last bit of a sine or a product of matrices by the place in the tensor."""
    if channels != 3 and stage in ("hue", "saturation"):
        return
    zero = tf.constant(0, tf.int64)
    for total in (1, 2, 13, 21):
        x = tf.random.stateless_uniform([total, 8, 7, channels], seed=[1, 2])
        y = tf.one_hot(tf.range(total) % 3, 3)
        numbers = Numbers(seed=3, epoch=zero, start=zero + 5, count=total)
        stages = parse_stages([stage, stage])
        whole = augment.apply(x, y, stages, numbers)
        for chosen in ([0], [total - 1, 0], range(total // 2, total)):
            rows = tf.constant(list(chosen), tf.int64)
            have = augment.needed(stages, numbers, rows)
            found = augment.apply(tf.gather(x, have), tf.gather(y, have), stages, numbers, rows)
            for some, every in zip(found, whole, strict=True):
                np.testing.assert_array_equal(some, tf.gather(every, rows))


def test_only_stages_that_mix_need_other_rows():
    zero, rows = tf.constant(0, tf.int64), tf.constant([6, 7, 0], tf.int64)
    numbers = Numbers(seed=3, epoch=zero, start=zero, count=40)
    assert augment.needed(parse_stages(["flip", "noise"]), numbers, rows).numpy().tolist() == [6, 7, 0]
    one, two = (augment.needed(parse_stages(["mixup", "cutmix"][:n]), numbers, rows).numpy() for n in (1, 2))
    assert {0, 6, 7} < set(one) < set(two) and len(one) <= 6 and len(two) <= 12
    assert one.tolist() == sorted(set(one))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"label_smoothing": 0.1}, marks=pytest.mark.slow),
        pytest.param({"augment": ALL}, marks=pytest.mark.slow),
    ],
)
def test_examples_in_memory(options):
    data = load(images(60), global_batch=8, seed=2, validation=0.2, test=0.2, **options)
    whole = check(data.train, [(2, 1), (1, 3)], seek=lambda: data.seek(3))
    assert len(whole) > 3
    data.seek(4)
    assert not np.array_equal(next(iter(data.train))[0], whole[0][0])
    check(data.validation, [(3, 1)])
    check(data.test, [(2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages, batch, topologies",
    [
        ((), 28, [(3, 1), (2, 2)]),  # 29 = 28 + 1: the last batch has one row for all workers
        (["mixup", "noise"], 8, [(2, 1)]),
        (ALL, 8, TOPOLOGIES),
        (ALL, 28, TOPOLOGIES),
    ],
)
def test_images_that_are_decoded_on_demand(photos, stages, batch, topologies):
    options = {"global_batch": batch, "augment": stages, "seed": 4, "validation": 0, "test": 0, "cache": "none"}
    data = load(str(photos), **options)
    check(data.train, topologies, seek=lambda: data.seek(2))


@pytest.mark.slow
def test_turns_of_many_rows():
    """Sines of a worker's rows alone would have another last bit in two of these pictures."""
    data = load("digits", global_batch=100, augment=["rotate"], seed=5)
    check(data.train, [(2, 1)], seek=lambda: data.seek(0))


@pytest.mark.slow
def test_mixtures():
    data = load(mixture([(images(30), 3), (images(12), 1)]), global_batch=16, seed=1, validation=0, test=0)
    check(data.train, [(2, 1)], seek=lambda: data.seek(2))


@pytest.mark.slow
def test_files_of_records_and_caches(tmp_path):
    write_shards(images(40), tmp_path / "shards", shards=3)
    options = {"global_batch": 16, "augment": ["mixup"], "seed": 1, "validation": 0.3, "test": 0}
    for more in ({"memory_bytes": 0}, {"cache": "disk", "cache_directory": str(tmp_path / "kept")}):
        data = load(str(tmp_path / "shards"), **options, **more)
        assert data.info.cache == ("none" if "memory_bytes" in more else "disk")
        check(data.train, [(2, 1)], seek=lambda d=data: d.seek(0))
        check(data.validation, [(2, 1)])


@pytest.mark.slow
def test_texts(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be, " * 40)
    corpus = load(f"corpus:{tmp_path}/a.txt", global_batch=7, length=16, validation=0, test=0)
    check(corpus.train, [(2, 2)], seek=lambda: corpus.seek(1))
    random = np.random.default_rng(0)
    sequences = [list(range(1, 1 + length)) for length in random.integers(2, 30, 50)]
    packed = pack(sequences, length=40, global_batch=4, seed=1)
    single = bucket(sequences, [len(s) % 2 for s in sequences], global_batch=8, boundaries=[8, 16, 32])
    nexts = bucket(sequences, "next", global_batch=8)
    columns = {"input_ids": sequences, "labels": [len(s) % 2 for s in sequences]}
    tokens = tokenized(columns, global_batch=3, lengths=[4, 8, 16, 20, 24, 28, 32])
    for data in (packed, single, nexts, tokens):
        check(data.train, [(2, 1)], seek=lambda d=data: d.seek(2))
    assert len({x["input_ids"].shape[1] for x, _ in tokens.train}) > 1  # of the whole batch, not of the rows


def counted(count, loads):
    def read(index):
        def one(i):
            loads[int(i)] += 1
            return np.full([6, 6, 3], i, np.uint8)

        return tf.ensure_shape(tf.numpy_function(one, [index], tf.uint8), [6, 6, 3])

    def ahead(indices):
        """As remote sources have it: what will be read is counted beforehand, from 1,000."""
        return tf.numpy_function(lambda each: loads.update(1000 + n for n in each.tolist()) or 0, [indices], tf.int64)

    own = {"train": np.arange(count)}
    return Examples("counted", np.arange(count) % 3, (6, 6, 3), ("a", "b", "c"), load=read, ahead=ahead, own=own)


@pytest.mark.slow
@pytest.mark.parametrize("stages, most", [(["flip"], 1.0), (["mixup"], 1.9)])
def test_a_worker_reads_its_share(stages, most):
    """Of 3 workers each reads a third. One that mixes reads the partners too, each example once a batch."""
    every = collections.Counter()
    for worker in range(3):
        loads = collections.Counter()
        data = load(counted(96, loads), global_batch=24, augment=stages, validation=0, test=0)
        list(worker_rows.of(data.train).make(ranges_of(worker, 3, 1)))
        begun = {number - 1000 for number in loads if number >= 1000}
        loads = collections.Counter({number: times for number, times in loads.items() if number < 1000})
        assert begun == set(loads)  # nothing else is fetched from far away
        assert 1.0 <= loads.total() / (96 / 3) <= most and max(loads.values()) == 1
        every += loads
    assert len(every) == 96 and (stages == ["mixup"]) == (every.total() > 96)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(), ["mixup"]])
def test_a_corrupt_example_is_named_by_the_worker_that_reads_it(photos, stages):
    examples = open_source(str(photos), Reading(examine_bytes=0, memory_bytes=0))
    bad = sorted(photos.rglob("*.png"))[11]
    bad.write_bytes(b"text")
    options = {"global_batch": 8, "augment": stages, "validation": 0, "test": 0, "shuffle": False}
    data = load(dataclasses.replace(examples, copies=np.arange(29)), **options)  # example 11: row 3 of batch 1
    for worker in range(2):
        made = iter(worker_rows.of(data.train).make(ranges_of(worker, 2, 1)))
        next(made)
        if worker == 0 or stages:
            with pytest.raises(tf.errors.InvalidArgumentError, match=f"Corrupt:.*{bad}"):
                for _ in made:
                    pass
        else:
            assert len(list(made)) == 3
